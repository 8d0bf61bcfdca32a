"""Silver: the rows of the log, each once with its wait and its run, and one row per job.

A lifecycle is an aggregate of the attempts of a job that can be aggregated again: the row of yesterday and the attempts of today
give the row of today.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.jobs import TERMINAL_STATES, JobState, Outcome
from taskharbor.spark.lake import quality
from taskharbor.spark.lake.frames import declared


def silver_attempts(bronze: DataFrame, *, is_unique: bool = False) -> DataFrame:
    """Each row that passes the checks. `is_unique`: no row is there twice, so none is looked for."""
    return declared(checked(bronze, is_unique=is_unique).drop("run", "ingested_at"), "silver.attempts")


def checked(bronze: DataFrame, *, is_unique: bool = False) -> DataFrame:
    """The same, with the columns that bronze has more."""
    return _timed(quality.passing(bronze, is_unique=is_unique))


def quarantined(bronze: DataFrame, *, is_unique: bool = False) -> DataFrame:
    """The other rows, each with the check that it does not pass."""
    rows = quality.failing(bronze, is_unique=is_unique)
    return declared(_timed(rows).drop("run", "ingested_at"), "quarantine.attempts")


def _timed(rows: DataFrame) -> DataFrame:
    # A lease gives no right beyond its expiry, however late somebody noticed; without one there is none to end.
    valid_until = F.when(F.col("reserved_at").isNotNull(), F.least("ended_at", "lease_expires_at"))
    times = {
        "wait_us": elapsed("run_at", "reserved_at"),
        "run_us": elapsed("reserved_at", "ended_at"),
        "valid_until": valid_until,
    }
    return rows.withColumns(times)


def elapsed(start: str, end: str) -> Column:
    """Null where either is."""
    return F.unix_micros(end) - F.unix_micros(start)


BY_OUTCOME: tuple[str, ...] = tuple(outcome.value for outcome in Outcome)
SUMS: tuple[str, ...] = ("executions", *BY_OUTCOME, "total_wait_us", "total_run_us")
TERMINAL: tuple[str, ...] = tuple(sorted(state.value for state in TERMINAL_STATES))
# States that no job leaves. Their rows are written once, in a log that keeps the rules.
FINAL = (JobState.DONE.value, JobState.CANCELLED.value)
# A life is what has one id and one created_at: an id that retention has freed may be given to another job later.
LIFE = ("source", "job_id", "created_at")


def single_attempts(attempts: DataFrame, *, run: Column) -> DataFrame:
    """Every silver attempt as the lifecycle of a job of which it is all that is known. `run`: the one that took it in."""
    leased = F.col("reserved_at").isNotNull()
    return declared(
        attempts.select(
            *("source", "job_id", "queue", "type", "key", "priority", "created_at"),
            F.col("run_at").alias("first_run_at"),
            F.col("reserved_at").alias("first_reserved_at"),
            F.col("ended_at").alias("last_ended_at"),
            _finished_at(F.col("ended_at")).alias("finished_at"),
            "state",
            leased.cast("long").alias("executions"),
            *((F.col("outcome") == outcome).cast("long").alias(outcome) for outcome in BY_OUTCOME),
            F.col("wait_us").alias("first_wait_us"),
            F.coalesce("wait_us", F.lit(0).cast("long")).alias("total_wait_us"),
            F.coalesce("run_us", F.lit(0).cast("long")).alias("total_run_us"),
            F.lit(None).cast("long").alias("total_us"),
            F.col("fence").alias("max_fence"),
            F.col("seq").alias("last_seq"),
            F.col("error_type").alias("last_error_type"),
            F.col("error_message").alias("last_error_message"),
            run.cast("long").alias("first_seen_run"),
            F.lit(None).cast("date").alias("date"),
        ),
        "silver.lifecycles",
    )


def merged_lifecycles(parts: DataFrame) -> DataFrame:
    """One row per job out of several that each cover some of its attempts. The order of a job's rows is that of `last_seq`."""
    first = "struct(queue, type, key, first_run_at)"
    last = "struct(priority, last_ended_at, state)"
    # Ordered by null where there is nothing to take: such rows are passed over.
    lease = "struct(first_reserved_at, first_wait_us)"
    error = "struct(last_error_type, last_error_message)"
    has_error = "last_error_type IS NOT NULL OR last_error_message IS NOT NULL"
    # Most jobs have one row: partial aggregates before the exchange would sort all rows and make hardly fewer.
    merged = (
        parts.repartition(*LIFE)
        .groupBy(*LIFE)
        .agg(
            F.expr(f"min_by({first}, last_seq)").alias("first"),
            F.expr(f"max_by({last}, last_seq)").alias("last"),
            F.expr(f"min_by({lease}, IF(first_reserved_at IS NULL, NULL, last_seq))").alias("lease"),
            F.expr(f"max_by({error}, IF({has_error}, last_seq, NULL))").alias("error"),
            *(F.sum(name).alias(name) for name in SUMS),
            F.max("max_fence").alias("max_fence"),
            F.max("last_seq").alias("last_seq"),
            F.min("first_seen_run").alias("first_seen_run"),
        )
    )
    flat = merged.select("*", "first.*", "last.*", "lease.*", "error.*").drop(
        "first", "last", "lease", "error"
    )
    total = F.unix_micros("finished_at") - F.unix_micros("created_at")
    whole = flat.withColumn("finished_at", _finished_at(F.col("last_ended_at")))
    day = F.when(F.col("state").isin(*FINAL), F.to_date("finished_at"))
    return declared(whole.withColumns({"total_us": total, "date": day}), "silver.lifecycles")


def _finished_at(ended_at: Column) -> Column:
    return F.when(F.col("state").isin(*TERMINAL), ended_at)
