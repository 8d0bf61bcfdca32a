"""SQLite: drain, bulk enqueue, pick-up latency and claim cost, each beside the raw limit at the same durability."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import claims, ours, raw_sqlite
from benchmarks.children import in_child, latency
from benchmarks.measure import Figure, alternate
from benchmarks.workload import TYPES


@contextmanager
def _fresh(synchronous: str) -> Iterator[tuple[str, str]]:
    """The URLs of two stores in an empty folder."""
    options = "" if synchronous == "full" else f"?durability={synchronous}"
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{folder}/jobs.db{options}", f"sqlite:///{folder}/more.db{options}"


@contextmanager
def _fresh_raw(synchronous: str) -> Iterator[tuple[Path, sqlite3.Connection]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "raw.db"
        connection = raw_sqlite.connect(path, synchronous)
        raw_sqlite.create(connection)
        yield path, connection
        connection.close()


# -- drain --------------------------------------------------------------------------------------------------


def _drain_raw(answer: Connection, path: str, synchronous: str) -> None:
    answer.send(raw_sqlite.drain(raw_sqlite.connect(Path(path), synchronous)))


def drain(count: int, rounds: int, synchronous: str, types: int) -> Figure:
    def worker() -> float:
        with _fresh(synchronous) as (url, _):
            ours.fill(url, count, types)
            return in_child(ours.drain, url, count, types)

    def raw() -> float:
        with _fresh_raw(synchronous) as (path, connection):
            raw_sqlite.insert(connection, count)
            connection.close()
            return in_child(_drain_raw, str(path), synchronous)

    mine, limit = alternate(rounds, ("worker", worker), ("raw lease + delete", raw), "jobs/s")
    return Figure(name=f"drain, synchronous={synchronous}, {types} types", ours=mine, limit=limit, goal=0.25)


# -- bulk enqueue -------------------------------------------------------------------------------------------


def bulk_enqueue(count: int, rounds: int, synchronous: str) -> Figure:
    def many() -> float:
        with _fresh(synchronous) as (url, _):
            return ours.bulk_enqueue(url, count)

    def raw() -> float:
        with _fresh_raw(synchronous) as (_, connection):
            return raw_sqlite.insert(connection, count)

    mine, limit = alternate(rounds, ("enqueue_many", many), ("raw inserts", raw), "jobs/s")
    return Figure(name=f"bulk enqueue, synchronous={synchronous}", ours=mine, limit=limit, goal=0.4)


# -- pick-up ------------------------------------------------------------------------------------------------


def _pick_up_reader(answer: Connection, path: str, count: int) -> None:
    """Polls every millisecond and only reads: the floor for anything that looks at the file."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    seen = 0
    while seen < count:
        latest = connection.execute("select max(id) from q").fetchone()[0] or 0
        if latest > seen:
            answer.send(time.monotonic())
            seen = latest
        time.sleep(0.001)


def pick_up(count: int, rounds: int) -> Figure:
    def worker() -> float:
        with _fresh("full") as (url, _):
            return asyncio.run(ours.pick_up(url, count))

    def raw() -> float:
        with _fresh_raw("full") as (path, connection):

            async def insert(n: int) -> None:
                connection.execute("insert into q (payload) values ('{}')")

            return asyncio.run(latency(_pick_up_reader, str(path), count, insert))

    mine, limit = alternate(rounds, ("enqueue to handler", worker), ("insert to 1 ms reader", raw), "ms")
    return Figure(
        name="idle pick-up, other process",
        ours=mine,
        limit=limit,
        goal=2.5,
        higher_is_better=False,
        note="median",
    )


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds = 1 if quick else 3
    count = 20_000 if quick else 100_000
    many = 20_000 if quick else 1_000_000
    kinds = {"waiting": claims.fill_waiting, claims.AHEAD: claims.fill_ahead}
    return [
        *(
            partial(drain, count, rounds, synchronous, types)
            for synchronous in ("full", "normal")
            for types in TYPES
        ),
        lambda: bulk_enqueue(count, rounds, "full"),
        lambda: pick_up(50 if quick else 200, rounds),
        *claims.figures(lambda: _fresh("normal"), kinds, many, rounds),
    ]
