"""A job's rows in their order: leases that overlap, fences, and what happens after an end; and jobs that share a key.

A life is what has one id and one created_at: an id that retention has freed may be given to another job later.
"""

from __future__ import annotations

from functools import reduce
from operator import and_

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from taskharbor.jobs import TERMINAL_STATES, JobState, Outcome
from taskharbor.spark.audit.violations import Kind, Rule, broken, clock_slack, is_leased, valid_until

# In this order: Spark sorts fast by what differs in its first eight bytes.
_LIFE = ("created_at", "job_id", "source")
_NEEDED = (*_LIFE, "seq", "queue", "fence", "reserved_at", "lease_expires_at", "ended_at", "outcome", "state")


def check_lives(attempts: DataFrame) -> DataFrame:
    rows = _in_order_of_time(_in_order_of_seq(_in_order_of_fence(_rows(attempts))))
    return broken(rows, [*_lease_rules(), *_end_rules()])


def _rows(attempts: DataFrame) -> DataFrame:
    """With what is known of each queue's log: which jobs it tells of from their first lease on."""
    rows = attempts.select(*_NEEDED)
    oldest = rows.groupBy("source", "queue").agg(F.min("ended_at").alias("oldest"))
    # Retention removes the oldest rows of a queue first: where one is left that ended before the job was created, all of the
    # job's own rows are left too.
    is_complete = F.col("created_at") >= F.col("oldest") + clock_slack()
    return (
        rows.join(F.broadcast(oldest), ["source", "queue"])
        .withColumns({"is_complete": is_complete, "is_leased": is_leased(), "until": valid_until()})
        .drop("oldest")
        # One exchange serves all three orders below.
        .repartition("source", "job_id")
    )


def _in_order_of_fence(rows: DataFrame) -> DataFrame:
    """Copies come to stand beside each other, and so do leases that share a fence."""
    end = ("fence", "reserved_at", "lease_expires_at", "ended_at", "outcome")
    order = Window.partitionBy(*_LIFE).orderBy(
        *(F.col(name).asc_nulls_last() if name == "reserved_at" else F.col(name) for name in end), "seq"
    )
    lower = F.lag(F.struct("seq", *end, "is_leased")).over(order)
    is_copy = reduce(and_, (F.col(name).eqNullSafe(F.col(f"lower.{name}")) for name in end))
    are_leased = F.col("is_leased") & F.col("lower.is_leased")
    has_twin = are_leased & (F.col("lower.fence") == F.col("fence")) & ~is_copy
    return rows.withColumn("lower", lower).withColumns(
        {
            "is_copy": F.col("lower").isNotNull() & is_copy,
            "has_twin": F.coalesce(has_twin, F.lit(False)),
        }
    )


def _in_order_of_seq(rows: DataFrame) -> DataFrame:
    before = Window.partitionBy(*_LIFE).orderBy("seq", "fence").rowsBetween(Window.unboundedPreceding, -1)
    itself = F.struct("seq", "fence", "state", "outcome", "ended_at")
    return rows.withColumns(
        {
            "previous": F.last(F.when(~F.col("is_copy"), itself), ignorenulls=True).over(before),
            "highest": F.max(F.when(~F.col("is_copy"), F.col("fence"))).over(before),
        }
    )


