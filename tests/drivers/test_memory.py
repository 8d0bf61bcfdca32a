"""What is particular to the memory driver. The conformance kit judges the contract itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from records import NOW
from records import make_record as job
from taskharbor.clock import FakeClock
from taskharbor.drivers.contract import (
    Ack,
    JobFilter,
    QueueSettings,
    Release,
)
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState, Micros, Outcome
from taskharbor_testkit.waits import waits_of

T = TypeVar("T")

BOOM = Failure("ValueError", "boom")
LONG = 60.0
"""A time-out that only a broken wake-up would let pass."""


async def lease(driver: MemoryDriver, limit: int = 1, *, now: Micros = NOW) -> list[JobRecord]:
    return await driver.reserve("q", limit=limit, lease_for=30 * SECOND, now=now, worker="w")


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def in_threads(number: int, main: Callable[[int], Awaitable[T]]) -> list[T]:
    """Run a coroutine in each of several threads, on a loop of its own; what each returned."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        async def body() -> T:
            return await main(index)

        try:
            results[index] = asyncio.run(body())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(number)]


# -- stores and handles -----------------------------------------------------------------------------------


async def test_an_unnamed_url_is_a_store_of_its_own() -> None:
    one, other = MemoryDriver.from_url("memory://"), MemoryDriver.from_url("memory://")
    await one.enqueue([job("a")], now=NOW)
    assert await other.get(["a"], now=NOW) == [None]


async def test_a_name_is_one_store_until_it_is_dropped() -> None:
    async with MemoryDriver.from_url("memory://test-shared.1") as first:
        await first.enqueue([job("a")], now=NOW)
    second = connect("memory://test-shared.1")
    assert (await second.get(["a"], now=NOW))[0] is not None
    assert MemoryDriver.drop("test-shared.1")
    assert not MemoryDriver.drop("test-shared.1")
    fresh = MemoryDriver.from_url("memory://test-shared.1")
    assert await fresh.get(["a"], now=NOW) == [None]
    assert (await second.get(["a"], now=NOW))[0] is not None
    MemoryDriver.drop("test-shared.1")


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


# -- isolation --------------------------------------------------------------------------------------------


async def test_nobody_outside_holds_what_is_inside() -> None:
    driver = MemoryDriver()
    given, bare = job("a", headers={"trace": "1"}), job("b")
    await driver.enqueue([given, bare], now=NOW)
    given.headers["trace"] = bare.headers["trace"] = "changed"
    for _ in range(2):
        listed = (await driver.list_jobs(JobFilter(), now=NOW)).jobs[::-1]
        for records in (await driver.get(["a", "b"], now=NOW), listed, await lease(driver, 2)):
            assert [record.headers for record in records if record] in ([{"trace": "1"}, {}], [])
            for record in filter(None, records):
                record.headers["trace"] = "changed"


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
    assert stats.done_total == total
    rows = (await driver.read_attempts(limit=100_000)).attempts
    assert [row.seq for row in rows] == sorted({row.seq for row in rows})
    assert sum(row.outcome is Outcome.DONE for row in rows) == total


# -- waiting ----------------------------------------------------------------------------------------------


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


# -- semantics that depend on how it is built ---------------------------------------------------------------


async def test_order_over_types_priorities_and_moves() -> None:
    driver = MemoryDriver()
    records = [
        job(f"{n:03}", type=f"t{n % 3}", priority=n % 4, run_at_us=NOW - n % 5, key=f"k{n}")
        for n in range(300)
    ]
    await driver.enqueue(records, now=NOW)
    moved = [job(f"x{n}", type="t1", key=f"k{n}", run_at_us=NOW - 50, update=None) for n in range(0, 300, 7)]
    await driver.enqueue(moved, now=NOW)
    await driver.cancel([f"{n:03}" for n in range(0, 300, 11)], now=NOW)
    current = (await driver.list_jobs(JobFilter(queue="q"), now=NOW, limit=1000)).jobs
    waiting = [one for one in current if one.state is JobState.READY]
    expected = sorted(waiting, key=lambda one: (-one.priority, one.run_at_us, one.id))
    some = [one.id for one in expected if one.type in ("t0", "t1")][:20]
    taken = await driver.reserve("q", limit=20, lease_for=SECOND, now=NOW, worker="w", types=["t1", "t0"])
    assert [one.id for one in taken] == some
    rest = [one.id for one in expected if one.id not in some]
    assert [one.id for one in await lease(driver, 1000)] == rest
