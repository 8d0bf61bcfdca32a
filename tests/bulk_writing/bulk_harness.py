"""A look at a store from outside, for the tests of bulk writing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from records import make_record
from taskharbor.bulk.stage import new_write
from taskharbor.bulk.store import BulkStore
from taskharbor.client import portal
from taskharbor.drivers.contract import Driver, JobFilter, QueueStats
from taskharbor.drivers.registry import connect
from taskharbor.jobs import JobRecord

NOW = 1_800_000_000_000_000

record = partial(make_record, now=NOW)


def ask(url: str, work: Callable[[Driver], Any]) -> Any:
    async def asked() -> Any:
        async with connect(url) as driver:
            return await work(driver)

    return portal().call(asked())


def jobs_in(url: str) -> dict[str, JobRecord]:
    page = ask(url, lambda driver: driver.list_jobs(JobFilter(), now=NOW, limit=100_000))
    return {job.id: job for job in page.jobs}


def stats_of(url: str, queue: str) -> QueueStats:
    (stats,) = ask(url, lambda driver: driver.stats(now=NOW, queue=queue))
    found: QueueStats = stats
    return found


def write_jobs(store: BulkStore, *batches: Sequence[JobRecord]) -> int:
    """A write of its own, by one task."""
    write = new_write()
    store.stage(write, "0.1", batches)
    return store.publish(write, ["0.1"], now=NOW)
