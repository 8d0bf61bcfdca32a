"""Long polls: what they cost a broker, and clients that leave. (The kit shows, through a broker, that no wake-up is missed.)"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from broker.broker_client import Client, Direct
from broker.broker_loops import PATIENCE, rounds_until, wait_until, waiting_claim
from taskharbor.broker.error_responses import Problem
from taskharbor.drivers.contract import Woken
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.operations import Wait
from taskharbor.testing.broker import broker_thread, running_broker


async def test_so_many_queues_are_watched_and_one_that_nobody_waits_for_is_forgotten_and_misses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names cost a caller nothing. A watch costs the broker a task, and its looks at the store take time from all callers."""
    monkeypatch.setattr("taskharbor.broker.runtime.LOOK_AGAIN", 0.001)
    monkeypatch.setattr("taskharbor.broker.runtime.MOST_WATCHED", 256)
    polls = Direct().app.service.long_polls
    await polls.wait(Wait([f"queue-{number}" for number in range(255)], 0, 0), "c")
    seen = (await polls.wait(Wait(["q"], 0, 0), "c")).seen
    with pytest.raises(Problem, match="too_many_waiting"):
        await polls.wait(Wait(["one more"], 0, 0), "c")
    for watcher in polls._watchers.values():
        watcher.asked_at -= 5
    await rounds_until(lambda: not polls._watchers)
    # Also texts that are not of this broker, or not of this life.
    for text in (seen, "another.7", "0/another.7", "x" * 300):
        assert (await polls.wait(Wait(["q"], 0, PATIENCE, text), "c")).woken
    await polls.close()


class Watched(MemoryDriver):
    """A driver whose waits are counted, some of which fail."""

    looks = 0
    failing: range = range(0)

    async def wait(self, *args: Any, **options: Any) -> Woken:
        self.looks += 1
        if self.looks in self.failing:
            raise RuntimeError("nobody expected this")
        return await super().wait(*args, **options)


def test_a_queue_is_not_forgotten_while_a_client_waits_though_the_store_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskharbor.broker.runtime.LOOK_AGAIN", 0.001)
    driver = Watched()
    with waiting_claim(driver) as (broker, claimed, other):
        monkeypatch.setattr("taskharbor.broker.runtime.FORGET_AFTER", 0.0)
        looks = driver.looks
        driver.failing = range(looks + 2, looks + 5)
        wait_until(broker, lambda: driver.looks > looks + 7)
        job_id = other.submit()
        assert [job["id"] for job in claimed.result(PATIENCE)] == [job_id]


def test_a_claim_that_waits_gets_a_job_of_its_type_that_comes_later() -> None:
    """More who wait than allowed are told to come back."""
    with waiting_claim(asked={"types": ["b"]}, max_waiting=1) as (_, claimed, second):
        refused = second.post("/v1/jobs/claim", {"wait_seconds": 5})
        assert refused.refusal == (429, "too_many_waiting")
        assert refused.headers["retry-after"] == "1"
        # Only waiting is refused.
        assert second.claim() == []
        second.submit(type="a")
        job_id = second.submit(type="b")
        assert [job["id"] for job in claimed.result(PATIENCE)] == [job_id]


def test_a_claim_that_waited_in_vain_is_answered_with_nothing() -> None:
    with running_broker("memory://", max_wait_seconds=0.01) as url, Client(url) as client:
        assert client.claim(wait_seconds=PATIENCE) == []


def test_a_client_that_leaves_is_given_no_job() -> None:
    """Its wait ends when it hangs up. A claim that is repeated under its name is made again for a client that is still there."""
    body = b'{"wait_seconds": 60}'
    request = (
        b"POST /v1/jobs/claim HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"TaskHarbor-Request: n1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    with broker_thread("memory://") as broker, Client(broker.url) as other:
        address = ("127.0.0.1", int(broker.url.rpartition(":")[2]))
        tasks = broker.server.server_state.tasks
        long_polls = broker.app.service.long_polls
        with socket.create_connection(address) as leaving:
            leaving.sendall(request)
            wait_until(broker, lambda: long_polls.waiting == 1)
        wait_until(broker, lambda: long_polls.waiting == 0)
        other.submit()
        (job,) = other.claim()
        # Not after the end of a lease.
        assert job["fence"] == 1
        with socket.create_connection(address, timeout=PATIENCE) as second:
            with socket.create_connection(address) as first:
                first.sendall(request)
                wait_until(broker, lambda: long_polls.waiting == 1)
                second.sendall(request)
                wait_until(broker, lambda: len(tasks) == 2)
            wait_until(broker, lambda: len(tasks) == 1 and long_polls.waiting == 1)
            job_id = other.submit()
            answer = second.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert job_id.encode() in answer
