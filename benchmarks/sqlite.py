"""SQLite: drain, bulk enqueue, pick-up latency and claim cost, each beside the raw limit at the same durability."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import raw_sqlite, workload
from benchmarks.measure import Figure, alternate
from taskharbor import JobRequest, connect
from taskharbor.client import AsyncClient
from taskharbor.drivers.contract import Release
from taskharbor.jobs import SECOND

spawn = multiprocessing.get_context("spawn")


def _url(path: Path, synchronous: str) -> str:
    return f"sqlite:///{path}" + ("" if synchronous == "full" else f"?durability={synchronous}")


def _in_child(target: Callable[..., None], *args: object) -> float:
    """One number measured in a process of its own, as a worker is."""
    here, there = spawn.Pipe()
    child = spawn.Process(target=target, args=(there, *args))
    child.start()
    there.close()
    figure: float = here.recv()
    child.join()
    return figure


# -- drain --------------------------------------------------------------------------------------------------


def _drain_ours(answer: Connection, url: str, count: int) -> None:
    workload.harbor.use(url)
    workload.harbor.worker(until_empty=True).run()
    answer.send(count / (time.perf_counter() - workload.first_start))


def _drain_raw(answer: Connection, path: str, synchronous: str) -> None:
    answer.send(raw_sqlite.drain(raw_sqlite.connect(Path(path), synchronous)))


def drain(count: int, rounds: int, synchronous: str) -> Figure:
    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            url = _url(Path(folder) / "jobs.db", synchronous)
            workload.harbor.use(url)
            workload.noop.enqueue_many([(n,) for n in range(count)])
            workload.harbor.close()
            return _in_child(_drain_ours, url, count)

    def raw() -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "raw.db"
            connection = raw_sqlite.connect(path, synchronous)
            raw_sqlite.create(connection)
            raw_sqlite.insert(connection, count)
            connection.close()
            return _in_child(_drain_raw, str(path), synchronous)

    mine, limit = alternate(rounds, ("worker", ours), ("raw lease + delete", raw), "jobs/s")
    return Figure(name=f"drain, synchronous={synchronous}", ours=mine, limit=limit, goal=0.25)


# -- bulk enqueue -------------------------------------------------------------------------------------------


def bulk_enqueue(count: int, rounds: int, synchronous: str) -> Figure:
    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            workload.harbor.use(_url(Path(folder) / "jobs.db", synchronous))
            workload.noop.enqueue(0)  # connects
            calls = [(n,) for n in range(count)]
            began = time.perf_counter()
            workload.noop.enqueue_many(calls)
            elapsed = time.perf_counter() - began
            workload.harbor.close()
            return count / elapsed

    def raw() -> float:
        with tempfile.TemporaryDirectory() as folder:
            connection = raw_sqlite.connect(Path(folder) / "raw.db", synchronous)
            raw_sqlite.create(connection)
            speed = raw_sqlite.insert(connection, count)
            connection.close()
            return speed

    mine, limit = alternate(rounds, ("enqueue_many", ours), ("raw inserts", raw), "jobs/s")
    return Figure(name=f"bulk enqueue, synchronous={synchronous}", ours=mine, limit=limit, goal=0.4)


# -- pick-up ------------------------------------------------------------------------------------------------

PAUSE = 0.02


def _pick_up_worker(answer: Connection, url: str, count: int) -> None:
    from taskharbor import Harbor

    harbor = Harbor(url)

    @harbor.job
    async def stamp(n: int) -> None:
        answer.send(time.time())

    harbor.worker(max_jobs=count).run()


def _pick_up_reader(answer: Connection, path: str, count: int) -> None:
    """Polls every millisecond and only reads: the floor for anything that looks at the file."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    seen = 0
    while seen < count:
        latest = connection.execute("select max(id) from q").fetchone()[0] or 0
        if latest > seen:
            answer.send(time.time())
            seen = latest
        time.sleep(0.001)


def _latency(target: Callable[..., None], where: str, count: int, enqueue: Callable[[int], None]) -> float:
    here, there = spawn.Pipe()
    child = spawn.Process(target=target, args=(there, where, count))
    child.start()
    enqueue(0)
    here.recv()  # The first one also waits for the child to start, and does not count.
    delays: list[float] = []
    for n in range(1, count):
        time.sleep(PAUSE)
        began = time.time()
        enqueue(n)
        delays.append(here.recv() - began)
    child.join()
    return statistics.median(delays) * 1000


def pick_up(count: int, rounds: int) -> Figure:
    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            url = _url(Path(folder) / "jobs.db", "full")
            workload.harbor.use(url)
            delay = _latency(
                _pick_up_worker, url, count, lambda n: void(workload.harbor.enqueue("stamp", {"n": n}))
            )
            workload.harbor.close()
            return delay

    def raw() -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "raw.db"
            connection = raw_sqlite.connect(path, "full")
            raw_sqlite.create(connection)
            insert = "insert into q (payload) values ('{}')"
            delay = _latency(_pick_up_reader, str(path), count, lambda _: void(connection.execute(insert)))
            connection.close()
            return delay

    mine, limit = alternate(rounds, ("enqueue to handler", ours), ("insert to 1 ms reader", raw), "ms")
    return Figure(
        name="idle pick-up, other process",
        ours=mine,
        limit=limit,
        goal=2.5,
        higher_is_better=False,
        note="median",
    )


def void(_: object) -> None:
    """For a lambda whose value nobody wants."""


# -- claim cost ---------------------------------------------------------------------------------------------


async def _claim_cost(path: Path, waiting: int, looks: int) -> float:
    """Median milliseconds of leasing 100 of `waiting` jobs. They are released, so the backlog stays as it is."""
    async with connect(_url(path, "normal")) as driver:
        client = AsyncClient(driver)
        for start in range(0, waiting, 100_000):
            requests = [JobRequest(type="t", payload=n) for n in range(min(100_000, waiting - start))]
            await client.enqueue_many(requests)
        spent = []
        for _ in range(looks):
            now = await client.now()
            began = time.perf_counter()
            held = await driver.reserve("default", limit=100, lease_for=60 * SECOND, now=now, worker="w")
            spent.append(time.perf_counter() - began)
            await driver.settle([Release(one.id, one.token or "") for one in held], now=now)
        return statistics.median(spent) * 1000


def claim_cost(few: int, many: int, rounds: int) -> Figure:
    def cost(waiting: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(_claim_cost(Path(folder) / "jobs.db", waiting, looks=200))

    mine, limit = alternate(
        rounds, (f"{many:,} waiting", lambda: cost(many)), (f"{few:,} waiting", lambda: cost(few)), "ms"
    )
    return Figure(name="claim of 100", ours=mine, limit=limit, goal=1.3, higher_is_better=False)


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds = 1 if quick else 3
    count = 20_000 if quick else 100_000
    return [
        lambda: drain(count, rounds, "full"),
        lambda: drain(count, rounds, "normal"),
        lambda: bulk_enqueue(count, rounds, "full"),
        lambda: pick_up(50 if quick else 200, rounds),
        lambda: claim_cost(1_000, 100_000 if quick else 1_000_000, rounds),
    ]
