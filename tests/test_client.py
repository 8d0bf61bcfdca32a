import asyncio

import pytest

from taskharbor import AsyncClient, Client, JobRequest, JobState
from taskharbor.client import portal
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobNotDead, JobNotFound, WaitTimeout


@pytest.fixture
def client() -> Client:
    return Client(MemoryDriver())


def test_many_are_checked_before_any_is_sent(client: Client) -> None:
    requests = [JobRequest(type="t", payload=n) for n in range(2500)] + [JobRequest(type="")]
    with pytest.raises(InvalidRequest):
        client.enqueue_many(requests)
    assert client.stats() == []
    accepted = client.enqueue_many(requests[:-1])
    assert len({one.id for one in accepted}) == 2500
    assert client.stats()[0].counts[JobState.READY] == 2500


def test_a_stream_is_sent_chunk_by_chunk(client: Client) -> None:
    requests = (JobRequest(type="t") for _ in range(25))
    assert [len(batch) for batch in client.enqueue_stream(requests, chunk=10)] == [10, 10, 5]
    with pytest.raises(InvalidRequest, match="chunk"):
        list(client.enqueue_stream([], chunk=0))


def test_what_a_driver_refuses_is_raised(client: Client) -> None:
    for call in (client.get, client.cancel, client.requeue):
        with pytest.raises(JobNotFound, match="no job with this id"):
            call("nobody")
    with pytest.raises(JobNotDead):
        client.requeue(client.enqueue(JobRequest(type="t")).id)


def test_waiting_for_a_job_that_does_not_end(client: Client) -> None:
    job = client.enqueue(JobRequest(type="t")).id
    with pytest.raises(WaitTimeout, match="still ready"):
        client.wait_for(job, timeout=0.01)
    client.cancel(job)
    assert client.wait_for(job, timeout=5).state is JobState.CANCELLED


async def test_one_client_serves_many_threads_and_many_tasks() -> None:
    def produce(client: Client) -> None:
        for _ in range(20):
            client.enqueue(JobRequest(type="t"))

    with Client("memory://") as client:
        await asyncio.gather(*(asyncio.to_thread(produce, client) for _ in range(8)))
        assert client.stats()[0].counts[JobState.READY] == 160
    async with AsyncClient("memory://") as shared:
        await asyncio.gather(*(shared.enqueue(JobRequest(type="t")) for _ in range(50)))
        assert (await shared.stats())[0].counts[JobState.READY] == 50


def test_a_synchronous_call_from_the_portals_own_loop_does_not_hang(client: Client) -> None:
    async def misuse() -> None:
        client.get("x")

    with pytest.raises(RuntimeError, match="wait for itself"):
        portal().call(misuse())


async def test_a_client_that_found_the_backend_away_opens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its first call."""
    opened = (driver := MemoryDriver()).open

    async def refused() -> None:
        raise BackendUnavailable("nobody listens")

    monkeypatch.setattr(driver, "open", refused)
    client = AsyncClient(driver)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="nobody listens"):
            await client.enqueue(JobRequest(type="t"))
    await client.close()
    with pytest.raises(BackendUnavailable, match="nobody listens"):
        await client.enqueue(JobRequest(type="t"))
    monkeypatch.setattr(driver, "open", opened)
    accepted = await client.enqueue(JobRequest(type="t"))
    assert (await client.get(accepted.id)).state is JobState.READY
    await client.close()
