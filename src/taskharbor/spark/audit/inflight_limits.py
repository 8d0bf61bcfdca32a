"""W: never more valid leases in a queue than its max_inflight, judged where a lease is granted.

Judged there and not all the time, because a limit that is lowered revokes no lease. Time is cut into buckets, every lease is put
into each bucket it touches, and each bucket is swept on its own: no task sees a queue's whole history.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from taskharbor.jobs import SECOND
from taskharbor.spark.audit.violations import Kind, Rule, broken, clock_slack, is_leased, valid_until

_QUEUE = ("source", "queue")
_NARROWEST = 60 * SECOND
_CARRIED_IN, _ENDED, _GRANTED = 0, 1, 2
"""The order at one instant: an end makes room for a start."""


def check_limits(attempts: DataFrame, limits: DataFrame) -> DataFrame:
    """Find leases beyond the limit. `limits`: source, queue, max_inflight and observed_at, a row for each observation."""
    watched = F.broadcast(_limits_over_time(limits))
    leases = (
        attempts.where(is_leased() & (F.col("reserved_at") < valid_until()))
        .select(
            *_QUEUE,
            "job_id",
            "fence",
            F.unix_micros("reserved_at").alias("start"),
            F.unix_micros(valid_until()).alias("end"),
        )
        .join(watched.select(*_QUEUE, "smallest"), list(_QUEUE))
    )
    crowded = _levels_at_grants(leases).where(F.col("level") > F.col("smallest"))
    judged = crowded.join(watched.drop("smallest"), list(_QUEUE)).withColumn("at", F.timestamp_micros("t"))
    return broken(
        judged.withColumn("limit", _limit_at(F.col("at"))),
        [
            Rule(
                Kind.LIMIT_EXCEEDED,
                F.col("level") > F.col("limit"),
                F.col("at"),
                "job {job_id} was leased (lease {fence}) at {at} as number {level} at once in queue {queue}, which allows "
                "{limit}",
            )
        ],
    )


def _limits_over_time(limits: DataFrame) -> DataFrame:
    """Per queue its smallest limit and the stretches of one limit: from when the one before was last seen until the next one was
    first seen. In between both hold, since nobody knows when it changed. Queues that never had a limit are left out."""
    by_time = Window.partitionBy(*_QUEUE).orderBy("observed_at")
    earlier = {"since": F.lag("observed_at").over(by_time), "before": F.lag("max_inflight").over(by_time)}
    is_change = F.col("since").isNull() | ~F.col("max_inflight").eqNullSafe(F.col("before"))
    changes = limits.withColumns(earlier).where(is_change)
    stretch = F.struct("since", F.lead("observed_at").over(by_time).alias("until"), "max_inflight")
    return (
        changes.select(*_QUEUE, "max_inflight", stretch.alias("stretch"))
        .groupBy(*_QUEUE)
        .agg(F.min("max_inflight").alias("smallest"), F.collect_list("stretch").alias("stretches"))
        .where(F.col("smallest").isNotNull())
    )


def _limit_at(at: Column) -> Column:
    """Return the largest limit that may have held at the instant; null if there may have been none."""
    holding = F.filter(
        "stretches",
        lambda one: (
            (one["since"].isNull() | (one["since"] <= at))
            & (one["until"].isNull() | (at < one["until"] + clock_slack()))
        ),
    )
    numbers = F.transform(holding, lambda one: one["max_inflight"])
    return F.when(~F.exists(numbers, lambda number: number.isNull()), F.array_max(numbers))


def _levels_at_grants(leases: DataFrame) -> DataFrame:
    """Return for every lease the number of valid leases when it was granted, itself included."""
    # As wide as the average lease, so the result has at most twice as many rows as there are leases.
    widths = leases.groupBy(*_QUEUE).agg(
        F.greatest(F.avg(F.col("end") - F.col("start")).cast("bigint"), F.lit(_NARROWEST)).alias("width")
    )
    bucket_start = F.col("bucket") * F.col("width")
    began_before = F.col("start") < bucket_start
    events = F.array(
        F.struct(
            F.greatest("start", bucket_start).alias("t"),
            F.when(began_before, _CARRIED_IN).otherwise(_GRANTED).alias("what"),
            F.lit(1).alias("step"),
        ),
        F.struct(F.col("end").alias("t"), F.lit(_ENDED).alias("what"), F.lit(-1).alias("step")),
    )
    in_bucket = Window.partitionBy("bucket", *_QUEUE).orderBy("t", "what", "job_id", "fence")
    so_far = in_bucket.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    event = F.struct("t", "what", "job_id", "fence")
    return (
        leases.join(F.broadcast(widths), list(_QUEUE))
        .withColumn("bucket", F.explode(F.expr("sequence(start div width, (end - 1) div width)")))
        .select(*_QUEUE, "smallest", "job_id", "fence", "bucket", F.explode(events).alias("event"))
        .select(*_QUEUE, "smallest", "job_id", "fence", "bucket", "event.*")
        # A duplicated row is one lease. Another check reports the duplicate.
        .withColumn("is_copy", F.coalesce(F.lag(event).over(in_bucket) == event, F.lit(False)))
        .withColumn("step", F.when(F.col("is_copy"), 0).otherwise(F.col("step")))
        .withColumn("level", F.sum("step").over(so_far))
        .where((F.col("what") == _GRANTED) & ~F.col("is_copy"))
        .select(*_QUEUE, "smallest", "job_id", "fence", "t", "level")
    )
