"""The checks, each from rows of the log to violations: of single rows and their numbers, of a job's rows in their order, of jobs
that share a key, and of max_inflight."""

from __future__ import annotations

from functools import reduce
from operator import and_, or_

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from taskharbor.jobs import SECOND, TERMINAL_STATES, JobState, Outcome
from taskharbor.spark.audit.violations import Kind, Rule, broken, clock_slack, is_leased, valid_until

# -- single rows: their times, whether outcome, state and lease agree, and numbers that are there twice ----------------

_WAITING = (JobState.READY, JobState.SCHEDULED)

STATES_AFTER: dict[Outcome, tuple[JobState, ...]] = {
    Outcome.DONE: (JobState.DONE,),
    Outcome.DEAD: (JobState.DEAD,),
    Outcome.CANCELLED: (JobState.CANCELLED,),
    Outcome.MERGED: (JobState.CANCELLED,),
    Outcome.RETRIED: _WAITING,
    Outcome.RELEASED: _WAITING,
    # Scheduled where it absorbed a blocked job of its key that was due later.
    Outcome.EXPIRED: (*_WAITING, JobState.DEAD, JobState.CANCELLED),
    # Blocked where its key is inflight. Never scheduled: it is due now.
    Outcome.REQUEUED: (JobState.READY, JobState.BLOCKED),
}
ALWAYS_LEASED = (Outcome.DONE, Outcome.DEAD, Outcome.RETRIED, Outcome.RELEASED, Outcome.EXPIRED)
NEVER_LEASED = (Outcome.MERGED, Outcome.REQUEUED)
BY_THE_HOLDER = (Outcome.DONE, Outcome.DEAD, Outcome.RETRIED, Outcome.RELEASED, Outcome.CANCELLED)
"""Outcomes that end a lease by a settlement. With all others there was no lease, or it had expired."""


def check_single_rows(attempts: DataFrame) -> DataFrame:
    reserved, ended, expires = F.col("reserved_at"), F.col("ended_at"), F.col("lease_expires_at")
    outcome, leased = F.col("outcome"), is_leased()
    allowed = (
        (outcome == str(one)) & F.col("state").isin(*map(str, states)) for one, states in STATES_AFTER.items()
    )
    return broken(
        attempts,
        Rule(
            Kind.STARTED_EARLY,
            reserved < F.col("run_at"),
            "job {job_id} was leased (lease {fence}) at {reserved_at}, before it was due at {run_at}",
            at=reserved,
        ),
        Rule(
            Kind.SETTLED_TOO_LATE,
            leased & outcome.isin(*map(str, BY_THE_HOLDER)) & (ended >= expires),
            "job {job_id} was settled as {outcome} under lease {fence} at {ended_at}, but that lease was over at "
            "{lease_expires_at}",
        ),
        Rule(
            Kind.EXPIRED_TOO_EARLY,
            leased & (outcome == str(Outcome.EXPIRED)) & (ended < expires),
            "lease {fence} of job {job_id} was ended as expired at {ended_at}, but it was valid until {lease_expires_at}",
        ),
        Rule(
            Kind.TIMES_OUT_OF_ORDER,
            (ended < reserved) | (expires <= reserved) | _leased_before_it_was_there(),
            "lease {fence} of job {job_id} has times that cannot be: created {created_at}, leased {reserved_at}, valid "
            "until {lease_expires_at}, ended {ended_at}",
        ),
        Rule(
            Kind.STATE_CONTRADICTS_OUTCOME,
            _is_known() & ~reduce(or_, allowed),
            "job {job_id} ended lease {fence} with outcome {outcome} at {ended_at} and is said to have become {state}",
        ),
        Rule(
            Kind.LEASE_CONTRADICTS_OUTCOME,
            (reserved.isNull() != expires.isNull())
            | (outcome.isin(*map(str, ALWAYS_LEASED)) & reserved.isNull())
            | (outcome.isin(*map(str, NEVER_LEASED)) & reserved.isNotNull()),
            "job {job_id} has outcome {outcome} at {ended_at} (fence {fence}), which does not go with a lease from "
            "{reserved_at} until {lease_expires_at}",
        ),
        Rule(
            Kind.UNKNOWN_OUTCOME,
            ~_is_known(),
            "job {job_id}, lease {fence}, at {ended_at}: there is no outcome {outcome}",
        ),
    )


