"""The memory driver: a whole worker against a bare loop of `asyncio.create_task` over the same no-op coroutine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from benchmarks import claims, ours
from benchmarks.measure import Figure, alternate
from benchmarks.workload import TYPES
from taskharbor.drivers.registry import connect


async def _noop(n: int) -> None:
    pass


async def _bare(count: int) -> float:
    began = time.perf_counter()
    for start in range(0, count, 500):
        tasks = [asyncio.create_task(_noop(n)) for n in range(start, start + 500)]
        for task in tasks:
            await task
    return count / (time.perf_counter() - began)


def drain(count: int, rounds: int, types: int) -> Figure:
    def worker() -> float:
        store = connect("memory://")
        ours.fill(store, count, types)
        return ours.drain_here(store, count, types)

    mine, limit = alternate(
        rounds,
        ("worker on memory://", worker),
        ("bare create_task", lambda: asyncio.run(_bare(count))),
        "jobs/s",
    )
    return Figure(name=f"drain, memory, {types} types", ours=mine, limit=limit, goal=0.2)


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds, count, many = (1, 20_000, 20_000) if quick else (3, 100_000, 1_000_000)
    kinds = {"waiting": claims.fill_waiting, claims.AHEAD: claims.fill_ahead}
    return [
        *(partial(drain, count, rounds, types) for types in TYPES),
        *claims.figures(lambda: nullcontext(["memory://", "memory://"]), kinds, many, rounds),
    ]
