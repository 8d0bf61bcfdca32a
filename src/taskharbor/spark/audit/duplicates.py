"""Rows of the log that are there more than once under one number."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from taskharbor.spark.audit.kinds import Kind
from taskharbor.spark.audit.violations import Rule, broken


def check_row_numbers(attempts: DataFrame) -> DataFrame:
    """One violation per number, however often it is there."""
    row = F.struct("job_id", "fence", "queue", "ended_at")
    repeated = (
        attempts.groupBy("seq", "source")
        .agg(F.count("*").alias("times"), F.min(row).alias("first"), F.max(row).alias("last"))
        .where(F.col("times") > 1)
        .select("*", "first.job_id", "first.fence", "first.queue")
    )
    return broken(
        repeated,
        [
            Rule(
                Kind.DUPLICATE_ROW,
                F.lit(True),
                F.col("last.ended_at"),
                "row {seq} of the log is there {times} times: job {first.job_id}, lease {first.fence}, ended "
                "{first.ended_at}; job {last.job_id}, lease {last.fence}, ended {last.ended_at}",
                other_job_id=F.when(
                    F.col("last.job_id") != F.col("first.job_id"), F.col("last.job_id")
                ).otherwise(F.lit(None)),
                other_fence=F.col("last.fence"),
            )
        ],
    )
