import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from taskharbor import (
    AsyncClient,
    Client,
    Failure,
    JobRecord,
    JobRequest,
    JobState,
    QueueNotFound,
    QueueSettings,
)
from taskharbor.client import portal
from taskharbor.drivers.contract import DAY, Fail
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobNotDead, JobNotFound, WaitTimeout
from taskharbor.jobs import to_datetime


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


def test_settings_change_by_field(client: Client) -> None:
    """A queue that was never seen is refused, and enqueueing makes it known."""
    for change in (client.pause, client.resume, client.configure):
        with pytest.raises(QueueNotFound, match="queue 'api' is not known"):
            change("api")
    assert client.stats() == []
    client.enqueue(JobRequest(type="t", queue="api"))
    client.configure("api", max_inflight=2, keep_done=timedelta(days=1), keep_dead=None, keep_attempts=1.5)
    client.pause("api")
    kept = QueueSettings(max_inflight=2, keep_done_us=DAY, keep_dead_us=None, keep_attempts_us=1_500_000)
    assert client.settings("api") == replace(kept, paused=True)
    client.resume("api")
    client.configure("api", max_inflight=None)
    assert client.settings("api") == replace(kept, max_inflight=None)
    client.configure("new", failure_queue="failed", create=True)
    assert client.settings("new") == QueueSettings(failure_queue="failed")
    with pytest.raises(TypeError, match="unknown setting keep_don of queue 'new'; known: paused"):
        client.configure("new", keep_don=1)  # type: ignore[call-arg]
    for wrong in ({"max_inflight": 0}, {"keep_done": "a day"}, {"keep_done": -1}, {"failure_queue": "new"}):
        with pytest.raises(InvalidRequest):
            client.configure("new", **wrong)


def test_a_declaration_is_applied_where_it_differs_from_the_last(client: Client) -> None:
    """What an operator changed stays. So does a setting that is no longer declared."""
    client.declare("mail", max_inflight=2, keep_done=60)
    client.configure("mail", max_inflight=9, failure_queue="failed")
    client.declare("mail", keep_done=timedelta(minutes=1), max_inflight=2)
    assert client.settings("mail").max_inflight == 9
    client.declare("mail", keep_done=120, max_inflight=2)
    client.declare("mail", paused=True)  # Another app, which shares the queue.
    client.declare("mail", keep_done=120, max_inflight=2)
    settings = client.settings("mail")
    assert (settings.max_inflight, settings.keep_done_us, settings.paused) == (9, 120_000_000, True)
    assert settings.failure_queue == "failed"
    client.declare("mail", max_inflight=3)
    assert client.settings("mail").max_inflight == 3
    client.declare("bare")
    assert client.settings("bare") == QueueSettings(declaration="{}")


def test_cancel_by_key_and_requeue_at_a_time(client: Client) -> None:
    async def lease() -> JobRecord:
        (job,) = await client.driver.reserve("default", limit=1, lease_for=DAY, now=now, worker="w")
        return job

    later = datetime(2100, 1, 1, tzinfo=UTC)
    handle = client.enqueue(JobRequest(type="t", key="k"))
    now = client.now()
    held = portal().call(lease())
    waiting = client.enqueue(JobRequest(type="t", key="k"))
    assert handle.cancel(only_waiting=True) is JobState.INFLIGHT
    assert client.cancel_key("default", "k", only_waiting=True) == 1
    assert (waiting.state(), handle.record().cancel_requested) == (JobState.CANCELLED, False)
    assert client.cancel_keys("default", ["k", "no"]) == [1, 0]
    failure = Fail(held.id, held.token or "", 3, Failure("E", "boom"))
    portal().call(client.driver.settle([failure], now=now))
    with pytest.raises(InvalidRequest, match="no time zone"):
        handle.requeue(run_at=datetime(2100, 1, 1))
    assert handle.requeue(run_at=later, keep_counts=True) is JobState.SCHEDULED
    assert (to_datetime(handle.record().run_at_us), handle.record().attempts) == (later, 3)


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
