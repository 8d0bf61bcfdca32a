"""PostgreSQL: drain, bulk and single enqueue, pick-up latency and claim cost, each beside the raw limit on the same server.

What a backlog, a history or somebody's open snapshot does to it is measured against itself without them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import psycopg

from benchmarks import claims, ours, raw_postgres
from benchmarks.children import in_child, latency
from benchmarks.measure import Figure, alternate
from benchmarks.postgres_backlog import fill_ahead, fill_history, fill_scheduled, fill_waiting
from benchmarks.postgres_costs import Costs, costs_of
from benchmarks.postgres_server import fresh_database, settle_down
from benchmarks.workload import TYPES

# -- drain --------------------------------------------------------------------------------------------------


def _drain_raw(answer: Connection, url: str) -> None:
    with raw_postgres.connect(url) as connection:
        answer.send(raw_postgres.drain(connection))


def _enqueue(url: str, count: int, types: int | str) -> None:
    ours.fill(url, count, types)
    settle_down()


def drain(count: int, rounds: int, types: int) -> Figure:
    seen: dict[str, Costs] = {}

    def worker() -> float:
        with fresh_database() as url:
            _enqueue(url, count, types)
            with costs_of(url, count) as seen["ours"]:
                return in_child(ours.drain, url, count, types)

    def raw() -> float:
        with fresh_database() as url:
            with raw_postgres.connect(url) as connection:
                raw_postgres.create(connection)
                raw_postgres.insert(connection, count)
            settle_down()
            with costs_of(url, count) as seen["raw"]:
                return in_child(_drain_raw, url)

    mine, limit = alternate(rounds, ("worker", worker), ("raw lease + delete", raw), "jobs/s")
    facts = {side: str(costs) for side, costs in seen.items()}
    return Figure(name=f"drain, PostgreSQL, {types} types", ours=mine, limit=limit, goal=0.5, facts=facts)


@contextmanager
def _held_snapshot(url: str) -> Iterator[None]:
    """Somebody's long report: nothing that dies from now on may be vacuumed away."""
    with psycopg.connect(url, autocommit=True) as connection, connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select 1")
        yield


def drain_under_snapshot(count: int, rounds: int, types: int) -> Figure:
    def held() -> float:
        with fresh_database() as url, _held_snapshot(url):
            _enqueue(url, count, types)
            return in_child(ours.drain, url, count, types)

    def clean() -> float:
        with fresh_database() as url:
            _enqueue(url, count, types)
            return in_child(ours.drain, url, count, types)

    mine, limit = alternate(rounds, ("somebody holds a snapshot", held), ("nobody does", clean), "jobs/s")
    return Figure(name=f"drain, held snapshot, {types} types", ours=mine, limit=limit, goal=0.8)


def batches(count: int, rounds: int, single: str) -> Figure:
    """Jobs of a batch handler against jobs that run one by one."""

    def of(type: str) -> Callable[[], float]:
        def measure() -> float:
            with fresh_database() as url:
                _enqueue(url, count, type)
                return in_child(ours.drain, url, count, type)

        return measure

    mine, limit = alternate(rounds, ("batch_job", of("noop_in_batches")), (single, of(single)), "jobs/s")
    return Figure(name=f"batches against {single}, PostgreSQL", ours=mine, limit=limit, goal=2)


# -- enqueue ------------------------------------------------------------------------------------------------


def bulk_enqueue(count: int, rounds: int) -> Figure:
    def many() -> float:
        with fresh_database() as url:
            return ours.bulk_enqueue(url, count)

    def raw() -> float:
        with fresh_database() as url, raw_postgres.connect(url) as connection:
            raw_postgres.create(connection)
            return raw_postgres.insert(connection, count)

    mine, limit = alternate(rounds, ("enqueue_many", many), ("raw COPY", raw), "jobs/s")
    return Figure(name="bulk enqueue, PostgreSQL", ours=mine, limit=limit, goal=0.35)


def single_enqueue(looks: int, rounds: int) -> Figure:
    on_a_loop: list[float] = []

    def one() -> float:
        with fresh_database() as url:
            return asyncio.run(ours.enqueue_one(url, looks))

    def raw() -> float:
        with fresh_database() as url, raw_postgres.connect(url) as connection:
            raw_postgres.create(connection)
            on_a_loop.append(asyncio.run(raw_postgres.insert_one_async(url, looks)))
            return raw_postgres.insert_one(connection, looks)

    mine, limit = alternate(rounds, ("await client.enqueue", one), ("INSERT + NOTIFY", raw), "ms")
    return Figure(
        name="single enqueue, PostgreSQL",
        ours=mine,
        limit=limit,
        goal=1.3,
        higher_is_better=False,
        facts={"INSERT + NOTIFY on an event loop": f"{statistics.median(on_a_loop):.4g} ms"},
    )


# -- pick-up ------------------------------------------------------------------------------------------------


def _pick_up_raw(answer: Connection, url: str, count: int) -> None:
    with raw_postgres.connect(url) as connection:
        raw_postgres.serve(connection, lambda _: answer.send(time.monotonic()), count)


async def _insert_to_claim(url: str, count: int) -> float:
    with raw_postgres.connect(url) as connection:
        raw_postgres.create(connection)

        async def enqueue(n: int) -> None:
            raw_postgres.insert_and_notify(connection, n)

        return await latency(_pick_up_raw, url, count, enqueue)


def pick_up(count: int, rounds: int) -> Figure:
    def measured(side: Callable[[str, int], Awaitable[float]]) -> Callable[[], float]:
        async def on(url: str) -> float:
            return await side(url, count)

        def measure() -> float:
            with fresh_database() as url:
                return asyncio.run(on(url))

        return measure

    mine, limit = alternate(
        rounds,
        ("enqueue to handler", measured(ours.pick_up)),
        ("INSERT to claim", measured(_insert_to_claim)),
        "ms",
    )
    return Figure(
        name="idle pick-up, PostgreSQL",
        ours=mine,
        limit=limit,
        goal=1.5,
        higher_is_better=False,
        note="median",
    )


@contextmanager
def _stores() -> Iterator[tuple[str, str]]:
    with fresh_database() as one, fresh_database() as other:
        yield one, other


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds = 1 if quick else 3
    count = 20_000 if quick else 100_000
    many = 20_000 if quick else 10_000_000
    kinds = {
        "waiting": fill_waiting,
        claims.AHEAD: fill_ahead,
        "scheduled": fill_scheduled,
        "in the history": fill_history,
    }
    return [
        *(partial(drain, count, rounds, types) for types in TYPES),
        *(partial(drain_under_snapshot, count, rounds, types) for types in TYPES),
        *(partial(batches, count, rounds, single) for single in ("noop_on_thread", "noop")),
        lambda: bulk_enqueue(count, rounds),
        lambda: single_enqueue(500, rounds),
        lambda: pick_up(50 if quick else 200, rounds),
        *claims.figures(_stores, kinds, many, rounds, settle_down),
    ]
