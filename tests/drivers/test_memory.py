"""What is particular to the memory driver: its URLs, and handles on many event loops. The conformance kit judges the contract."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from records import NOW
from records import make_record as job
from taskharbor.clock import FakeClock
from taskharbor.drivers.contract import Ack, QueueSettings, Release
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, JobRecord, JobState, Outcome
from taskharbor_testkit.waits import waits_of

T = TypeVar("T")

LONG = 60.0
"""A time-out that only a broken wake-up would let pass."""


async def lease(driver: MemoryDriver, limit: int = 1) -> list[JobRecord]:
    return await driver.reserve("q", limit=limit, lease_for=30 * SECOND, now=NOW, worker="w")


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def in_threads(number: int, main: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
    """Run a coroutine in each of several threads, on a loop of its own; what each returned."""
    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(lambda index: asyncio.run(main(index)), range(number)))


# -- stores and handles -----------------------------------------------------------------------------------


async def test_an_unnamed_url_is_a_store_of_its_own_and_a_name_is_one_store_until_it_is_dropped() -> None:
    one, other = connect("memory://"), connect("memory://")
    await one.enqueue([job("a")], now=NOW)
    assert await other.get(["a"], now=NOW) == [None]
    async with connect("memory://test-shared.1") as first:
        await first.enqueue([job("a")], now=NOW)
    second = connect("memory://test-shared.1")
    assert [MemoryDriver.drop("test-shared.1") for _ in range(2)] == [True, False]
    fresh = connect("memory://test-shared.1")
    MemoryDriver.drop("test-shared.1")
    assert await fresh.get(["a"], now=NOW) == [None]
    assert await second.get(["a"], now=NOW) != [None]


@pytest.mark.parametrize(
    "url", ["memory://a?x=1", "memory://?x=1", "memory://a/b", "memory://a#b", "memory:a"]
)
def test_a_url_it_does_not_understand_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        MemoryDriver.from_url(url)


async def test_clones_share_store_and_clock() -> None:
    clock = FakeClock(NOW)
    driver = MemoryDriver(clock=clock)
    clone = driver.clone()
    await driver.enqueue([job("a")], now=NOW)
    assert [held.id for held in await lease(clone)] == ["a"]
    clock.advance(5)
    assert await clone.time() == NOW + 5 * SECOND


# -- many loops -------------------------------------------------------------------------------------------


async def test_many_loops_share_a_store_without_losing_or_doubling() -> None:
    total, workers = 900, 6
    driver = MemoryDriver()
    await driver.configure("q", QueueSettings(max_inflight=60), now=NOW)
    gauge = threading.Semaphore(60)

    async def work(index: int) -> list[str]:
        handle = driver.clone()
        done: list[str] = []
        for _ in range(total // workers // 50):
            await handle.enqueue([job(priority=index % 2) for _ in range(50)], now=NOW)
        while (await handle.stats(now=NOW))[0].done_total < total:
            batch = await lease(handle, 20)
            for _ in batch:
                assert gauge.acquire(blocking=False), "more valid leases than max_inflight"
            for held in batch:
                gauge.release()
                end = Release if held.fence == 1 and hash(held.id) % 3 == 0 else Ack
                assert await handle.settle([end(held.id, held.token or "")], now=NOW) == [None]
                done += [held.id] if end is Ack else []
        return done

    done = [job_id for part in in_threads(workers, work) for job_id in part]
    assert len(done) == len(set(done)) == total
    (stats,) = await driver.stats(now=NOW)
    assert stats.counts == dict.fromkeys(JobState, 0) | {JobState.DONE: total}
    rows = (await driver.read_attempts(limit=100_000)).attempts
    assert [row.seq for row in rows] == sorted({row.seq for row in rows})
    assert sum(row.outcome is Outcome.DONE for row in rows) == total


def test_an_enqueue_wakes_waiters_on_other_loops() -> None:
    driver = MemoryDriver()
    waiting = threading.Barrier(4)

    async def main(index: int) -> bool:
        handle = driver.clone()
        if index == 3:
            await asyncio.to_thread(waiting.wait)
            await handle.enqueue([job("a")], now=NOW)
            return True
        await waits_of(handle)(["other", "q"], now=NOW, timeout=0)
        waiter = asyncio.ensure_future(waits_of(handle)(["other", "q"], now=NOW, timeout=LONG))
        await let_others_run()
        await asyncio.to_thread(waiting.wait)
        return await waiter

    assert in_threads(4, main) == [True] * 4


def test_a_waiter_whose_loop_is_gone_bothers_nobody() -> None:
    driver = MemoryDriver()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(waits_of(driver)(["q"], now=NOW, timeout=0))
    task = loop.create_task(waits_of(driver)(["q"], now=NOW, timeout=LONG))
    loop.run_until_complete(let_others_run())
    loop.close()
    asyncio.run(driver.clone().enqueue([job("a")], now=NOW))
    # Let go of it without a "was destroyed" message: its loop can no longer cancel it.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    assert coroutine is not None
    coroutine.close()
