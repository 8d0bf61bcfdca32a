"""PostgreSQL: drain, bulk and single enqueue, pick-up latency and claim cost, each beside the raw limit on the same server.

What a backlog, a history or somebody's open snapshot does to it is measured against itself without them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection

import psycopg

from benchmarks import ours, raw_postgres
from benchmarks.children import in_child, latency
from benchmarks.measure import Figure, alternate
from benchmarks.postgres_backlog import fill_history, fill_scheduled, fill_waiting
from benchmarks.postgres_costs import Costs, costs_of
from benchmarks.postgres_server import fresh_database, settle_down
from taskharbor import JobRequest, connect
from taskharbor.client import AsyncClient
from taskharbor.drivers.contract import Ack
from taskharbor.jobs import SECOND

# -- drain --------------------------------------------------------------------------------------------------


def _drain_raw(answer: Connection, url: str) -> None:
    with raw_postgres.connect(url) as connection:
        answer.send(raw_postgres.drain(connection))


def _enqueue(url: str, count: int) -> None:
    ours.fill(url, count)
    settle_down()


def drain(count: int, rounds: int) -> Figure:
    seen: dict[str, Costs] = {}

    def worker() -> float:
        with fresh_database() as url:
            _enqueue(url, count)
            with costs_of(url, count) as seen["ours"]:
                return in_child(ours.drain, url, count)

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
    return Figure(name="drain, PostgreSQL", ours=mine, limit=limit, goal=0.5, facts=facts)


@contextmanager
def _held_snapshot(url: str) -> Iterator[None]:
    """Somebody's long report: nothing that dies from now on may be vacuumed away."""
    with psycopg.connect(url, autocommit=True) as connection, connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select 1")
        yield


def drain_under_snapshot(count: int, rounds: int) -> Figure:
    def held() -> float:
        with fresh_database() as url, _held_snapshot(url):
            _enqueue(url, count)
            return in_child(ours.drain, url, count)

    def clean() -> float:
        with fresh_database() as url:
            _enqueue(url, count)
            return in_child(ours.drain, url, count)

    mine, limit = alternate(rounds, ("somebody holds a snapshot", held), ("nobody does", clean), "jobs/s")
    return Figure(name="drain, held snapshot", ours=mine, limit=limit, goal=0.8)


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


# -- claim cost ---------------------------------------------------------------------------------------------

Fill = Callable[[str, int], None]


@asynccontextmanager
async def _store(url: str) -> AsyncIterator[AsyncClient]:
    async with connect(url) as driver:
        yield AsyncClient(driver)


async def _prepare(url: str) -> None:
    async with _store(url) as client:
        await client.now()


async def _claim_cost(url: str, looks: int) -> float:
    """Median milliseconds of leasing 100 jobs. They are finished and as many enqueued, so the backlog stays as it is."""
    spent = []
    requests = [JobRequest(type="t", payload=n) for n in range(100)]
    async with _store(url) as client:
        for _ in range(looks):
            now = await client.now()
            began = time.perf_counter()
            held = await client.driver.reserve(
                "default", limit=100, lease_for=60 * SECOND, now=now, worker="w"
            )
            spent.append(time.perf_counter() - began)
            await client.driver.settle([Ack(one.id, one.token or "") for one in held], now=now)
            await client.enqueue_batch(requests)
    return statistics.median(spent) * 1000


def claim_cost(name: str, waiting: int, beside: Fill | None, more: int, rounds: int) -> Figure:
    """With much more of one kind than `waiting` jobs, against those alone. Filled once, then measured in turns."""
    with ExitStack() as stack:
        plain, crowded = stack.enter_context(fresh_database()), stack.enter_context(fresh_database())
        for url in (plain, crowded):
            asyncio.run(_prepare(url))
        fill_waiting(plain, waiting)
        if beside is None:
            fill_waiting(crowded, more)
        else:
            beside(crowded, more)
            fill_waiting(crowded, waiting)
        settle_down()
        mine, limit = alternate(
            rounds,
            (f"{more:,} {name}", lambda: asyncio.run(_claim_cost(crowded, looks=200))),
            (f"{waiting:,} waiting", lambda: asyncio.run(_claim_cost(plain, looks=200))),
            "ms",
        )
    return Figure(name=f"claim of 100, many {name}", ours=mine, limit=limit, goal=1.3, higher_is_better=False)


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds = 1 if quick else 3
    count = 20_000 if quick else 100_000
    many = 20_000 if quick else 10_000_000
    return [
        lambda: drain(count, rounds),
        lambda: drain_under_snapshot(count, rounds),
        lambda: bulk_enqueue(count, rounds),
        lambda: single_enqueue(500, rounds),
        lambda: pick_up(50 if quick else 200, rounds),
        lambda: claim_cost("waiting", 1_000, None, many, rounds),
        lambda: claim_cost("scheduled", 1_000, fill_scheduled, many, rounds),
        lambda: claim_cost("in the history", 1_000, fill_history, many, rounds),
    ]
