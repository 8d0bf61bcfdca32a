"""Long polls: what they cost a broker, and clients that leave. (The kit shows, through a broker, that no wake-up is missed.)"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.broker_client import Client
from broker.broker_loops import PATIENCE, rounds_until, wait_until, waiting_claim
from records import make_record
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.error_responses import Problem
from taskharbor.broker.runtime import LongPolls
from taskharbor.clock import SystemClock
from taskharbor.drivers.contract import Driver, Woken
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.operations import Wait
from taskharbor.testing.broker import broker_thread, running_broker

# -- the numbers behind them: many clients, one handle on the store ---------------------------------------------


class Watched(MemoryDriver):
    """A driver whose waits are counted, the first of which fail."""

    looks = 0
    failures = 0

    async def wait(self, *args: Any, **options: Any) -> Woken:
        self.looks += 1
        if self.looks <= self.failures:
            raise RuntimeError("nobody expected this")
        return await super().wait(*args, **options)


@asynccontextmanager
async def open_polls(driver: Driver, **options: Any) -> AsyncIterator[LongPolls]:
    async with driver:
        polls = LongPolls(driver, BrokerConfig(**options), SystemClock().now)
        yield polls
        await polls.close()


async def wait(polls: LongPolls, seen: str | None, timeout: float = PATIENCE, *queues: str) -> Woken:
    return await polls.wait(Wait(list(queues or ("q",)), 0, timeout, seen))


async def quiet(polls: LongPolls, seen: str | None = None) -> str:
    """What has been seen once nothing more stirs."""
    for _ in range(50):
        told = await wait(polls, seen, 0.01)
        seen = told.seen
        if not told.woken:
            return seen
    raise AssertionError("it never falls silent")


async def store(driver: Driver, **fields: Any) -> None:
    now = SystemClock().now()
    await driver.enqueue([make_record(now=now, **fields)], now=now)


async def test_a_queue_that_nobody_waits_for_is_forgotten_and_misses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names cost a caller nothing, and each look at the store takes time from all callers."""
    monkeypatch.setattr("taskharbor.broker.runtime.LOOK_AGAIN", 0.001)
    async with open_polls(MemoryDriver()) as polls:
        await wait(polls, None, 0, *(f"queue-{number}" for number in range(255)))
        seen = (await wait(polls, None, 0)).seen
        for watcher in polls._watchers.values():
            watcher.asked_at -= 5
        await rounds_until(lambda: not polls._watchers)
        assert (await wait(polls, seen)).woken
        # Texts that are not of this broker, or not of this life.
        for foreign in ("another.7", "0/another.7", "x" * 300):
            assert (await wait(polls, foreign)).woken


async def test_a_queue_is_not_forgotten_while_a_client_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.broker.runtime.LOOK_AGAIN", 0.001)
    driver = Watched()
    async with open_polls(driver) as polls:
        waiting = asyncio.create_task(wait(polls, await quiet(polls)))
        await rounds_until(lambda: polls.waiting == 1)
        monkeypatch.setattr("taskharbor.broker.runtime.FORGET_AFTER", 0.0)
        looks = driver.looks
        await rounds_until(lambda: driver.looks > looks + 2)
        await store(driver)
        assert (await waiting).woken


async def test_more_queues_than_allowed_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names cost a caller nothing, a watch costs the broker a task."""
    monkeypatch.setattr("taskharbor.broker.runtime.MOST_WATCHED", 2)
    async with open_polls(MemoryDriver()) as polls:
        await wait(polls, None, 0, "a", "b")
        with pytest.raises(Problem, match="too_many_waiting"):
            await wait(polls, None, 0, "c")
        await wait(polls, None, 0, "a", "b")


async def test_a_store_that_fails_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.broker.runtime.LOOK_AGAIN", 0.001)
    driver = Watched()
    driver.failures = 3
    async with open_polls(driver) as polls:
        seen = (await wait(polls, None, 0)).seen
        await rounds_until(lambda: driver.looks > 3)
        await store(driver)
        assert (await wait(polls, seen)).woken


# -- claims that wait -------------------------------------------------------------------------------------------


def test_a_claim_that_waits_gets_a_job_of_its_type_that_comes_later() -> None:
    with waiting_claim({"types": ["b"]}) as (_, claimed, producing):
        producing.submit(type="a")
        job_id = producing.submit(type="b")
        assert [job["id"] for job in claimed.result(PATIENCE)] == [job_id]


def test_more_who_wait_than_allowed_are_told_to_come_back() -> None:
    with waiting_claim(max_waiting=1) as (_, claimed, second):
        refused = second.post("/v1/jobs/claim", {"wait_seconds": 5})
        assert refused.refusal == (429, "too_many_waiting")
        assert refused.headers["retry-after"] == "1"
        # Only waiting is refused.
        assert second.claim() == []
        second.submit()
        assert len(claimed.result(PATIENCE)) == 1


def test_a_stop_answers_who_waits_at_once() -> None:
    with waiting_claim() as (broker, claimed, _):
        broker.loop.call_soon_threadsafe(broker.server.stop)
        assert claimed.result(PATIENCE) == []


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
