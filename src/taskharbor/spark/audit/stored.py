"""The log beside the store: jobs that were lost, that ended too early or ran too often, and those that nobody claims.

`stored.sql` has the conditions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.client import portal
from taskharbor.drivers.registry import connect
from taskharbor.jobs import Micros, to_datetime
from taskharbor.spark.audit.violations import Kind, Rule, broken, query, rules

_RULES = (
    *rules(
        {
            Kind.LOST_JOB: "was {last.state} after lease {fence} ended at {at}, and the store does not have it",
            Kind.STORE_CONTRADICTS_LOG: "was {last.state} with fence {fence} at {at}, and the store has it as {job.state} with "
            "fence {job.fence}",
            Kind.DIED_TOO_EARLY: "died when lease {fence} expired ({at}), with {job.attempts} of {job.max_attempts} attempts and "
            "{job.stalls} stalls (max_stalls {job.max_stalls})",
            Kind.TOO_MANY_EXECUTIONS: "was run {runs} times and lost {expiries} leases up to {at}: max_attempts is "
            "{job.max_attempts}, max_stalls {job.max_stalls}, and it was requeued {requeues} times",
        },
        other_fence="job.fence",
    ),
    Rule(
        Kind.DONE_WITHOUT_ROW,
        "is done in the store since {at}, and no row of the log says so",
        at="job.finished_at",
    ),
    Rule(
        Kind.LEFT_WAITING,
        "is {job.state} in queue {queue}, due since {at}, and nobody has claimed it",
        at="due",
    ),
)
STORE_KINDS = tuple(rule.kind for rule in _RULES)
"""The kinds that only the store and its log together show."""
_ROW = (
    "source",
    "job_id",
    "created_at",
    "queue",
    "seq",
    "fence",
    "reserved_at",
    "ended_at",
    "outcome",
    "state",
)
_JOB = (
    *("source", "id", "queue", "key", "state", "fence", "created_at", "run_at", "finished_at"),
    *("attempts", "stalls", "max_attempts", "max_stalls"),
)
_QUEUE = ("source", "queue", "paused", "max_inflight", "inflight")


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
    read_at = to_datetime(portal().call(_time(url)))
    jobs = read_table(spark, url, "jobs", source).select(*_JOB).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        jobs.count()
        queues, later = (read_table(spark, url, name, source) for name in ("queues", "attempts"))
        yield Stored(jobs, queues, later, read_at, waiting_limit)
    finally:
        jobs.unpersist()


async def _time(url: str) -> Micros:
    driver = connect(url)
    await driver.open_to_read()
    try:
        return await driver.time()
    finally:
        await driver.close()


def read_table(spark: SparkSession, url: str, table: str, source: str) -> DataFrame:
    reader = spark.read.format("taskharbor").option("url", url).option("table", table)
    return reader.load().withColumn("source", F.lit(source))


def check_store(attempts: DataFrame, stored: Stored) -> DataFrame:
    """Compare the log with the jobs that the store has."""
    limit = stored.waiting_limit
    rows = query(
        "stored",
        {"before": None if limit is None else stored.read_at - limit},
        attempts=attempts.select(*_ROW),
        later=stored.later.select(*_ROW),
        jobs=stored.jobs.select(*_JOB),
        queues=stored.queues.select(*_QUEUE),
    )
    return broken(rows, *_RULES)
