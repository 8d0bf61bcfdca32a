"""Silver lifecycles: one row per job, from its creation to its terminal state.

A row is an aggregate of the job's attempts that can be aggregated again: yesterday's row and today's attempts give today's row.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.jobs import TERMINAL_STATES, Outcome
from taskharbor.spark.lake.tables import SILVER_LIFECYCLES, TEXT, declared

BY_OUTCOME: tuple[str, ...] = tuple(outcome.value for outcome in Outcome)
SUMS: tuple[str, ...] = ("executions", *BY_OUTCOME, "total_wait_us", "total_run_us")
TERMINAL: tuple[str, ...] = tuple(sorted(state.value for state in TERMINAL_STATES))
SHARES = 64
"""Into how many shares the jobs of one date fall: no task need hold all jobs of a day."""


def single_attempts(attempts: DataFrame, *, run: int) -> DataFrame:
    """Every silver attempt as the lifecycle of a job of which it is all that is known."""
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
            F.lit(run).cast("long").alias("first_seen_run"),
            F.to_date("created_at").alias("date"),
        ),
        SILVER_LIFECYCLES,
    )


def merged_lifecycles(parts: DataFrame) -> DataFrame:
    """One row per job out of several that each cover some of its attempts. The order of a job's rows is that of `last_seq`."""
    share = F.pmod(F.xxhash64("job_id"), F.lit(SHARES))
    placed = parts.withColumn("share", share).repartition("date", "share")
    first = "struct(queue, type, key, created_at, first_run_at)"
    last = "struct(priority, last_ended_at, state)"
    # Ordered by null where there is nothing to take: such rows are passed over.
    lease = "struct(first_reserved_at, first_wait_us)"
    error = "struct(last_error_type, last_error_message)"
    merged = placed.groupBy("date", "share", "source", "job_id").agg(
        F.expr(f"min_by({first}, last_seq)").alias("first"),
        F.expr(f"max_by({last}, last_seq)").alias("last"),
        F.expr(f"min_by({lease}, IF(first_reserved_at IS NULL, NULL, last_seq))").alias("lease"),
        F.expr(
            f"max_by({error}, IF(last_error_type IS NULL AND last_error_message IS NULL, NULL, last_seq))"
        ).alias("error"),
        *(F.sum(name).alias(name) for name in SUMS),
        F.max("max_fence").alias("max_fence"),
        F.max("last_seq").alias("last_seq"),
        F.min("first_seen_run").alias("first_seen_run"),
    )
    whole = merged.select(
        *("date", "source", "job_id", "first.*", "last.*", "lease.*", *SUMS),
        *("max_fence", "last_seq", "first_seen_run"),
        F.col("error.last_error_type").cast(TEXT).alias("last_error_type"),
        F.col("error.last_error_message").cast(TEXT).alias("last_error_message"),
    ).withColumn("finished_at", _finished_at(F.col("last_ended_at")))
    total = F.unix_micros("finished_at") - F.unix_micros("created_at")
    return declared(whole.withColumn("total_us", total), SILVER_LIFECYCLES)


def _finished_at(ended_at: Column) -> Column:
    return F.when(F.col("state").isin(*TERMINAL), ended_at)