def _in_order_of_time(rows: DataFrame) -> DataFrame:
    """At one instant a lease without extent comes before one that goes on: it ended first."""
    before = (
        Window.partitionBy(*_LIFE)
        .orderBy("reserved_at", "until", "seq")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    lease = F.struct("until", "reserved_at", "fence")
    return rows.withColumn("held", F.max(F.when(F.col("is_leased") & ~F.col("is_copy"), lease)).over(before))


def _lease_rules() -> list[Rule]:
    fence, at, is_leased = F.col("fence"), F.coalesce("reserved_at", "ended_at"), F.col("is_leased")
    is_new = ~F.col("is_copy")
    below = F.when(F.col("lower").isNotNull(), F.col("lower.fence")).otherwise(
        F.when(F.col("is_complete"), F.lit(0))
    )
    # A row without a lease carries the fence of the last lease, so that one must have a row of its own.
    missing = fence - below - is_leased.cast("int")
    is_backwards = (fence < F.col("highest")) | (is_leased & (fence == F.col("highest")))
    return [
        Rule(
            Kind.DUPLICATE_ROW,
            # The same row under the same number is found by its number.
            F.col("is_copy") & (F.col("seq") != F.col("lower.seq")),
            F.col("ended_at"),
            "job {job_id} ended lease {fence} as {outcome} at {ended_at} twice: in row {lower.seq} and in row {seq}",
            other_fence=F.col("lower.fence"),
        ),
        Rule(
            Kind.FENCE_USED_TWICE,
            F.col("has_twin"),
            at,
            "job {job_id} was leased twice with fence {fence}: at {lower.reserved_at} and at {reserved_at}",
            other_fence=F.col("lower.fence"),
        ),
        Rule(
            Kind.FENCE_OUT_OF_ORDER,
            is_new & ~F.col("has_twin") & is_backwards,
            at,
            "job {job_id} has fence {fence} in row {seq} ({at}) after fence {highest} in an earlier row",
            other_fence=F.col("highest"),
        ),
        Rule(
            Kind.FENCE_GAP,
            missing > 0,
            at,
            "job {job_id} has fence {fence} at {at}, but the highest lease before it is {below}: {missing} left no row",
            values={"below": below, "missing": missing},
            other_fence=below,
        ),
        Rule(
            Kind.OVERLAPPING_LEASES,
            is_new & is_leased & (F.col("reserved_at") < F.col("held.until")),
            F.col("reserved_at"),
            "job {job_id} was leased (lease {fence}) at {reserved_at} while lease {held.fence}, from {held.reserved_at}, was "
            "valid until {held.until}",
            other_fence=F.col("held.fence"),
        ),
    ]


def _end_rules() -> list[Rule]:
    terminal = tuple(map(str, sorted(TERMINAL_STATES)))
    is_requeue = F.col("outcome") == str(Outcome.REQUEUED)
    had_ended = F.col("previous.state").isin(*terminal) & ~is_requeue & ~F.col("is_copy")
    ends_again = F.col("state").isin(*terminal)

    def rule(kind: Kind, is_broken: Column, what_followed: str) -> Rule:
        text = "job {job_id} was {previous.state} at {previous.ended_at} (lease {previous.fence})"
        at, other_fence = F.col("ended_at"), F.col("previous.fence")
        return Rule(kind, is_broken, at, text + what_followed, other_fence=other_fence)

    return [
        rule(
            Kind.ENDED_TWICE,
            had_ended & ends_again,
            " and ended again as {outcome} at {ended_at} (lease {fence})",
        ),
        rule(
            Kind.ACTIVE_AFTER_END,
            had_ended & ~ends_again,
            " and had outcome {outcome} at {ended_at} (lease {fence}) without a requeue",
        ),
        rule(
            Kind.REQUEUED_ALIVE,
            is_requeue & ~F.col("is_copy") & (F.col("previous.state") != str(JobState.DEAD)),
            ", not dead, and was {outcome} at {ended_at} (fence {fence})",
        ),
    ]


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
        [
            Rule(
                Kind.KEY_HELD_TWICE,
                # Another check handles two leases of the same job.
                (F.col("reserved_at") < F.col("held.until")) & (F.col("held.job_id") != F.col("job_id")),
                F.col("reserved_at"),
                "job {job_id} of key {key} was leased (lease {fence}) at {reserved_at} while job {held.job_id} held lease "
                "{held.fence}, from {held.reserved_at}, until {held.until}",
                other_job_id=F.col("held.job_id"),
                other_fence=F.col("held.fence"),
            )
        ],
    )
