"""Gold workers: what each worker did per hour, and for how much of it it held leases."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.spark.lake.spans import HOUR_US, bucket_of, busy_within, start_of, touched_buckets
from taskharbor.spark.lake.tables import GOLD_WORKERS, declared


def attempt_workers(attempts: DataFrame) -> DataFrame:
    """A row for each hour that a silver attempt touches. An execution counts in the hour in which it ended."""
    spread = attempts.where(F.col("reserved_at").isNotNull() & F.col("worker").isNotNull()).withColumn(
        "at", F.explode(touched_buckets(HOUR_US))
    )
    rows = spread.select(
        "source",
        "worker",
        start_of(F.col("at"), HOUR_US).alias("hour"),
        (F.col("at") == bucket_of(F.col("ended_at"), HOUR_US)).cast("long").alias("executions"),
        busy_within(F.col("at"), HOUR_US).alias("busy_us"),
    )
    return declared(
        rows.withColumns({"utilisation": _utilisation(), "date": F.to_date("hour")}), GOLD_WORKERS
    )


def summed_workers(*rows: DataFrame) -> DataFrame:
    """One row per worker and hour."""
    together = reduce(DataFrame.unionByName, rows)
    summed = together.groupBy("source", "worker", "hour", "date").agg(
        F.sum("executions").alias("executions"), F.sum("busy_us").alias("busy_us")
    )
    return declared(summed.withColumn("utilisation", _utilisation()), GOLD_WORKERS)


def _utilisation() -> Column:
    """More than 1 where a worker runs several jobs at once."""
    return F.col("busy_us") / F.lit(float(HOUR_US))
