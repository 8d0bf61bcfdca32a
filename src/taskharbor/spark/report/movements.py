"""What came, went and ran in each queue and bucket: from gold for long spans, from the rows themselves for short ones.

Both give the same columns, so that nobody after this cares which it was.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.jobs import TERMINAL_STATES, Micros, Outcome
from taskharbor.spark.lake.buckets import bucket_of, busy_within, percentiles, touched_buckets

if TYPE_CHECKING:
    from taskharbor.spark.report.span import Buckets

COUNTED = (
    "arrivals",
    "completions",
    "failures",
    "retries",
    "expiries",
    "requeues",
    "finished",
    "busy_us",
)
_OUTCOMES = {
    "completions": Outcome.DONE,
    "failures": Outcome.DEAD,
    "retries": Outcome.RETRIED,
    "expiries": Outcome.EXPIRED,
    "requeues": Outcome.REQUEUED,
}
_TERMINAL = tuple(state.value for state in TERMINAL_STATES)


def movements_of_gold(gold: DataFrame, time: str, buckets: Buckets, label: Column) -> DataFrame:
    """(label, index, COUNTED...) from gold minutes or hours, which already say all of it."""
    index = _index(F.col(time), buckets)
    return (
        gold.groupBy(label.alias("label"), index.alias("index"))
        .agg(*(F.sum(name).alias(name) for name in COUNTED))
        .where(_is_inside(buckets))
    )


def movements_of_rows(
    attempts: DataFrame, lifecycles: DataFrame, buckets: Buckets, label: Column
) -> DataFrame:
    """The same, counted from silver: for spans so short that a minute would be most of them."""
    spread = attempts.withColumn("at", F.explode(touched_buckets(buckets.bucket_us)))
    at = F.col("at")
    ends = at == bucket_of(F.col("ended_at"), buckets.bucket_us)
    counted = {
        **{name: ends & (F.col("outcome") == outcome.value) for name, outcome in _OUTCOMES.items()},
        "finished": ends & F.col("state").isin(*_TERMINAL) & (F.col("outcome") != Outcome.REQUEUED.value),
    }
    moved = spread.select(
        label.alias("label"),
        (at - F.lit(buckets.start_us // buckets.bucket_us)).alias("index"),
        F.lit(0).cast("long").alias("arrivals"),
        *(F.coalesce(when.cast("long"), F.lit(0)).alias(name) for name, when in counted.items()),
        busy_within(at, buckets.bucket_us).alias("busy_us"),
    )
    arrived = lifecycles.select(
        label.alias("label"),
        _index(F.col("created_at"), buckets).alias("index"),
        *(F.lit(int(name == "arrivals")).cast("long").alias(name) for name in COUNTED),
    )
    return (
        reduce(DataFrame.unionByName, (moved, arrived))
        .groupBy("label", "index")
        .agg(*(F.sum(name).alias(name) for name in COUNTED))
        .where(_is_inside(buckets))
    )


def waits_of_histograms(durations: DataFrame, buckets: Buckets) -> DataFrame:
    """(index, wait_p50_us, wait_p95_us, wait_p99_us) from the lake's histograms, which add up over queues and time."""
    index = _index(F.col("minute"), buckets)
    return (
        durations.where(F.col("metric") == "wait")
        .groupBy(index.alias("index"))
        .agg(*percentiles("wait", prefix="wait"))
        .where(_is_inside(buckets))
    )


def waits_of_rows(attempts: DataFrame, buckets: Buckets) -> DataFrame:
    found = F.percentile_approx("wait_us", [0.5, 0.95, 0.99], 1000)
    return (
        attempts.where(F.col("reserved_at").isNotNull())
        .groupBy(_index(F.col("reserved_at"), buckets).alias("index"))
        .agg(found.alias("found"))
        .select(
            "index",
            *(
                F.col("found")[number].alias(f"wait_{name}_us")
                for number, name in enumerate(("p50", "p95", "p99"))
            ),
        )
        .where(_is_inside(buckets))
    )


def worker_loads_of_rows(attempts: DataFrame, step_us: Micros) -> DataFrame:
    """(worker, at: whole steps since the epoch, busy_us)"""
    leased = attempts.where(F.col("reserved_at").isNotNull() & F.col("worker").isNotNull())
    spread = leased.withColumn("at", F.explode(touched_buckets(step_us)))
    return spread.groupBy("worker", "at").agg(F.sum(busy_within(F.col("at"), step_us)).alias("busy_us"))


def worker_loads_of_gold(workers: DataFrame, step_us: Micros) -> DataFrame:
    at = bucket_of(F.col("hour"), step_us)
    return workers.groupBy("worker", at.alias("at")).agg(F.sum("busy_us").alias("busy_us"))


def _index(instant: Column, buckets: Buckets) -> Column:
    return F.floor((F.unix_micros(instant) - F.lit(buckets.start_us)) / F.lit(buckets.bucket_us)).cast("long")


def _is_inside(buckets: Buckets) -> Column:
    return F.col("index").between(0, buckets.number - 1)
