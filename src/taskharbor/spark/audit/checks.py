"""The checks, each a file of SQL with the conditions and the rules that say what a row has broken: of single rows (`rows`) and
their numbers, of a job's rows in their order (`lives`), of jobs that share a key (`keys`), of max_inflight (`limits`), and of
the jobs in the store (`stored`)."""

from __future__ import annotations

from datetime import datetime
from importlib.resources import files

from pyspark.sql import DataFrame

from taskharbor.drivers.contract import DAY
from taskharbor.jobs import SECOND
from taskharbor.spark.audit.violations import Kind, Rules, broken

CLOCK_SLACK_SECONDS = 5
"""The largest difference between the clocks of two callers, in seconds, for calls whose order the log does not tell. Far more
than the error of a sampled backend clock, and far less than a lease."""

_WAS = "was {previous.state} at {previous.ended_at} (lease {previous.fence})"
RULES: dict[str, list[Rules]] = {
    "rows": [
        Rules(
            {Kind.STARTED_EARLY: "was leased (lease {fence}) at {at}, before it was due at {run_at}"},
            at="reserved_at",
        ),
        Rules(
            {
                Kind.SETTLED_TOO_LATE: "was settled as {outcome} at {ended_at}, and lease {fence} was over at {lease_expires_at}",
                Kind.EXPIRED_TOO_EARLY: "lost lease {fence} as expired at {ended_at}, and it was valid until {lease_expires_at}",
                Kind.TIMES_OUT_OF_ORDER: "has times that cannot be: created {created_at}, leased {reserved_at} (lease {fence}), "
                "valid until {lease_expires_at}, ended {ended_at}",
                Kind.STATE_CONTRADICTS_OUTCOME: "ended lease {fence} as {outcome} at {ended_at} and is said to have become "
                "{state}",
                Kind.LEASE_CONTRADICTS_OUTCOME: "has outcome {outcome} at {ended_at} (fence {fence}), which does not go with a "
                "lease from {reserved_at} until {lease_expires_at}",
                Kind.LEASE_TOO_LONG: "ended lease {fence} at {ended_at}, and it was valid for more than a day after that, until "
                "{lease_expires_at}",
                Kind.DONE_WITH_ERROR: "was done under lease {fence} at {ended_at}, and with an error: {error_type}",
                Kind.UNKNOWN_OUTCOME: "ended lease {fence} at {ended_at} with the outcome {outcome}, which there is not",
            }
        ),
    ],
    "lives": [
        Rules(
            {
                Kind.DUPLICATE_ROW: "ended lease {fence} as {outcome} at {ended_at} twice: in row {lower.seq} and in row {seq}",
                Kind.FENCE_USED_TWICE: "was leased twice with fence {fence}: at {lower.reserved_at} and at {reserved_at}",
                Kind.SETTLED_BY_ANOTHER: "had lease {fence}, from {reserved_at}, ended by {lower.worker} in row {lower.seq} and "
                "by {worker} in row {seq}",
            },
            at="began_at",
            other_fence="lower.fence",
        ),
        Rules(
            {
                Kind.FENCE_OUT_OF_ORDER: "has fence {fence} in row {seq} ({at}) after fence {highest} in an earlier row",
                Kind.TIME_WENT_BACK: "has a lease ({fence}) from {at} in row {seq}, and one from {latest} in an earlier row",
            },
            at="began_at",
            other_fence="highest",
        ),
        Rules(
            {
                Kind.FENCE_GAP: "has fence {fence} at {at}, but the highest lease before it is {below}: {missing} left no row"
            },
            at="began_at",
            other_fence="below",
        ),
        Rules(
            {
                Kind.OVERLAPPING_LEASES: "was leased (lease {fence}) at {at} while lease {held.fence}, "
                "from {held.reserved_at}, was valid until {held.until}"
            },
            at="began_at",
            other_fence="held.fence",
        ),
        Rules(
            {
                Kind.ENDED_TWICE: f"{_WAS} and ended again as {{outcome}} at {{ended_at}} (lease {{fence}})",
                Kind.ACTIVE_AFTER_END: f"{_WAS} and had outcome {{outcome}} at {{ended_at}} (lease {{fence}}) without a requeue",
                Kind.REQUEUED_ALIVE: f"{_WAS}, not dead, and was {{outcome}} at {{ended_at}} (fence {{fence}})",
                Kind.JOB_CHANGED: f"{_WAS}, and has another queue, key or type in row {{seq}}, from {{ended_at}}",
                Kind.RETRIED_TOO_EARLY: f"{_WAS} after a failure, and lease {{fence}} ({{reserved_at}}) was due before, at "
                "{due}",
                Kind.RAN_AND_MERGED: f"{_WAS}, had run, and was {{outcome}} at {{ended_at}} (fence {{fence}})",
            },
            other_fence="previous.fence",
        ),
    ],
    "numbers": [
        Rules(
            {
                Kind.DUPLICATE_ROW: "has row {seq} of the log, which is there {times} times: lease {one.fence}, "
                "ended {one.ended_at}; job {other.job_id}, lease {other.fence}, ended {other.ended_at}"
            },
            at="other.ended_at",
            other_job_id="nullif(other.job_id, one.job_id)",
            other_fence="other.fence",
        )
    ],
    "keys": [
        Rules(
            {
                Kind.KEY_HELD_TWICE: "of key {key} was leased (lease {fence}) at {at} while job {held.job_id} held lease "
                "{held.fence}, from {held.reserved_at}, until {held.until}"
            },
            at="reserved_at",
            other_job_id="held.job_id",
            other_fence="held.fence",
        )
    ],
    "limits": [
        Rules(
            {
                Kind.LIMIT_EXCEEDED: "was leased (lease {fence}) at {at} as number {level} at once in queue {queue}, "
                "which allows {allowed}"
            },
            at="at",
        )
    ],
    "stored": [
        Rules(
            {
                Kind.LOST_JOB: "was {last.state} after lease {fence} ended at {at}, and the store does not have it",
                Kind.STORE_CONTRADICTS_LOG: "was {last.state} with fence {fence} at {at}, and the store has it as {job.state} "
                "with fence {job.fence}",
                Kind.DIED_TOO_EARLY: "died when lease {fence} expired ({at}), with {job.attempts} of {job.max_attempts} attempts "
                "and {job.stalls} stalls (max_stalls {job.max_stalls})",
                Kind.TOO_MANY_EXECUTIONS: "was run {runs} times and lost {expiries} leases up to {at}: max_attempts is "
                "{job.max_attempts}, max_stalls {job.max_stalls}, and it was requeued {requeues} times",
            },
            other_fence="job.fence",
        ),
        Rules(
            {Kind.DONE_WITHOUT_ROW: "is done in the store since {at}, and no row of the log says so"},
            at="job.finished_at",
        ),
        Rules(
            {Kind.LEFT_WAITING: "is {job.state} in queue {queue}, due since {at}, and nobody has claimed it"},
            at="due",
        ),
    ],
}
STORE_KINDS = tuple(kind for group in RULES["stored"] for kind in group.sentences)
"""The kinds that only the store and its log together show."""


def check(name: str, attempts: DataFrame, before: datetime | None = None, **tables: DataFrame) -> DataFrame:
    """Return the violations that the SQL of this name finds. `before`: jobs that were due earlier should have been claimed."""
    text = files(__package__).joinpath(f"{name}.sql").read_text("utf-8")
    known = {"slack": CLOCK_SLACK_SECONDS, "longest": DAY // SECOND, "before": before}
    return broken(attempts.sparkSession.sql(text, known, attempts=attempts, **tables), RULES[name])
