"""Silver attempts: every row of the log once, with its wait, its run and the end of its right to run."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.spark.lake.tables import SILVER_ATTEMPTS, declared


def silver_attempts(bronze: DataFrame) -> DataFrame:
    """Laid out by date and hour, so that a day's rows are in few files and yet shared among tasks."""
    placed = bronze.drop("run", "ingested_at").withColumn("hour", F.hour("ended_at"))
    once = placed.repartition("date", "hour").dropDuplicates(["date", "hour", "source", "seq"]).drop("hour")
    return declared(
        once.withColumns(
            {
                "wait_us": _elapsed("run_at", "reserved_at"),
                "run_us": _elapsed("reserved_at", "ended_at"),
                # A lease gives no right beyond its expiry, however late somebody noticed; without one there is none to end.
                "valid_until": F.when(
                    F.col("reserved_at").isNotNull(), F.least("ended_at", "lease_expires_at")
                ),
            }
        ),
        SILVER_ATTEMPTS,
    )


def _elapsed(start: str, end: str) -> Column:
    """Null where either is."""
    return F.unix_micros(end) - F.unix_micros(start)
