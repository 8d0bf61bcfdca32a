"""Gold minutes and hours: what happened per queue and type, how long it took, and how much ran at once."""

from __future__ import annotations

from typing import Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from taskharbor.spark.lake.histograms import percentiles
from taskharbor.spark.lake.spans import HOUR_US, MINUTE_US
from taskharbor.spark.lake.tables import CELL_NAMES, GOLD_HOURS, GOLD_MINUTES, TALLY_NAMES, declared


def gold_minutes(tallies: DataFrame, durations: DataFrame) -> DataFrame:
    """Tallies (several rows per minute may be there, old and new) and histograms of the same dates."""
    return declared(_by(tallies, durations, "minute", MINUTE_US), GOLD_MINUTES)


def gold_hours(minutes: DataFrame, durations: DataFrame) -> DataFrame:
    """The minutes and histograms of whole dates, by hour."""
    return declared(_by(_hourly(minutes), _hourly(durations), "hour", HOUR_US), GOLD_HOURS)


def _hourly(rows: DataFrame) -> DataFrame:
    return rows.withColumn("hour", F.date_trunc("hour", "minute"))


def _by(
    tallies: DataFrame, durations: DataFrame, bucket: Literal["minute", "hour"], length_us: int
) -> DataFrame:
    keys = (*CELL_NAMES, bucket, "date")
    counted = tallies.select(
        *keys,
        *TALLY_NAMES,
        F.lit(None).cast("string").alias("metric"),
        F.lit(None).cast("int").alias("bucket"),
        F.lit(None).cast("long").alias("count"),
    )
    measured = durations.select(
        *keys,
        *(F.lit(0).cast("long").alias(name) for name in TALLY_NAMES),
        "metric",
        "bucket",
        "count",
    )
    grouped = counted.unionByName(measured).groupBy(*keys)
    found = grouped.agg(
        *(F.sum(name).alias(name) for name in TALLY_NAMES),
        *percentiles("wait", prefix="wait"),
        *percentiles("run", prefix="run"),
    )
    return found.withColumn("concurrency", F.col("busy_us") / F.lit(float(length_us)))
