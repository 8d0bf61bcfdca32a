"""The checks, each from rows of the log to violations: of single rows (`rows.sql`) and their numbers, of a job's rows in their
order (`lives.sql`), of jobs that share a key, and of max_inflight."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from taskharbor.drivers.contract import DAY
from taskharbor.jobs import SECOND
from taskharbor.spark.audit.violations import (
    Kind,
    Rule,
    broken,
    clock_slack,
    is_leased,
    query,
    rules,
    valid_until,
)

_ROW_RULES = (
    Rule(
        Kind.STARTED_EARLY,
        "was leased (lease {fence}) at {at}, before it was due at {run_at}",
        at="reserved_at",
    ),
    *rules(
        {
            Kind.SETTLED_TOO_LATE: "was settled as {outcome} at {ended_at}, and lease {fence} was over at {lease_expires_at}",
            Kind.EXPIRED_TOO_EARLY: "lost lease {fence} as expired at {ended_at}, and it was valid until {lease_expires_at}",
            Kind.TIMES_OUT_OF_ORDER: "has times that cannot be: created {created_at}, leased {reserved_at} (lease {fence}), "
            "valid until {lease_expires_at}, ended {ended_at}",
            Kind.STATE_CONTRADICTS_OUTCOME: "ended lease {fence} as {outcome} at {ended_at} and is said to have become {state}",
            Kind.LEASE_CONTRADICTS_OUTCOME: "has outcome {outcome} at {ended_at} (fence {fence}), which does not go with a lease "
            "from {reserved_at} until {lease_expires_at}",
            Kind.LEASE_TOO_LONG: "ended lease {fence} at {ended_at}, and it was valid for more than a day after that, until "
            "{lease_expires_at}",
            Kind.DONE_WITH_ERROR: "was done under lease {fence} at {ended_at}, and with an error: {error_type}",
            Kind.UNKNOWN_OUTCOME: "ended lease {fence} at {ended_at} with the outcome {outcome}, which there is not",
        }
    ),
)
_WAS = "was {previous.state} at {previous.ended_at} (lease {previous.fence})"
_LIFE_RULES = (
    *rules(
        {
            Kind.DUPLICATE_ROW: "ended lease {fence} as {outcome} at {ended_at} twice: in row {lower.seq} and in row {seq}",
            Kind.FENCE_USED_TWICE: "was leased twice with fence {fence}: at {lower.reserved_at} and at {reserved_at}",
            Kind.SETTLED_BY_ANOTHER: "had lease {fence}, from {reserved_at}, ended by {lower.worker} in row {lower.seq} and by "
            "{worker} in row {seq}",
        },
        at="began_at",
        other_fence="lower.fence",
    ),
    *rules(
        {
            Kind.FENCE_OUT_OF_ORDER: "has fence {fence} in row {seq} ({at}) after fence {highest} in an earlier row",
            Kind.TIME_WENT_BACK: "has a lease ({fence}) from {at} in row {seq}, and one from {latest} in an earlier row",
        },
        at="began_at",
        other_fence="highest",
    ),
    Rule(
        Kind.FENCE_GAP,
        "has fence {fence} at {at}, but the highest lease before it is {below}: {missing} left no row",
        at="began_at",
        other_fence="below",
    ),
    Rule(
        Kind.OVERLAPPING_LEASES,
        "was leased (lease {fence}) at {at} while lease {held.fence}, from {held.reserved_at}, was valid until {held.until}",
        at="began_at",
        other_fence="held.fence",
    ),
    *rules(
        {
            Kind.ENDED_TWICE: f"{_WAS} and ended again as {{outcome}} at {{ended_at}} (lease {{fence}})",
            Kind.ACTIVE_AFTER_END: f"{_WAS} and had outcome {{outcome}} at {{ended_at}} (lease {{fence}}) without a requeue",
            Kind.REQUEUED_ALIVE: f"{_WAS}, not dead, and was {{outcome}} at {{ended_at}} (fence {{fence}})",
            Kind.JOB_CHANGED: f"{_WAS}, and has another queue, key or type in row {{seq}}, from {{ended_at}}",
            Kind.RETRIED_TOO_EARLY: f"{_WAS} after a failure, and lease {{fence}} ({{reserved_at}}) was due before, at {{due}}",
            Kind.RAN_AND_MERGED: f"{_WAS}, had run, and was {{outcome}} at {{ended_at}} (fence {{fence}})",
        },
        other_fence="previous.fence",
    ),
)


def check_single_rows(attempts: DataFrame) -> DataFrame:
    return broken(query("rows", {"longest": DAY // SECOND}, attempts=attempts), *_ROW_RULES)


def check_lives(attempts: DataFrame) -> DataFrame:
    return broken(query("lives", {}, attempts=attempts), *_LIFE_RULES)


def check_row_numbers(attempts: DataFrame) -> DataFrame:
    """Find numbers that several rows have. One violation per number."""
    row = F.struct("job_id", "fence", "queue", "ended_at")
    repeated = (
        attempts.groupBy("seq", "source")
        .agg(F.count("*").alias("times"), F.min(row).alias("first"), F.max(row).alias("last"))
        .where(F.col("times") > 1)
        .select("*", "first.job_id", "first.fence", "first.queue")
    )
    return broken(
        repeated,
        Rule(
            Kind.DUPLICATE_ROW,
            "has row {seq} of the log, which is there {times} times: lease {first.fence}, ended {first.ended_at}; job "
            "{last.job_id}, lease {last.fence}, ended {last.ended_at}",
            "true",
            at="last.ended_at",
            other_job_id="nullif(last.job_id, first.job_id)",
            other_fence="last.fence",
        ),
    )


def check_keys(attempts: DataFrame) -> DataFrame:
    """Find leases of two jobs of one key that were valid at once."""
    before = (
        Window.partitionBy("key", "queue", "source")
        .orderBy("reserved_at", "until", "job_id", "fence")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    leases = (
        attempts.where(F.col("key").isNotNull() & is_leased())
        .select("source", "queue", "key", "job_id", "fence", "reserved_at", valid_until().alias("until"))
        .withColumn("held", F.max(F.struct("until", "job_id", "fence", "reserved_at")).over(before))
    )
    return broken(
        leases,
        Rule(
            Kind.KEY_HELD_TWICE,
            "of key {key} was leased (lease {fence}) at {reserved_at} while job {held.job_id} held lease {held.fence}, from "
            "{held.reserved_at}, until {held.until}",
            # Another check handles two leases of the same job.
            "reserved_at < held.until AND held.job_id <> job_id",
            at="reserved_at",
            other_job_id="held.job_id",
            other_fence="held.fence",
        ),
    )


# -- W: never more valid leases in a queue than its max_inflight --------------------------------------------------------

# Judged where a lease is granted and not all the time, because a limit that is lowered revokes no lease. Time is cut into
# buckets, every lease is put into each bucket it touches, and each bucket is swept on its own: no task sees a queue's whole
# history.
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
        Rule(
            Kind.LIMIT_EXCEEDED,
            "was leased (lease {fence}) at {at} as number {level} at once in queue {queue}, which allows {limit}",
            "level > limit",
            at="at",
        ),
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
