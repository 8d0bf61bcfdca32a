"""The numbers behind long polls: many clients, one handle on the store."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from broker.broker_loops import PATIENCE, on_a_loop, rounds_until
from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.problems import Problem
from taskharbor.broker.service import LongPolls
from taskharbor.clock import SystemClock
from taskharbor.drivers.contract import Woken
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.operations import Wait
from taskharbor.jobs import SECOND, JobRecord


def long_polls_over(driver: MemoryDriver, **options: Any) -> LongPolls:
    return LongPolls(driver, BrokerConfig(**options), SystemClock().now)


def job(number: int, driver_now: int, type: str = "t") -> JobRecord:
    return JobRecord(id=f"job-{number}", type=type, run_at_us=driver_now, created_at_us=driver_now)


async def quiet(polls: LongPolls, seen: str | None) -> str:
    """What has been seen once nothing more stirs."""
    for _ in range(50):
        told = await polls.wait(Wait(["default"], 0, 0.01, seen))
        seen = told.seen
        if not told.woken:
            return seen
    raise AssertionError("it never falls silent")


@on_a_loop
async def test_who_waits_for_the_first_time_is_told_to_look() -> None:
    async with MemoryDriver() as driver:
        polls = long_polls_over(driver)
        told = await polls.wait(Wait(["default"], 0, 5, None))
        assert told.woken
        assert (await polls.wait(Wait(["default"], 0, 5, "another.7"))).woken
        assert (await polls.wait(Wait(["default"], 0, 5, "x" * 300))).woken
        await quiet(polls, told.seen)
        await polls.close()


@on_a_loop
async def test_a_stir_between_two_waits_is_not_missed_by_anybody() -> None:
    """Clients share one handle on the store; what one was told the other must still hear."""
    async with MemoryDriver() as driver:
        polls = long_polls_over(driver)
        first = await quiet(polls, None)
        second = await quiet(polls, first)
        now = SystemClock().now()
        await driver.enqueue([job(1, now)], now=now)
        assert (await polls.wait(Wait(["default"], 0, PATIENCE, second))).woken
        assert (await polls.wait(Wait(["default"], 0, PATIENCE, first))).woken
        await polls.close()


@on_a_loop
async def test_a_queue_that_is_forgotten_is_watched_anew_and_misses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskharbor.broker.service.FORGET_AFTER", 0.0)
    monkeypatch.setattr("taskharbor.broker.service.LOOK_AGAIN", 0.001)
    async with MemoryDriver() as driver:
        polls = long_polls_over(driver)
        seen = (await polls.wait(Wait(["default"], 0, 0, None))).seen
        await rounds_until(lambda: not polls._watchers)
        assert (await polls.wait(Wait(["default"], 0, PATIENCE, seen))).woken
        await polls.close()


@on_a_loop
async def test_a_queue_that_nobody_waits_for_is_soon_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names cost a caller nothing, and each look at the store takes time from all callers."""
    monkeypatch.setattr("taskharbor.broker.service.LOOK_AGAIN", 0.001)
    async with MemoryDriver() as driver:
        polls = long_polls_over(driver)
        await polls.wait(Wait([f"queue-{number}" for number in range(256)], 0, 0, None))
        for watcher in polls._watchers.values():
            watcher.asked_at -= 5
        await rounds_until(lambda: not polls._watchers)


@on_a_loop
async def test_more_waits_than_allowed_are_refused() -> None:
    async with MemoryDriver() as driver:
        polls = long_polls_over(driver, max_waiting=0)
        seen: str | None = None
        refusals: set[str] = set()
        # What stirred is still told; only waiting is refused.
        for _ in range(50):
            try:
                seen = (await polls.wait(Wait(["default"], 0, 5, seen))).seen
            except Problem as problem:
                refusals.add(problem.code)
        assert refusals == {"too_many_waiting"}
        await polls.close()


@on_a_loop
async def test_more_queues_than_allowed_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names cost a caller nothing, a watch costs the broker a task."""
    monkeypatch.setattr("taskharbor.broker.service.MOST_WATCHED", 2)
    async with MemoryDriver() as driver:
        polls = long_polls_over(driver)
        await polls.wait(Wait(["a", "b"], 0, 0, None))
        with pytest.raises(Problem, match="too_many_waiting"):
            await polls.wait(Wait(["c"], 0, 0, None))
        await polls.wait(Wait(["a", "b"], 0, 0, None))
        await polls.close()


@on_a_loop
async def test_a_store_that_fails_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.broker.service.LOOK_AGAIN", 0.001)
    failures = 3

    class Failing(MemoryDriver):
        async def wait(self, *args: Any, **options: Any) -> Woken:
            nonlocal failures
            if failures:
                failures -= 1
                raise RuntimeError("nobody expected this")
            return await super().wait(*args, **options)

    async with Failing() as driver:
        polls = long_polls_over(driver)
        seen = (await polls.wait(Wait(["default"], 0, 0, None))).seen
        await rounds_until(lambda: failures == 0)
        now = SystemClock().now()
        await driver.enqueue([job(1, now)], now=now)
        assert (await polls.wait(Wait(["default"], 0, PATIENCE, seen))).woken
        await polls.close()


@pytest.mark.parametrize("seed", range(5))
@on_a_loop
async def test_no_consumer_starves_whatever_the_order(seed: int) -> None:
    """Consumers that look only when they are told to get every job of their own type."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with MemoryDriver() as driver:
        polls = long_polls_over(driver)
        kinds = ["a", "b", "c"]
        total = 60

        async def consume(kind: str) -> int:
            got, seen = 0, (await polls.wait(Wait(["default"], 0, 0, None))).seen
            while got < total // 3:
                found = await driver.reserve(
                    "default",
                    limit=rng.randint(1, 3),
                    lease_for=60 * SECOND,
                    now=SystemClock().now(),
                    worker=kind,
                    types=[kind],
                )
                got += len(found)
                if not found:
                    told = await polls.wait(Wait(["default"], 0, PATIENCE, seen))
                    seen = told.seen
                    assert told.woken, f"{kind} waited in vain with {got} jobs"
            return got

        consumers = [asyncio.create_task(consume(kind)) for kind in kinds]
        for number in range(total):
            now = SystemClock().now()
            await driver.enqueue([job(number, now, kinds[number % 3])], now=now)
            for _ in range(rng.randint(0, 6)):
                await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.gather(*consumers), PATIENCE) == [20, 20, 20]
        await polls.close()


@on_a_loop
async def test_a_queue_is_not_forgotten_while_a_client_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.broker.service.LOOK_AGAIN", 0.001)

    class Counting(MemoryDriver):
        looks = 0

        async def wait(self, *args: Any, **options: Any) -> Woken:
            self.looks += 1
            return await super().wait(*args, **options)

    async with Counting() as driver:
        polls = long_polls_over(driver)
        seen = await quiet(polls, None)
        waiting = asyncio.create_task(polls.wait(Wait(["default"], 0, PATIENCE, seen)))
        await rounds_until(lambda: polls.waiting == 1)
        monkeypatch.setattr("taskharbor.broker.service.FORGET_AFTER", 0.0)
        looks = driver.looks
        await rounds_until(lambda: driver.looks > looks + 2)
        now = SystemClock().now()
        await driver.enqueue([job(1, now)], now=now)
        assert (await waiting).woken
        await polls.close()
