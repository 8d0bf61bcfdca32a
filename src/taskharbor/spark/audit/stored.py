"""The log beside the store: jobs that were lost, that ended too early or ran too often, and those that nobody claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.bulk.store import open_store
from taskharbor.jobs import to_datetime
from taskharbor.spark.audit.checks import check
from taskharbor.spark.audit.violations import Kind

_ROW = "source job_id created_at queue seq fence reserved_at ended_at outcome state"
_JOB = "source id queue key state fence created_at run_at finished_at attempts stalls max_attempts max_stalls"


class Stored(NamedTuple):
    """A store after the log that it is compared with had been read: tables with `source`.

    `later` is the log, read once more after the jobs: a job may have ended between the two. `read_at` is an instant before the
    jobs were read. `waiting_limit` is how long a job may be due without being claimed; None: for ever.
    """

    jobs: DataFrame
    queues: DataFrame
    later: DataFrame
    read_at: datetime
    waiting_limit: timedelta | None = None

    @property
    def unchecked(self) -> tuple[Kind, ...]:
        return (Kind.LEFT_WAITING,) if self.waiting_limit is None else ()


@contextmanager
def read_store(
    spark: SparkSession, url: str, source: str, waiting_limit: timedelta | None
) -> Iterator[Stored]:
    """Read the jobs now, and the log after them."""
    with open_store(url) as store:
        read_at = to_datetime(store.time())
    jobs = read_table(spark, url, "jobs", source).select(*_JOB.split()).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        jobs.count()
        queues, later = (read_table(spark, url, name, source) for name in ("queues", "attempts"))
        yield Stored(jobs, queues, later, read_at, waiting_limit)
    finally:
        jobs.unpersist()


def read_table(spark: SparkSession, url: str, table: str, source: str) -> DataFrame:
    reader = spark.read.format("taskharbor").option("url", url).option("table", table)
    return reader.load().withColumn("source", F.lit(source))


def check_store(attempts: DataFrame, stored: Stored) -> DataFrame:
    """Compare the log with the jobs that the store has."""
    before = None if stored.waiting_limit is None else stored.read_at - stored.waiting_limit
    both = {"attempts": attempts.select(*_ROW.split()), "later": stored.later.select(*_ROW.split())}
    return check("stored", before=before, **both, jobs=stored.jobs, queues=stored.queues)
