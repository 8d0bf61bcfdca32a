"""The memory driver: a whole worker against a bare loop of `asyncio.create_task` over the same no-op coroutine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from benchmarks import workload
from benchmarks.measure import Figure, alternate


async def _noop(n: int) -> None:
    pass


async def _bare(count: int) -> float:
    began = time.perf_counter()
    for start in range(0, count, 500):
        tasks = [asyncio.create_task(_noop(n)) for n in range(start, start + 500)]
        for task in tasks:
            await task
    return count / (time.perf_counter() - began)


def drain(count: int, rounds: int) -> Figure:
    def ours() -> float:
        workload.harbor.use("memory://")
        workload.noop.enqueue_many([(n,) for n in range(count)])
        workload.first_start = 0.0
        workload.harbor.worker(until_empty=True).run()
        return count / (time.perf_counter() - workload.first_start)

    mine, limit = alternate(
        rounds,
        ("worker on memory://", ours),
        ("bare create_task", lambda: asyncio.run(_bare(count))),
        "jobs/s",
    )
    return Figure(name="drain, memory", ours=mine, limit=limit, goal=0.2)


def figures(quick: bool) -> list[Callable[[], Figure]]:
    return [lambda: drain(20_000 if quick else 100_000, 1 if quick else 3)]
