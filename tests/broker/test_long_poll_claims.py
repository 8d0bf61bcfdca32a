"""Long polls: woken by what becomes runnable, never missed, never for a client that has left."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from broker.broker_client import Client
from broker.broker_loops import PATIENCE, wait_until
from taskharbor.testing.broker import broker_thread, running_broker


def test_a_claim_that_waits_gets_a_job_that_comes_later() -> None:
    with (
        broker_thread("memory://") as broker,
        ThreadPoolExecutor() as pool,
        Client(broker.url) as waiting,
        Client(broker.url) as producing,
    ):
        claimed = pool.submit(waiting.claim, wait_seconds=PATIENCE)
        wait_until(broker, lambda: broker.app.service.long_polls.waiting == 1)
        job_id = producing.submit()
        assert [job["id"] for job in claimed.result(PATIENCE)] == [job_id]


def test_a_claim_of_one_type_is_not_ended_by_another_type() -> None:
    with (
        broker_thread("memory://") as broker,
        ThreadPoolExecutor() as pool,
        Client(broker.url) as waiting,
        Client(broker.url) as producing,
    ):
        claimed = pool.submit(waiting.claim, wait_seconds=PATIENCE, types=["b"])
        wait_until(broker, lambda: broker.app.service.long_polls.waiting == 1)
        producing.submit(type="a")
        job_id = producing.submit(type="b")
        assert [job["id"] for job in claimed.result(PATIENCE)] == [job_id]


def test_a_claim_wakes_when_a_job_comes_due_or_a_lease_ends() -> None:
    with running_broker("memory://") as url, Client(url) as client:
        job_id = client.submit(delay_seconds=0.05)
        (job,) = client.claim(wait_seconds=PATIENCE, lease_seconds=0.05)
        assert job["id"] == job_id
        (again,) = client.claim(wait_seconds=PATIENCE)
        assert (again["id"], again["stalls"]) == (job_id, 1)


def test_a_claim_that_waited_in_vain_is_answered_with_nothing() -> None:
    with running_broker("memory://", max_wait_seconds=0.01) as url, Client(url) as client:
        assert client.claim(wait_seconds=PATIENCE) == []


def test_a_client_that_leaves_is_given_no_job() -> None:
    """Its wait ends when it hangs up: the job goes to the next one at once, and not after a lease."""
    with broker_thread("memory://") as broker, Client(broker.url) as other:
        long_polls = broker.app.service.long_polls
        body = b'{"wait_seconds": 60, "worker": "gone"}'
        with socket.create_connection(("127.0.0.1", int(broker.url.rpartition(":")[2]))) as leaving:
            leaving.sendall(
                b"POST /v1/jobs/claim HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            wait_until(broker, lambda: long_polls.waiting == 1)
        wait_until(broker, lambda: long_polls.waiting == 0)
        other.submit()
        (job,) = other.claim()
        assert (job["worker"], job["fence"]) == ("everybody", 1)


def test_a_repeated_claim_goes_on_when_the_first_client_leaves() -> None:
    """The claim is made again for the client that is still there."""
    body = b'{"wait_seconds": 60}'
    request = (
        b"POST /v1/jobs/claim HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"TaskHarbor-Request: n1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    with broker_thread("memory://") as broker, Client(broker.url) as producing:
        address = ("127.0.0.1", int(broker.url.rpartition(":")[2]))
        tasks = broker.server.server_state.tasks
        long_polls = broker.app.service.long_polls
        with socket.create_connection(address, timeout=PATIENCE) as second:
            with socket.create_connection(address) as first:
                first.sendall(request)
                wait_until(broker, lambda: long_polls.waiting == 1)
                second.sendall(request)
                wait_until(broker, lambda: len(tasks) == 2)
            wait_until(broker, lambda: len(tasks) == 1 and long_polls.waiting == 1)
            job_id = producing.submit()
            answer = second.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 200")
            assert job_id.encode() in answer


def test_a_stop_answers_who_waits_at_once() -> None:
    with ThreadPoolExecutor() as pool, broker_thread("memory://") as broker, Client(broker.url) as waiting:
        claimed = pool.submit(waiting.claim, wait_seconds=60)
        wait_until(broker, lambda: broker.app.service.long_polls.waiting == 1)
        broker.loop.call_soon_threadsafe(broker.server.stop)
        assert claimed.result(PATIENCE) == []


def test_more_who_wait_than_allowed_are_told_to_come_back() -> None:
    with (
        broker_thread("memory://", max_waiting=1) as broker,
        ThreadPoolExecutor() as pool,
        Client(broker.url) as first,
        Client(broker.url) as second,
    ):
        claimed = pool.submit(first.claim, wait_seconds=PATIENCE)
        wait_until(broker, lambda: broker.app.service.long_polls.waiting == 1)
        refused = second.post("/v1/jobs/claim", {"wait_seconds": 5})
        assert (refused.status, refused.body["code"]) == (429, "too_many_waiting")
        assert refused.headers["retry-after"] == "1"
        # Only waiting is refused.
        assert second.claim() == []
        second.submit()
        assert len(claimed.result(PATIENCE)) == 1
