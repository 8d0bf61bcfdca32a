"""What is said once for the whole history: totals, run times by type, errors, remarkable jobs. Each is a bounded query."""

from __future__ import annotations

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from taskharbor.jobs import JobState
from taskharbor.spark.lake.buckets import percentiles
from taskharbor.spark.report.data import ErrorGroup, JobLine, RunTimes

TYPES_SHOWN = 16
ERRORS_SHOWN = 12
JOBS_SHOWN = 8
LEASE_ENDS = ("done", "retried", "expired", "dead", "released")
ENDED = (JobState.DONE.value, JobState.DEAD.value)
MESSAGE_CHARS = 500


def states(lifecycles: DataFrame) -> list[Row]:
    """(state, jobs, executions, and how often each outcome was)"""
    return (
        lifecycles.groupBy("state")
        .agg(F.count("*").alias("jobs"), *(F.sum(name).alias(name) for name in ("executions", *LEASE_ENDS)))
        .collect()
    )


def durations(histograms: DataFrame) -> list[Row]:
    """(type, executions, wait_p50_us ... run_p99_us) of the most frequent types; the one without a type is all together."""
    ran = F.sum(F.when(F.col("metric") == "run", F.col("count")).otherwise(0))
    return (
        histograms.rollup("type")
        .agg(
            ran.alias("executions"),
            *percentiles("wait", prefix="wait"),
            *percentiles("run", prefix="run"),
        )
        .orderBy(F.desc("executions"), F.col("type").asc_nulls_first())
        .limit(TYPES_SHOWN + 1)
        .collect()
    )


def run_times(rows: list[Row]) -> list[RunTimes]:
    """Slowest first."""
    found = [
        RunTimes(
            type=row["type"],
            executions=row["executions"],
            p50_us=row["run_p50_us"],
            p95_us=row["run_p95_us"],
            p99_us=row["run_p99_us"],
        )
        for row in rows
        if row["type"] is not None and row["run_p50_us"] is not None
    ]
    return sorted(found, key=lambda one: (-one.p95_us, one.type))


def errors(gold: DataFrame) -> list[ErrorGroup]:
    """Most frequent first, over all sources and days."""
    keys = ("error_type", "fingerprint", "queue", "type")
    sample = F.min(F.struct("first_seen", "sample_job", "sample_message"))
    rows = (
        gold.groupBy(*keys)
        .agg(
            F.sum("count").alias("count"),
            F.unix_micros(F.min("first_seen")).alias("first_seen_us"),
            F.unix_micros(F.max("last_seen")).alias("last_seen_us"),
            sample.alias("sample"),
        )
        .orderBy(F.desc("count"), *keys)
        .limit(ERRORS_SHOWN)
        .select("*", "sample.sample_job", "sample.sample_message")
        .drop("sample")
        .collect()
    )
    return [
        ErrorGroup(
            error_type=row["error_type"] or "Error",
            fingerprint=row["fingerprint"] or "",
            queue=row["queue"],
            type=row["type"],
            count=row["count"],
            first_seen_us=row["first_seen_us"],
            last_seen_us=row["last_seen_us"],
            sample_message=row["sample_message"] or "",
            sample_job=row["sample_job"],
        )
        for row in rows
    ]


def slowest(lifecycles: DataFrame) -> list[JobLine]:
    """By the time from when a job might first run to its end: a delay that was asked for is not slowness."""
    ended = lifecycles.where(F.col("state").isin(*ENDED))
    return _lines(ended.orderBy(F.desc(_TAKEN), "source", "job_id").limit(JOBS_SHOWN))


def most_tried(lifecycles: DataFrame) -> list[JobLine]:
    again = lifecycles.where(F.col("executions") > 1)
    return _lines(
        again.orderBy(F.desc("executions"), F.desc("total_run_us"), "source", "job_id").limit(JOBS_SHOWN)
    )


_TAKEN = "taken_us"


def with_time_taken(lifecycles: DataFrame) -> DataFrame:
    taken = F.unix_micros("finished_at") - F.unix_micros(F.greatest("first_run_at", "created_at"))
    return lifecycles.withColumn(_TAKEN, taken)


def _lines(jobs: DataFrame) -> list[JobLine]:
    error = F.concat_ws(
        ": ", F.nullif("last_error_type", F.lit("")), F.substring("last_error_message", 1, MESSAGE_CHARS)
    )
    rows = jobs.select(
        "job_id",
        "queue",
        "type",
        "state",
        "executions",
        _TAKEN,
        "total_run_us",
        error.alias("last_error"),
    ).collect()
    return [
        JobLine(
            job_id=row["job_id"],
            queue=row["queue"],
            type=row["type"],
            state=row["state"],
            executions=row["executions"],
            total_us=row[_TAKEN],
            waited_us=None if row[_TAKEN] is None else max(0, row[_TAKEN] - row["total_run_us"]),
            ran_us=row["total_run_us"],
            last_error=row["last_error"] or None,
        )
        for row in rows
    ]
