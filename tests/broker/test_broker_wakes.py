"""The numbers behind long polls: many clients, one handle on the store."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from broker_loops import PATIENCE, on_a_loop, rounds_until

from taskharbor.broker.problems import Problem
from taskharbor.broker.wakes import Wakes
from taskharbor.clock import SystemClock
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.jobs import SECOND, JobRecord


def wakes_over(driver: MemoryDriver, **options: Any) -> Wakes:
    return Wakes(
        driver,
        now=SystemClock().now,
        stopping=asyncio.Event(),
        **{"max_waiting": 100, "max_seconds": 60.0, "trusts_clients": False, **options},
    )


def job(number: int, driver_now: int, type: str = "t") -> JobRecord:
    return JobRecord(id=f"job-{number}", type=type, run_at_us=driver_now, created_at_us=driver_now)


async def quiet(wakes: Wakes, seen: str | None) -> str:
    """What has been seen once nothing more stirs."""
    for _ in range(50):
        is_stirred, seen = await wakes.wait(["default"], seen, now=0, timeout=0.01)
        if not is_stirred:
            return seen
    raise AssertionError("it never falls silent")


@on_a_loop
async def test_who_waits_for_the_first_time_is_told_to_look() -> None:
    async with MemoryDriver() as driver:
        wakes = wakes_over(driver)
        is_stirred, seen = await wakes.wait(["default"], None, now=0, timeout=5)
        assert is_stirred
        assert (await wakes.wait(["default"], "another.7", now=0, timeout=5))[0]
        assert (await wakes.wait(["default"], "x" * 300, now=0, timeout=5))[0]
        await quiet(wakes, seen)
        await wakes.close()


@on_a_loop
async def test_a_stir_between_two_waits_is_not_missed_by_anybody() -> None:
    """Clients share one handle on the store; what one was told the other must still hear."""
    async with MemoryDriver() as driver:
        wakes = wakes_over(driver)
        first = await quiet(wakes, None)
        second = await quiet(wakes, first)
        now = SystemClock().now()
        await driver.enqueue([job(1, now)], now=now)
        assert (await wakes.wait(["default"], second, now=0, timeout=PATIENCE))[0]
        assert (await wakes.wait(["default"], first, now=0, timeout=PATIENCE))[0]
        await wakes.close()


@on_a_loop
async def test_a_queue_that_is_forgotten_is_watched_anew_and_misses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskharbor.broker.wakes.FORGET_AFTER", 0.0)
    monkeypatch.setattr("taskharbor.broker.wakes.LOOK_AGAIN", 0.001)
    async with MemoryDriver() as driver:
        wakes = wakes_over(driver)
        _, seen = await wakes.wait(["default"], None, now=0, timeout=0)
        await rounds_until(lambda: not wakes._watches)
        assert (await wakes.wait(["default"], seen, now=0, timeout=PATIENCE))[0]
        await wakes.close()


@on_a_loop
async def test_more_waits_than_allowed_are_refused() -> None:
    async with MemoryDriver() as driver:
        wakes = wakes_over(driver, max_waiting=0)
        seen: str | None = None
        refusals: set[str] = set()
        # What stirred is still told; only waiting is refused.
        for _ in range(50):
            try:
                _, seen = await wakes.wait(["default"], seen, now=0, timeout=5)
            except Problem as problem:
                refusals.add(problem.code)
        assert refusals == {"too_many_waiting"}
        await wakes.close()


@on_a_loop
async def test_more_queues_than_allowed_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names cost a caller nothing, a watch costs the broker a task."""
    monkeypatch.setattr("taskharbor.broker.wakes.MOST_WATCHED", 2)
    async with MemoryDriver() as driver:
        wakes = wakes_over(driver)
        wakes.mark(["a", "b"])
        with pytest.raises(Problem, match="too_many_waiting"):
            wakes.mark(["c"])
        wakes.mark(["a", "b"])
        await wakes.close()


@on_a_loop
async def test_a_store_that_fails_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskharbor.broker.wakes.LOOK_AGAIN", 0.001)
    failures = 3

    class Failing(MemoryDriver):
        async def wait(self, *args: Any, **options: Any) -> bool:
            nonlocal failures
            if failures:
                failures -= 1
                raise RuntimeError("nobody expected this")
            return await super().wait(*args, **options)

    async with Failing() as driver:
        wakes = wakes_over(driver)
        seen = wakes.mark(["default"])
        await rounds_until(lambda: failures == 0)
        now = SystemClock().now()
        await driver.enqueue([job(1, now)], now=now)
        assert (await wakes.wait(["default"], seen, now=0, timeout=PATIENCE))[0]
        await wakes.close()


@pytest.mark.parametrize("seed", range(5))
@on_a_loop
async def test_no_consumer_starves_whatever_the_order(seed: int) -> None:
    """Consumers that look only when they are told to get every job of their own type."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with MemoryDriver() as driver:
        wakes = wakes_over(driver)
        kinds = ["a", "b", "c"]
        total = 60

        async def consume(kind: str) -> int:
            got, seen = 0, wakes.mark(["default"])
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
                    is_stirred, seen = await wakes.wait(["default"], seen, now=0, timeout=PATIENCE)
                    assert is_stirred, f"{kind} waited in vain with {got} jobs"
            return got

        consumers = [asyncio.create_task(consume(kind)) for kind in kinds]
        for number in range(total):
            now = SystemClock().now()
            await driver.enqueue([job(number, now, kinds[number % 3])], now=now)
            for _ in range(rng.randint(0, 6)):
                await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.gather(*consumers), PATIENCE) == [20, 20, 20]
        await wakes.close()
