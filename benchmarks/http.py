"""The HTTP driver by way of a broker process over SQLite, each figure beside the same on such a file directly."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks import ours
from benchmarks.children import in_child
from benchmarks.measure import Figure, alternate
from benchmarks.workload import TYPES
from taskharbor_testkit.servers.broker import broker_process


@contextmanager
def _direct() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{folder}/jobs.db"


@contextmanager
def _brokered() -> Iterator[str]:
    with _direct() as store, broker_process(store) as broker:
        yield broker.url


def _compare(
    name: str,
    measure: Callable[[str], float],
    rounds: int,
    unit: str,
    *,
    goal: float,
    higher_is_better: bool = True,
    note: str = "",
) -> Figure:
    def by_broker() -> float:
        with _brokered() as url:
            return measure(url)

    def directly() -> float:
        with _direct() as url:
            return measure(url)

    mine, limit = alternate(rounds, ("by way of a broker", by_broker), ("sqlite directly", directly), unit)
    return Figure(
        name=f"{name}, http over sqlite",
        ours=mine,
        limit=limit,
        goal=goal,
        higher_is_better=higher_is_better,
        note=note,
    )


def drain(count: int, rounds: int, types: int) -> Figure:
    def measure(url: str) -> float:
        ours.fill(url, count, types)
        return in_child(ours.drain, url, count, types)

    return _compare(f"drain, {types} types", measure, rounds, "jobs/s", goal=0.5)


def bulk_enqueue(count: int, rounds: int) -> Figure:
    return _compare("bulk enqueue", lambda url: ours.bulk_enqueue(url, count), rounds, "jobs/s", goal=0.5)


def enqueue_one(count: int, rounds: int) -> Figure:
    return _compare(
        "enqueue of one",
        lambda url: asyncio.run(ours.enqueue_one(url, count)),
        rounds,
        "ms",
        goal=3,
        higher_is_better=False,
        note="median",
    )


def pick_up(count: int, rounds: int) -> Figure:
    return _compare(
        "idle pick-up",
        lambda url: asyncio.run(ours.pick_up(url, count)),
        rounds,
        "ms",
        goal=3,
        higher_is_better=False,
        note="median",
    )


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds = 1 if quick else 3
    count = 20_000 if quick else 100_000
    return [
        *(partial(drain, count, rounds, types) for types in TYPES),
        lambda: bulk_enqueue(count, rounds),
        lambda: enqueue_one(200 if quick else 1000, rounds),
        lambda: pick_up(50 if quick else 200, rounds),
    ]
