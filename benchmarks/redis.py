"""Redis: drain, bulk and single enqueue, pick-up latency and claim cost, each beside the raw limit on the same server.

What a backlog, a schedule or a history does to it is measured against itself without them. The append-only file is written
as the name of a figure says: `everysec`, which Redis recommends, or `always`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

from benchmarks import claims, ours, raw_redis, workload
from benchmarks.children import in_child, latency
from benchmarks.measure import Figure, alternate
from benchmarks.redis_idle import commands_per_minute
from benchmarks.redis_server import fresh_redis, settle_down, used_memory
from benchmarks.workload import TYPES
from taskharbor import JobRequest
from taskharbor_testkit.servers import with_fresh_prefix
from taskharbor_testkit.servers.redis import Fsync

FSYNCS: tuple[Fsync, ...] = ("everysec", "always")
PAYLOAD = "x" * 89
"""With its name, quotes and braces, 100 bytes of JSON."""


def _drain_raw(answer: Connection, url: str) -> None:
    with raw_redis.connect(url) as client:
        answer.send(raw_redis.drain(client))


def drain(count: int, rounds: int, fsync: Fsync, types: int) -> Figure:
    def worker() -> float:
        with fresh_redis(fsync) as url:
            ours.fill(url, count, types)
            settle_down(fsync)
            return in_child(ours.drain, url, count, types)

    def raw() -> float:
        with fresh_redis(fsync) as url:
            with raw_redis.connect(url) as client:
                raw_redis.insert(client, count)
            settle_down(fsync)
            return in_child(_drain_raw, url)

    mine, limit = alternate(rounds, ("worker", worker), ("raw claim + delete", raw), "jobs/s")
    return Figure(name=f"drain, Redis, {fsync}, {types} types", ours=mine, limit=limit, goal=0.3)


def _bytes_per_job(url: str, count: int) -> float:
    """What the server needs for one waiting job with a payload of 100 bytes."""
    workload.harbor.use(url)
    before = used_memory()
    workload.harbor.client.enqueue_many([JobRequest(type="t", payload={"text": PAYLOAD})] * count)
    after = used_memory()
    workload.harbor.close()
    return (after - before) / count


def bulk_enqueue(count: int, rounds: int) -> Figure:
    def many() -> float:
        with fresh_redis() as url:
            return ours.bulk_enqueue(url, count)

    def raw() -> float:
        with fresh_redis() as url, raw_redis.connect(url) as client:
            return raw_redis.insert(client, count)

    mine, limit = alternate(rounds, ("enqueue_many", many), ("raw RPUSH of 1,000", raw), "jobs/s")
    with fresh_redis() as url:
        size = _bytes_per_job(url, count)
    return Figure(
        name="bulk enqueue, Redis, everysec",
        ours=mine,
        limit=limit,
        goal=0.35,
        facts={"memory of a waiting job with 100 bytes of payload": f"{size:,.0f} bytes"},
    )


def single_enqueue(looks: int, rounds: int) -> Figure:
    on_a_loop: list[float] = []

    def one() -> float:
        with fresh_redis() as url:
            return asyncio.run(ours.enqueue_one(url, looks))

    def raw() -> float:
        with fresh_redis() as url, raw_redis.connect(url) as client:
            on_a_loop.append(asyncio.run(raw_redis.insert_one_async(url, looks)))
            return raw_redis.insert_one(client, looks)

    mine, limit = alternate(rounds, ("await client.enqueue", one), ("RPUSH", raw), "ms")
    return Figure(
        name="single enqueue, Redis, everysec",
        ours=mine,
        limit=limit,
        goal=1.3,
        higher_is_better=False,
        facts={"RPUSH on an event loop": f"{statistics.median(on_a_loop):.4g} ms"},
    )


def _pick_up_raw(answer: Connection, url: str, count: int) -> None:
    with raw_redis.connect(url) as client:
        raw_redis.serve(client, lambda _: answer.send(time.monotonic()), count)


async def _push_to_claim(url: str, count: int) -> float:
    with raw_redis.connect(url) as client:

        async def enqueue(n: int) -> None:
            raw_redis.push(client, n)

        return await latency(_pick_up_raw, url, count, enqueue)


def pick_up(count: int, rounds: int, idle_seconds: float) -> Figure:
    def measured(side: Callable[[str, int], Awaitable[float]]) -> Callable[[], float]:
        async def on(url: str) -> float:
            return await side(url, count)

        def measure() -> float:
            with fresh_redis() as url:
                return asyncio.run(on(url))

        return measure

    mine, limit = alternate(
        rounds,
        ("enqueue to handler", measured(ours.pick_up)),
        ("RPUSH to claim", measured(_push_to_claim)),
        "ms",
    )
    return Figure(
        name="idle pick-up, Redis, everysec",
        ours=mine,
        limit=limit,
        goal=1.5,
        higher_is_better=False,
        note="median",
        facts={"commands per minute of an idle worker": commands_per_minute(idle_seconds)},
    )


@contextmanager
def _stores() -> Iterator[tuple[str, str]]:
    """Under two prefixes of one server."""
    with fresh_redis() as url:
        yield with_fresh_prefix(url), with_fresh_prefix(url)


def figures(quick: bool) -> list[Callable[[], Figure]]:
    rounds = 1 if quick else 3
    count = 20_000 if quick else 100_000
    many = 20_000 if quick else 1_000_000
    kinds = {
        "waiting": claims.fill_waiting,
        claims.AHEAD: claims.fill_ahead,
        "scheduled": claims.fill_scheduled,
        "in the history": claims.fill_history,
    }
    return [
        *(partial(drain, count, rounds, fsync, types) for fsync in FSYNCS for types in TYPES),
        lambda: bulk_enqueue(count, rounds),
        lambda: single_enqueue(500, rounds),
        lambda: pick_up(50 if quick else 200, rounds, 10 if quick else 60),
        *claims.figures(_stores, kinds, many, rounds, settle_down),
    ]
