"""Every kind of bulk store, a bit of everything to put into it, and looks at it from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from drivers.postgres.harness import Raw
from records import make_record
from taskharbor.bulk import publish_staged
from taskharbor.bulk.stage import FOLDER, folder_of, new_write
from taskharbor.bulk.store import BulkStore
from taskharbor.bulk.tables import Part, Selection, Table
from taskharbor.drivers.contract import DAY, Ack, Driver, Fail, JobFilter, QueueSettings, QueueStats, RetryAt
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, Failure, JobRecord, Micros, to_micros
from taskharbor_testkit import servers
from taskharbor_testkit.servers.s3 import fresh_s3_url

T = TypeVar("T")
NOW = 1_800_000_000_000_000
ODD = 'it\'s \\ 100 % "odd" ☂'

EVERYTHING = Selection()

# SQLite has the same rules as memory, and S3 those of files.
KINDS = [
    *("memory", "postgres", "redis", "files"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sqlite", "s3")),
]
LOG_KINDS = [*KINDS, "files, small segments"]

record = partial(make_record, now=NOW)


@contextmanager
def fresh_url(kind: str, folder: Path) -> Iterator[str]:
    """A store of its own, which is removed afterwards."""
    if kind.startswith("postgres"):
        yield (url := servers.with_fresh_schema(servers.given_or_shared_postgres().url))
        servers.drop_schema(url)
    elif kind == "redis":
        yield (url := servers.with_fresh_prefix(servers.given_or_shared_redis().url))
        servers.drop_prefix(url)
    elif kind == "memory":
        yield f"memory://{folder.name}"
        MemoryDriver.drop(folder.name)
    elif kind == "sqlite":
        yield f"sqlite:///{folder}/jobs.db?durability=normal"
    elif kind == "s3":
        yield f"{fresh_s3_url()}&segment_rows=10000"
    else:
        rows = "segment_rows=3&merge=2" if "small" in kind else "segment_rows=10000"
        yield f"file://{folder}/store?sync=off&{rows}"


def within(url: str, use: Callable[[Driver], Awaitable[T]]) -> T:
    """Do something with an open driver."""

    async def run() -> T:
        async with connect(url) as driver:
            return await use(driver)

    return asyncio.run(run())


# -- jobs and what became of them -----------------------------------------------------------------------------


async def finish(
    driver: Driver,
    count: int,
    *,
    queue: str = "q",
    now: Micros | None = None,
    later: Micros = 0,
    **fields: Any,
) -> list[str]:
    """Enqueue, claim and ack so many jobs: as many rows of the log. Their ids."""
    now = (await driver.time() if now is None else now) + later
    records = [make_record(queue=queue, now=now, **fields) for _ in range(count)]
    await driver.enqueue(records, now=now, new_ids=True)
    done: list[str] = []
    # Of a queue with shards, one claim may not find them all.
    while len(done) < count:
        held = await driver.reserve(queue, limit=count, lease_for=60 * SECOND, now=now, worker="w")
        assert held
        assert not any(await driver.settle([Ack(job.id, job.token or "") for job in held], now=now))
        done += [job.id for job in held]
    return done


def add(url: str, count: int, **options: Any) -> None:
    within(url, lambda driver: finish(driver, count, **options))


async def fill(driver: Driver) -> None:
    """Every state, and in some job every column."""
    now = await driver.time()
    job = partial(make_record, now=now, queue="a")

    await driver.configure("b", QueueSettings(paused=True, max_inflight=7, failure_queue="graves"), now=now)
    jobs = [
        job("retried", priority=30, headers={"lang": ODD}, codec="raw", payload=b"\x00\xff"),
        job("dead", priority=20, type=ODD, max_stalls=3),
        job("done", priority=10, idempotency_key=ODD, payload=b"x" * 5000),
        job("inflight", priority=5, key="k"),
        job("ready", priority=-10),
        job("scheduled", run_at_us=now + 3600 * SECOND),
        job("cancelled", queue="b", type="other", created_at_us=now - 10 * SECOND),
        job("due soon", queue="b", run_at_us=now + 1),
    ]
    await driver.enqueue(jobs, now=now)
    await driver.cancel(["cancelled"], now=now)
    held = await driver.reserve("a", limit=4, lease_for=3600 * SECOND, now=now, worker="worker ☂")
    assert [one.id for one in held] == ["retried", "dead", "done", "inflight"]
    await driver.enqueue([job("blocked", key="k", priority=-5)], now=now)
    tokens = [one.token or "" for one in held]
    retry = RetryAt("retried", tokens[0], now + 3600 * SECOND, 1, Failure("OSError", ODD))
    fail = Fail("dead", tokens[1], 1, Failure("ValueError", "no"))
    await driver.settle([retry, fail, Ack("done", tokens[2], b"result")], now=now + 5)


async def attempts_of(driver: Driver) -> list[dict[str, Any]]:
    page = await driver.read_attempts(limit=1_000_000)
    return [msgspec.structs.asdict(one) for one in page.attempts]


async def jobs_of(driver: Driver) -> list[dict[str, Any]]:
    page = await driver.list_jobs(JobFilter(), now=await driver.time(), limit=1_000_000)
    return [msgspec.structs.asdict(one) for one in page.jobs]


def rows(store: BulkStore, parts: Iterable[Part]) -> list[dict[str, Any]]:
    """What a store gives, with instants as microseconds under the names that records use."""
    found = [row for part in parts for batch in store.read(part) for row in batch.to_pylist()]
    return [dict(map(_plain, row.items())) for row in found]


def _plain(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    if name.endswith("_at"):
        return f"{name}_us", to_micros(value) if isinstance(value, datetime) else None
    return name, value


def selected(store: BulkStore, table: Table, selection: Selection = EVERYTHING) -> list[dict[str, Any]]:
    return rows(store, store.parts(table, selection, parallelism=4))


def seqs(store: BulkStore, after: str, until: str, parallelism: int = 3) -> list[int]:
    return [row["seq"] for row in rows(store, store.between(after, until, parallelism=parallelism))]


def every_seq(url: str) -> list[int]:
    return sorted(row["seq"] for row in within(url, attempts_of))


def jobs_in(url: str) -> dict[str, JobRecord]:
    page = within(url, lambda driver: driver.list_jobs(JobFilter(), now=NOW, limit=100_000))
    return {job.id: job for job in page.jobs}


def stats_of(url: str, queue: str) -> QueueStats:
    (stats,) = within(url, lambda driver: driver.stats(now=NOW, queue=queue))
    return stats


def write_jobs(store: BulkStore, *batches: Sequence[JobRecord], write: str = "") -> int:
    """A write by one task, of its own if nothing else is said."""
    write = write or new_write()
    store.stage(write, "0.1", batches)
    return store.publish(write, ["0.1"], now=NOW)


# -- what a store keeps of bulk writes, past its interface -----------------------------------------------------


class BehindPostgres(Raw):
    def has_staged(self, write: str) -> bool:
        return bool(self("SELECT 1 FROM staged WHERE write = %s", write))

    def published(self) -> set[str]:
        """The series of the marks."""
        return {series for (series,) in self("SELECT series FROM published")}

    def lose_some(self) -> None:
        """Some of what is staged goes."""
        self("DELETE FROM staged WHERE number = 1")

    def pass_days(self, write: str) -> None:
        """Age what is staged for a write by four days, and the marks by a month."""
        self("UPDATE staged SET staged_at = staged_at - interval '4 days' WHERE write = %s", write)
        self("UPDATE published SET published_at = published_at - interval '31 days'")


class BehindBlobs:
    """The same where everything is in blobs of the store."""

    def __init__(self, url: str) -> None:
        self._url = url

    def has_staged(self, write: str) -> bool:
        return bool(within(self._url, lambda driver: driver.list_blobs(folder_of(write))))

    def published(self) -> set[str]:
        return set(within(self._url, publish_staged._look).marks)

    def lose_some(self) -> None:
        async def lose(driver: Driver) -> None:
            await driver.drop_blobs((await driver.list_blobs(FOLDER))[:1])

        within(self._url, lose)

    def pass_days(self, write: str) -> None:
        """The time is in the names."""

        def age_marks(writes: publish_staged.Writes) -> None:
            for series, mark in writes.marks.items():
                writes.marks[series] = msgspec.structs.replace(mark, at=mark.at - 31 * DAY)

        async def age(driver: Driver) -> None:
            names = await driver.list_blobs(folder_of(write))
            for name, data in zip(names, await driver.read_blobs(names), strict=True):
                folder, _, last = name.rpartition("/")
                when, _, rest = last.partition("-")
                await driver.put_blob(f"{folder}/{int(when, 16) - 4 * DAY:015x}-{rest}", data or b"")
            await driver.drop_blobs(names)
            await publish_staged._change(driver, age_marks)

        within(self._url, age)


Behind = BehindPostgres | BehindBlobs
