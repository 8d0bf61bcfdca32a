"""What the tests of bulk reading and writing share: jobs that end at once, and what is in a store afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from taskharbor.bulk.store import BulkStore
from taskharbor.drivers.contract import Ack, Driver, QueueSettings
from taskharbor.drivers.objectstore.driver import ObjectStoreDriver
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros
from taskharbor.requests import new_ids

T = TypeVar("T")
DAY = 86_400 * SECOND


def within(url: str, use: Callable[[Driver], Awaitable[T]]) -> T:
    async def run() -> T:
        async with connect(url) as driver:
            return await use(driver)

    return asyncio.run(run())


def records(count: int, now: Micros, *, queue: str = "q", **fields: Any) -> list[JobRecord]:
    return [
        JobRecord(id=job_id, type="t", queue=queue, run_at_us=now, created_at_us=now, **fields)
        for job_id in new_ids(count)
    ]


async def finish(
    driver: Driver, count: int, *, queue: str = "q", later: Micros = 0, payload: bytes = b""
) -> list[str]:
    """So many jobs, done at once: as many rows of the log. Their ids."""
    now = await driver.time() + later
    await driver.enqueue(records(count, now, queue=queue, payload=payload), now=now, new_ids=True)
    done: list[str] = []
    # Of a queue with shards, one reservation may not find them all.
    while len(done) < count:
        held = await driver.reserve(queue, limit=count, lease_for=60 * SECOND, now=now, worker="w")
        ends = await driver.settle([Ack(job.id, job.token or "") for job in held], now=now)
        assert ends == [None] * len(held)
        done += [job.id for job in held]
    return done


async def fold(driver: Driver) -> None:
    """Until everything is in segments that can be, and those are merged."""
    assert isinstance(driver, ObjectStoreDriver)
    for shard in await driver.store.shards():
        await shard.compaction.settled()


def add(url: str, count: int, *, queue: str = "q", later: Micros = 0, payload: bytes = b"") -> list[str]:
    async def work(driver: Driver) -> list[str]:
        done = await finish(driver, count, queue=queue, later=later, payload=payload)
        await fold(driver)
        return done

    return within(url, work)


def forget_history(url: str, queue: str = "q") -> None:
    async def remove(driver: Driver) -> None:
        now = await driver.time()
        await driver.configure(queue, QueueSettings(keep_attempts_us=DAY), now=now)
        await driver.prune(now=now + 2 * DAY)

    within(url, remove)


def seqs(store: BulkStore, after: str, until: str, parallelism: int = 3) -> list[int]:
    parts = store.between(after, until, parallelism=parallelism)
    return [seq for part in parts for batch in store.read(part) for seq in batch.column("seq").to_pylist()]


def every_seq(url: str) -> list[int]:
    return [one.seq for one in within(url, lambda driver: driver.read_attempts(limit=1_000_000)).attempts]


def waiting(url: str, *queues: str) -> dict[str, int]:
    async def count(driver: Driver) -> dict[str, int]:
        now = await driver.time()
        return {
            queue: (await driver.stats(now=now, queue=queue))[0].counts[JobState.READY] for queue in queues
        }

    return within(url, count)


def objects(folder: Path) -> dict[str, bytes]:
    """Every object of a store in files, as it is on the disk."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".taskharbor" not in path.parts
    }
