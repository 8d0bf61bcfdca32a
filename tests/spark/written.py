"""What a Spark write left in a store, seen past the store; and partitions that do not survive their first try."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark import TaskContext

from taskharbor.drivers.contract import Driver, JobFilter
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.drivers.registry import connect
from taskharbor.jobs import JobRecord


def ask(url: str, work: Callable[[Driver], Any]) -> Any:
    async def asked() -> Any:
        async with connect(url) as driver:
            return await work(driver)

    return asyncio.run(asked())


def jobs_in(url: str) -> list[JobRecord]:
    now = time.time_ns() // 1000
    page = ask(url, lambda driver: driver.list_jobs(JobFilter(), now=now, limit=1_000_000))
    jobs: list[JobRecord] = page.jobs
    return jobs


def staged_rows(url: str) -> int:
    """Of PostgreSQL rows of a table, else blobs."""
    if not url.startswith("postgres"):
        return len(ask(url, lambda driver: driver.list_blobs("staging")))
    options = parse_url(url)
    with psycopg.connect(options.conninfo) as connection:
        statement = sql.SQL("SELECT count(*) FROM {}.staged").format(sql.Identifier(options.schema))
        ((count,),) = connection.execute(statement).fetchall()
    return int(count)


ForMapInArrow = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def dying_midway() -> ForMapInArrow:
    """After two batches, the first try of partition 1 raises, and the first two of partition 3 lose their process.

    An inner function travels to Spark's workers by value: they cannot import the tests.
    """

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.attemptNumber()
        for number, batch in enumerate(batches):
            if number == 2 and partition == 1 and attempt == 0:
                raise RuntimeError("this partition does not survive its first try")
            if number == 2 and partition == 3 and attempt < 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    return passed_on


def never_ending_well() -> ForMapInArrow:
    """Partition 1 raises at every try, after two batches."""

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if number == 2 and context.partitionId() == 1:
                raise RuntimeError("this partition never survives")
            yield batch

    return passed_on
