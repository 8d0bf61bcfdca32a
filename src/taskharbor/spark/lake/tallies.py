"""What happened in each minute, counted: the part of gold that simply adds up over runs."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.jobs import Outcome
from taskharbor.spark.lake.histograms import bucket
from taskharbor.spark.lake.lifecycles import TERMINAL
from taskharbor.spark.lake.spans import MINUTE_US, bucket_of, busy_within, start_of, touched_buckets
from taskharbor.spark.lake.tables import CELL_NAMES, STATE_DURATIONS, STATE_TALLIES, TALLY_NAMES, declared

_BY_OUTCOME = {
    "completions": Outcome.DONE,
    "failures": Outcome.DEAD,
    "retries": Outcome.RETRIED,
    "expiries": Outcome.EXPIRED,
    "releases": Outcome.RELEASED,
    "cancellations": Outcome.CANCELLED,
    "requeues": Outcome.REQUEUED,
}
MINUTE_KEYS = (*CELL_NAMES, "minute", "date")


def attempt_tallies(attempts: DataFrame) -> DataFrame:
    """A row for each minute that a silver attempt touches.

    Starts and outcomes count in the minute in which they were, a lease in every minute in which it was valid.
    """
    spread = attempts.withColumn("at", F.explode(touched_buckets(MINUTE_US)))
    at = F.col("at")
    starts = at == bucket_of(F.col("reserved_at"), MINUTE_US)
    ends = at == bucket_of(F.col("ended_at"), MINUTE_US)
    counted: dict[str, Column] = {
        "starts": starts,
        "finished": ends & F.col("state").isin(*TERMINAL) & (F.col("outcome") != Outcome.REQUEUED.value),
        **{name: ends & (F.col("outcome") == outcome.value) for name, outcome in _BY_OUTCOME.items()},
    }
    rows = spread.select(
        *CELL_NAMES,
        start_of(at, MINUTE_US).alias("minute"),
        F.lit(0).cast("long").alias("arrivals"),
        *(F.coalesce(when.cast("long"), F.lit(0)).alias(name) for name, when in counted.items()),
        busy_within(at, MINUTE_US).alias("busy_us"),
    )
    return declared(rows.withColumn("date", F.to_date("minute")), STATE_TALLIES)


def arrival_tallies(lifecycles: DataFrame, *, run: int) -> DataFrame:
    """The jobs that this run heard of first, in the minutes in which they were created."""
    counts = {name: F.lit(int(name == "arrivals")).cast("long") for name in TALLY_NAMES}
    rows = lifecycles.where(F.col("first_seen_run") == run).select(
        *CELL_NAMES,
        start_of(bucket_of(F.col("created_at"), MINUTE_US), MINUTE_US).alias("minute"),
        *(column.alias(name) for name, column in counts.items()),
        "date",
    )
    return declared(rows, STATE_TALLIES)


def all_tallies(*rows: DataFrame) -> DataFrame:
    """Tallies from several places, not yet summed. Rows of gold minutes will do as well."""
    together = reduce(DataFrame.unionByName, (one.select(*MINUTE_KEYS, *TALLY_NAMES) for one in rows))
    return declared(together, STATE_TALLIES)


def summed_tallies(*rows: DataFrame) -> DataFrame:
    """One row per minute, queue and type."""
    summed = all_tallies(*rows).groupBy(*MINUTE_KEYS).agg(*(F.sum(name).alias(name) for name in TALLY_NAMES))
    return declared(summed, STATE_TALLIES)


def attempt_durations(attempts: DataFrame) -> DataFrame:
    """The waits and runs of silver attempts, in their buckets and in the minute in which each was over."""
    measured = attempts.where(F.col("reserved_at").isNotNull()).select(
        *CELL_NAMES,
        F.explode(
            F.array(
                F.struct(
                    bucket_of(F.col("reserved_at"), MINUTE_US).alias("at"),
                    F.lit("wait").alias("metric"),
                    bucket(F.col("wait_us")).alias("bucket"),
                ),
                F.struct(
                    bucket_of(F.col("ended_at"), MINUTE_US).alias("at"),
                    F.lit("run").alias("metric"),
                    bucket(F.col("run_us")).alias("bucket"),
                ),
            )
        ).alias("one"),
    )
    rows = measured.select(
        *CELL_NAMES,
        start_of(F.col("one.at"), MINUTE_US).alias("minute"),
        "one.metric",
        "one.bucket",
        F.lit(1).cast("long").alias("count"),
    )
    return declared(rows.withColumn("date", F.to_date("minute")), STATE_DURATIONS)


def summed_durations(*rows: DataFrame) -> DataFrame:
    """One row per bucket of a histogram."""
    keys = (*MINUTE_KEYS, "metric", "bucket")
    together = reduce(DataFrame.unionByName, (one.select(*keys, "count") for one in rows))
    return declared(together.groupBy(*keys).agg(F.sum("count").alias("count")), STATE_DURATIONS)
