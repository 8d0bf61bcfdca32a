"""All checks together, over a DataFrame, a lake or a store."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce
from typing import Protocol

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from taskharbor.spark.audit.duplicates import check_row_numbers
from taskharbor.spark.audit.keys import check_keys
from taskharbor.spark.audit.kinds import Kind
from taskharbor.spark.audit.limits import check_limits
from taskharbor.spark.audit.live_jobs import check_live_jobs, has_ended
from taskharbor.spark.audit.lives import check_lives
from taskharbor.spark.audit.result import AuditResult, replaced, summarise
from taskharbor.spark.audit.single_rows import check_single_rows

STORE = "store"
"""The source that rows straight from a store are given."""


def audit(
    attempts: DataFrame, *, live_jobs: DataFrame | None = None, limits: DataFrame | None = None
) -> DataFrame:
    """Every violation of the guarantees that the log shows, as rows of `violations.SCHEMA`.

    `attempts`: the columns of `bulk.schemas.ATTEMPTS` and `source`. `live_jobs`: source, id, state, fence and created_at of all
    jobs in the store, read after the attempts; without them lost jobs are not looked for. `limits`: source, queue, max_inflight
    and observed_at; without them W is not checked.
    """
    return _all_checks(attempts, attempts, live_jobs, limits)


def _all_checks(
    attempts: DataFrame, as_logged: DataFrame, live_jobs: DataFrame | None, limits: DataFrame | None
) -> DataFrame:
    """`as_logged`: the same rows before anybody dropped any as doubled."""
    checks = [
        check_single_rows(attempts),
        check_lives(attempts),
        check_keys(attempts),
        check_row_numbers(as_logged),
    ]
    if limits is not None:
        checks.append(check_limits(attempts, limits))
    if live_jobs is not None:
        checks.append(check_live_jobs(attempts, live_jobs))
    return reduce(DataFrame.unionByName, checks)


class ReadableLake(Protocol):
    """What the audit wants of a lake."""

    def read(self, spark: SparkSession, table: str) -> DataFrame: ...


def audit_lake(spark: SparkSession, lake: ReadableLake, *, live_jobs: DataFrame | None = None) -> AuditResult:
    """Everything the lake has, with W as the pipeline saw it whenever it ran."""
    attempts = lake.read(spark, "silver.attempts")
    limits = lake.read(spark, "bronze.queues").select("source", "queue", "max_inflight", "observed_at")
    as_logged = lake.read(spark, "bronze.attempts")
    return summarise(_all_checks(attempts, as_logged, live_jobs, limits), attempts)


def audit_store(spark: SparkSession, url: str) -> AuditResult:
    """Straight from a store, without a lake: what its log still has, against its jobs and its limits as they are now."""
    # Read once and kept: a log that grows or is pruned between two checks would contradict itself.
    attempts = _read(spark, url, "attempts").persist(StorageLevel.MEMORY_AND_DISK)
    jobs = _read(spark, url, "jobs").select("source", "id", "state", "fence", "created_at")
    queues = _read(spark, url, "queues").select("source", "queue", "max_inflight")
    try:
        # Only now, so that the jobs are read after it.
        attempts.count()
        jobs = jobs.persist(StorageLevel.MEMORY_AND_DISK)
        limits = queues.withColumn("observed_at", F.lit(datetime.now(UTC)))
        result = summarise(audit(attempts, live_jobs=jobs, limits=limits), attempts)
        if Kind.LOST_JOB in result.kinds:
            lost = check_live_jobs(attempts, jobs).where(F.col("kind") == str(Kind.LOST_JOB))
            result = replaced(result, Kind.LOST_JOB, summarise(_not_ended_since(spark, url, lost), attempts))
        return result
    finally:
        attempts.unpersist()
        jobs.unpersist()


def _not_ended_since(spark: SparkSession, url: str, lost: DataFrame) -> DataFrame:
    """A job may have ended, and been removed, after the log was read and before the jobs were: the log says so by now."""
    last = (
        _read(spark, url, "attempts").groupBy("job_id", "source").agg(F.max_by("state", "seq").alias("state"))
    )
    return lost.join(last.where(has_ended()), ["source", "job_id"], "left_anti")


def _read(spark: SparkSession, url: str, table: str) -> DataFrame:
    reader = spark.read.format("taskharbor").option("url", url).option("table", table)
    return reader.load().withColumn("source", F.lit(STORE))
