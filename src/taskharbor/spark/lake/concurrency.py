"""Gold concurrency: how many jobs of a queue ran at once, minute by minute, and how near that is to its limit W."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from taskharbor.spark.lake.spans import MINUTE_US
from taskharbor.spark.lake.tables import GOLD_CONCURRENCY, declared


def gold_concurrency(minutes: DataFrame, queues: DataFrame) -> DataFrame:
    """From gold minutes, and one row per source and queue with the limit that holds now (`max_inflight`, null: none)."""
    busy = minutes.groupBy("source", "queue", "minute", "date").agg(F.sum("busy_us").alias("busy_us"))
    limits = F.broadcast(queues.select("source", "queue", "max_inflight"))
    found = busy.withColumn("concurrency", F.col("busy_us") / F.lit(float(MINUTE_US))).join(
        limits, ["source", "queue"], "left"
    )
    # A queue with W = 0 is closed: nothing runs, and nothing is the share of it.
    ratio = F.when(F.col("max_inflight") > 0, F.col("concurrency") / F.col("max_inflight"))
    return declared(found.withColumn("ratio", ratio), GOLD_CONCURRENCY)
