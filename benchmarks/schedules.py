"""Schedules: many that are due at one instant, how late ticks are when nothing else happens, and what workers without any pay.

A worker of another process makes the jobs. It serves a queue without jobs, so nothing else takes its time. A tick counts when the
call that stores its job has returned.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import ours, postgres_server, redis_server, workload
from benchmarks.children import in_child, spawn
from benchmarks.measure import Figure, Series, alternate
from taskharbor import AsyncClient, Harbor, Schedule
from taskharbor.jobs import SECOND, Micros, UpdateFlags
from taskharbor.schedules import ticking
from taskharbor.schedules.specification import own_record, request_of, stored_schedule
from taskharbor.worker import backend_loop

# Each backend opens a new store.
Store = Callable[[], AbstractContextManager[str]]
ALL_AT_ONCE = 1.0
LATEST = 0.1
YEAR = 365 * 86_400
_CHUNK = 1000
# Seconds in which a worker that has just started still has much to do.
_SETTLING = 3.0


@contextmanager
def _file() -> Iterator[str]:
    with TemporaryDirectory() as folder:
        yield f"sqlite:///{Path(folder)}/jobs.db"


# -- a worker that makes the jobs ---------------------------------------------------------------------------


def _tick(answer: Connection, url: str, most: int, settling: float) -> None:
    """In a child: send the times at which the jobs of so many ticks were there, each with the times of the ticks.

    With `settling`, only ticks later than so many seconds after the start count.
    """
    enqueue, found = ticking._enqueue, list[tuple[float, list[Micros]]]()
    began = (time.time() + settling) * SECOND

    async def noted(driver: Any, steps: Sequence[Any], now: Micros) -> None:
        # After the call, the jobs of a batch are there.
        due = [tick for step in steps for tick in step.ticks if not settling or tick > began]
        await enqueue(driver, steps, now)
        found.append((time.time(), due))
        if sum(len(ticks) for _, ticks in found) >= most:
            worker.stop()

    ticking._enqueue = noted
    worker = Harbor(url).worker(queues=["nothing"], every_type=True)
    answer.send(None)
    worker.run()
    answer.send(found)


@contextmanager
def _worker(url: str, most: int, settling: float = 0.0) -> Iterator[Connection]:
    here, there = spawn.Pipe()
    child = spawn.Process(target=_tick, args=(there, url, most, settling))
    child.start()
    there.close()
    here.recv()
    yield here
    child.join()


# -- many at one instant ------------------------------------------------------------------------------------


async def _put_many(url: str, count: int, at: Micros) -> None:
    """As they are after a worker has looked at them once: the cursor is the next tick."""
    async with AsyncClient(url) as client:
        now, offset = await client.now(), at / SECOND % YEAR
        for start in range(0, count, _CHUNK):
            records = []
            for n in range(start, min(start + _CHUNK, count)):
                schedule = Schedule(name=f"s{n}", job="noop", payload={"n": n}, every=YEAR, offset=offset)
                stored = stored_schedule(schedule, request_of(schedule), client.builder, now)
                records.append(own_record(stored, now, at, UpdateFlags()))
            await client.driver.enqueue(records, now=now)


def _all_at_once(store: Store, count: int) -> float:
    """Seconds from the instant to the last job."""
    with store() as url:
        # Room for putting them and for the start of the worker.
        at = (int(time.time()) + 10 + count // 500) * SECOND
        asyncio.run(_put_many(url, count, at))
        with _worker(url, count) as answers:
            if time.time() * SECOND > at:
                raise RuntimeError("the schedules were due before the worker was up")
            found = answers.recv()
        return float(found[-1][0] - at / SECOND)


def all_at_once(name: str, store: Store, count: int, rounds: int) -> Figure:
    def bulk() -> float:
        with store() as url:
            return count / ours.bulk_enqueue(url, count)

    mine, enqueued = alternate(
        rounds,
        ("from the instant to the last job", partial(_all_at_once, store, count)),
        ("enqueue_many", bulk),
        "s",
    )
    ratios = [one / other for one, other in zip(mine.runs, enqueued.runs, strict=True)]
    return Figure(
        name=f"{count:,} schedules due at one instant, {name}",
        ours=mine,
        limit=Series("asked for", "s", [ALL_AT_ONCE] * rounds),
        goal=1.0,
        higher_is_better=False,
        facts={
            "a bulk enqueue of as many jobs": f"{enqueued.median:.3g} s",
            "against it": f"{statistics.median(ratios):.2f}",
        },
    )


# -- lateness -----------------------------------------------------------------------------------------------


async def _put_a_few(url: str, count: int) -> None:
    async with AsyncClient(url) as client:
        for n in range(count):
            await client.schedules.put(Schedule(name=f"s{n}", job="noop", every=1, offset=n / count))


def lateness(name: str, store: Store, count: int, rounds: int) -> Figure:
    def measure(schedules: int = 10) -> list[float]:
        with store() as url:
            asyncio.run(_put_a_few(url, schedules))
            # The first ticks were due before the worker was up.
            with _worker(url, count, _SETTLING) as answers:
                found = answers.recv()
        return sorted(at - tick / SECOND for at, ticks in found for tick in ticks)

    runs = [measure() for _ in range(rounds)]
    medians = [statistics.median(late) * 1000 for late in runs]
    return Figure(
        name=f"lateness of {count} ticks of an idle worker, {name}, 99th percentile",
        ours=Series(
            "from the instant to the job", "ms", [late[len(late) * 99 // 100] * 1000 for late in runs]
        ),
        limit=Series("asked for", "ms", [LATEST * 1000] * rounds),
        goal=1.0,
        higher_is_better=False,
        facts={
            "median": f"{statistics.median(medians):.3g} ms",
            "latest": f"{max(late[-1] for late in runs) * 1000:.3g} ms",
        },
    )


# -- workers without schedules ------------------------------------------------------------------------------


async def _no_schedules(self: backend_loop.ScheduleLoop) -> None:
    """Makes nothing."""


def _drain_cpu(answer: Connection, url: str, count: int, has_loop: bool) -> None:
    """In a child: microseconds of CPU per job."""
    if not has_loop:
        backend_loop.ScheduleLoop.run = _no_schedules  # type: ignore[method-assign]
    workload.harbor.use(url)
    began = time.process_time()
    workload.harbor.worker(until_empty=True, types=workload.names(1)).run()
    answer.send((time.process_time() - began) / count * 1e6)


def _idle_cpu(answer: Connection, url: str, seconds: float, has_loop: bool) -> None:
    """In a child: milliseconds of CPU per second."""
    if not has_loop:
        backend_loop.ScheduleLoop.run = _no_schedules  # type: ignore[method-assign]
    spent: list[float] = []

    def look() -> None:
        spent.append(time.process_time())

    harbor = Harbor(url)

    @harbor.job
    async def begun() -> None:
        # A worker that has just started is not idle yet.
        asyncio.get_running_loop().call_later(1.0, look)

    begun.enqueue()
    harbor.worker(max_seconds=seconds + 2.0).run()
    answer.send((time.process_time() - spent[0]) / seconds * 1000)


def drain_cost(name: str, store: Store, count: int, rounds: int, idle_seconds: float) -> Figure:
    def measure(has_loop: bool) -> float:
        with store() as url:
            ours.fill(url, count, 1)
            return in_child(_drain_cpu, url, count, has_loop)

    def idle(has_loop: bool) -> float:
        with store() as url:
            return in_child(_idle_cpu, url, idle_seconds, has_loop)

    mine, limit = alternate(
        rounds,
        ("worker", partial(measure, True)),
        ("without the loop of schedules", partial(measure, False)),
        "µs of CPU per job",
    )
    with_loop, without = alternate(
        rounds, ("with", partial(idle, True)), ("without", partial(idle, False)), "ms of CPU per second"
    )
    return Figure(
        name=f"drain by a worker without schedules, {name}",
        ours=mine,
        limit=limit,
        goal=1.05,
        higher_is_better=False,
        facts={"idle": f"{with_loop.median:.3g} ms of CPU per second, {without.median:.3g} without the loop"},
    )


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds = 1 if quick else 3
    many, ticks, jobs = (1_000, 50, 20_000) if quick else (10_000, 300, 100_000)
    servers: dict[str, Store] = {
        "PostgreSQL": postgres_server.fresh_database,
        "Redis, everysec": redis_server.fresh_redis,
    }
    stores = {"SQLite": _file, **servers}
    return [
        *(partial(all_at_once, name, store, many, rounds) for name, store in servers.items()),
        *(partial(lateness, name, store, ticks, rounds) for name, store in stores.items()),
        *(
            partial(drain_cost, name, store, jobs, rounds, 5 if quick else 20)
            for name, store in stores.items()
        ),
    ]
