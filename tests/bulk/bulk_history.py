"""A small store with a bit of everything, and what the driver contract says is in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from records import make_record
from taskharbor.bulk.store import BulkStore
from taskharbor.bulk.tables import Part
from taskharbor.drivers.contract import Ack, Driver, Fail, JobFilter, QueueSettings, Retry
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, Failure, Micros, to_micros

T = TypeVar("T")
KINDS = ["sqlite", "postgres", "redis", "files", "files, small segments", "memory"]


def within(url: str, use: Callable[[Driver], Awaitable[T]]) -> T:
    """Do something with an open driver."""

    async def run() -> T:
        async with connect(url) as driver:
            return await use(driver)

    return asyncio.run(run())


async def finish(driver: Driver, count: int, *, now: Micros, queue: str = "plain", name: str = "p") -> None:
    """So many jobs, done at once: as many rows of the log."""
    records = [make_record(f"{name}{n}", queue=queue, now=now) for n in range(count)]
    await driver.enqueue(records, now=now)
    held = await driver.reserve(queue, limit=count, lease_for=60 * SECOND, now=now, worker="w")
    assert await driver.settle([Ack(job.id, job.token or "") for job in held], now=now + 1) == [None] * count


async def fill(driver: Driver) -> None:
    """Every state, and in some job every column."""
    now = await driver.time()
    odd = 'it\'s \\ 100 % "odd" ☂'

    record = partial(make_record, now=now, queue="a")

    await driver.configure("b", QueueSettings(paused=True, max_inflight=7, failure_queue="graves"), now=now)
    await driver.enqueue(
        [
            record("retried", priority=30, headers={"lang": odd}, codec="raw", payload=b"\x00\xff"),
            record("dead", priority=20, type=odd, max_stalls=3),
            record("done", priority=10, idempotency_key=odd, payload=b"x" * 5000),
            record("inflight", priority=5, key="k"),
            record("ready", priority=-10),
            record("scheduled", run_at_us=now + 3600 * SECOND),
            record("cancelled", queue="b", type="other", created_at_us=now - 10 * SECOND),
            record("due soon", queue="b", run_at_us=now + 1),
        ],
        now=now,
    )
    await driver.cancel(["cancelled"], now=now)
    held = await driver.reserve("a", limit=4, lease_for=3600 * SECOND, now=now, worker="worker ☂")
    assert [job.id for job in held] == ["retried", "dead", "done", "inflight"]
    await driver.enqueue([record("blocked", key="k", priority=-5)], now=now)
    tokens = [job.token or "" for job in held]
    await driver.settle(
        [
            Retry("retried", tokens[0], now + 3600 * SECOND, 1, Failure("OSError", odd)),
            Fail("dead", tokens[1], 1, Failure("ValueError", "no")),
            Ack("done", tokens[2], b"result"),
        ],
        now=now + 5,
    )


async def attempts_of(driver: Driver) -> list[dict[str, Any]]:
    page = await driver.read_attempts(limit=1_000_000)
    return [{name: getattr(one, name) for name in one.__struct_fields__} for one in page.attempts]


async def jobs_of(driver: Driver) -> list[dict[str, Any]]:
    page = await driver.list_jobs(JobFilter(), now=await driver.time(), limit=1_000_000)
    return [{name: getattr(one, name) for name in one.__struct_fields__} for one in page.jobs]


def rows(store: BulkStore, parts: Iterable[Part]) -> list[dict[str, Any]]:
    """What a store gives, with instants as microseconds under the names that records use."""
    found = [row for part in parts for batch in store.read(part) for row in batch.to_pylist()]
    return [dict(map(_plain, row.items())) for row in found]


def _plain(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    if name.endswith("_at"):
        return f"{name}_us", to_micros(value) if isinstance(value, datetime) else None
    return name, value
