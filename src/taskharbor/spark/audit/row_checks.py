"""Rows of the log by themselves: their times, whether outcome, state and lease agree, and numbers that are there twice."""

from __future__ import annotations

from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.jobs import JobState, Outcome
from taskharbor.spark.audit.violations import Kind, Rule, broken, clock_slack, is_leased

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
    return broken(
        attempts,
        [
            Rule(
                Kind.STARTED_EARLY,
                reserved < F.col("run_at"),
                reserved,
                "job {job_id} was leased (lease {fence}) at {reserved_at}, before it was due at {run_at}",
            ),
            Rule(
                Kind.SETTLED_TOO_LATE,
                leased & outcome.isin(*map(str, BY_THE_HOLDER)) & (ended >= expires),
                ended,
                "job {job_id} was settled as {outcome} under lease {fence} at {ended_at}, but that lease was over at "
                "{lease_expires_at}",
            ),
            Rule(
                Kind.EXPIRED_TOO_EARLY,
                leased & (outcome == str(Outcome.EXPIRED)) & (ended < expires),
                ended,
                "lease {fence} of job {job_id} was ended as expired at {ended_at}, but it was valid until {lease_expires_at}",
            ),
            Rule(
                Kind.TIMES_OUT_OF_ORDER,
                (ended < reserved) | (expires <= reserved) | _leased_before_it_was_there(),
                ended,
                "lease {fence} of job {job_id} has times that cannot be: created {created_at}, leased {reserved_at}, valid "
                "until {lease_expires_at}, ended {ended_at}",
            ),
            Rule(
                Kind.STATE_CONTRADICTS_OUTCOME,
                _is_known() & ~_state_follows(),
                ended,
                "job {job_id} ended lease {fence} with outcome {outcome} at {ended_at} and is said to have become {state}",
            ),
            Rule(
                Kind.LEASE_CONTRADICTS_OUTCOME,
                (reserved.isNull() != expires.isNull())
                | (outcome.isin(*map(str, ALWAYS_LEASED)) & reserved.isNull())
                | (outcome.isin(*map(str, NEVER_LEASED)) & reserved.isNotNull()),
                ended,
                "job {job_id} has outcome {outcome} at {ended_at} (fence {fence}), which does not go with a lease from "
                "{reserved_at} until {lease_expires_at}",
            ),
            Rule(
                Kind.UNKNOWN_OUTCOME,
                ~_is_known(),
                ended,
                "job {job_id}, lease {fence}, at {ended_at}: there is no outcome {outcome}",
            ),
        ],
    )


def _is_known() -> Column:
    return F.coalesce(F.col("outcome").isin(*map(str, Outcome)), F.lit(False))


def _state_follows() -> Column:
    allowed = (
        (F.col("outcome") == str(outcome)) & F.col("state").isin(*map(str, states))
        for outcome, states in STATES_AFTER.items()
    )
    return reduce(or_, allowed)


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
        [
            Rule(
                Kind.DUPLICATE_ROW,
                F.lit(True),
                F.col("last.ended_at"),
                "row {seq} of the log is there {times} times: job {first.job_id}, lease {first.fence}, ended "
                "{first.ended_at}; job {last.job_id}, lease {last.fence}, ended {last.ended_at}",
                other_job_id=F.nullif("last.job_id", "first.job_id"),
                other_fence=F.col("last.fence"),
            )
        ],
    )