def _is_known() -> Column:
    return F.coalesce(F.col("outcome").isin(*map(str, Outcome)), F.lit(False))


def _leased_before_it_was_there() -> Column:
    """A job that was due when it was stored may be claimed by a caller that read its clock a moment before."""
    created, reserved, due = F.col("created_at"), F.col("reserved_at"), F.col("run_at")
    by_an_older_clock = (due <= reserved) & (created <= reserved + clock_slack())
    return (created > reserved) & ~by_an_older_clock


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
            F.lit(True),
            "row {seq} of the log is there {times} times: job {first.job_id}, lease {first.fence}, ended "
            "{first.ended_at}; job {last.job_id}, lease {last.fence}, ended {last.ended_at}",
            at=F.col("last.ended_at"),
            other_job_id=F.nullif("last.job_id", "first.job_id"),
            other_fence=F.col("last.fence"),
        ),
    )


# -- a job's rows in their order: leases that overlap, fences, and what happens after an end --------------------------

# A life is what has one id and one created_at: an id that retention has freed may be given to another job later.
# The columns are in this order: Spark sorts fast by what differs in its first eight bytes.
_LIFE = ("created_at", "job_id", "source")
_NEEDED = (*_LIFE, "seq", "queue", "fence", "reserved_at", "lease_expires_at", "ended_at", "outcome", "state")


def check_lives(attempts: DataFrame) -> DataFrame:
    rows = _in_order_of_time(_in_order_of_seq(_in_order_of_fence(_rows(attempts))))
    return broken(rows, *_lease_rules(), *_end_rules())


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
            "job {job_id} ended lease {fence} as {outcome} at {ended_at} twice: in row {lower.seq} and in row {seq}",
            other_fence=F.col("lower.fence"),
        ),
        Rule(
            Kind.FENCE_USED_TWICE,
            F.col("has_twin"),
            "job {job_id} was leased twice with fence {fence}: at {lower.reserved_at} and at {reserved_at}",
            at=at,
            other_fence=F.col("lower.fence"),
        ),
        Rule(
            Kind.FENCE_OUT_OF_ORDER,
            is_new & ~F.col("has_twin") & is_backwards,
            "job {job_id} has fence {fence} in row {seq} ({at}) after fence {highest} in an earlier row",
            at=at,
            other_fence=F.col("highest"),
        ),
        Rule(
            Kind.FENCE_GAP,
            missing > 0,
            "job {job_id} has fence {fence} at {at}, but the highest lease before it is {below}: {missing} left no row",
            at=at,
            values={"below": below, "missing": missing},
            other_fence=below,
        ),
        Rule(
            Kind.OVERLAPPING_LEASES,
            is_new & is_leased & (F.col("reserved_at") < F.col("held.until")),
            "job {job_id} was leased (lease {fence}) at {reserved_at} while lease {held.fence}, from {held.reserved_at}, was "
            "valid until {held.until}",
            at=F.col("reserved_at"),
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
        return Rule(kind, is_broken, text + what_followed, other_fence=F.col("previous.fence"))

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
        Rule(
            Kind.KEY_HELD_TWICE,
            # Another check handles two leases of the same job.
            (F.col("reserved_at") < F.col("held.until")) & (F.col("held.job_id") != F.col("job_id")),
            "job {job_id} of key {key} was leased (lease {fence}) at {reserved_at} while job {held.job_id} held lease "
            "{held.fence}, from {held.reserved_at}, until {held.until}",
            at=F.col("reserved_at"),
            other_job_id=F.col("held.job_id"),
            other_fence=F.col("held.fence"),
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
            F.col("level") > F.col("limit"),
            "job {job_id} was leased (lease {fence}) at {at} as number {level} at once in queue {queue}, which allows "
            "{limit}",
            at=F.col("at"),
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
