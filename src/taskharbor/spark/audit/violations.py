"""The kinds of violations, and the form of one."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """The kinds of violations. A correct driver never causes one, whatever crashes or races happened."""

    OVERLAPPING_LEASES = "overlapping_leases"  # Two leases of one job were valid at once.
    # A later row of a job carries a lower fence than an earlier one.
    FENCE_OUT_OF_ORDER = "fence_out_of_order"
    FENCE_USED_TWICE = "fence_used_twice"  # Two leases of one job have the same fence.
    FENCE_GAP = "fence_gap"  # A lease was granted and left no row.
    # A lease was granted while max_inflight others were valid in the queue.
    LIMIT_EXCEEDED = "limit_exceeded"
    STARTED_EARLY = "started_early"  # Leased before run_at.
    KEY_HELD_TWICE = "key_held_twice"  # Two jobs of one (queue, key) were leased at once.
    ENDED_TWICE = "ended_twice"  # A second terminal state without a requeue in between.
    ACTIVE_AFTER_END = "active_after_end"  # Something happened to a job that had ended and was not requeued.
    REQUEUED_ALIVE = "requeued_alive"  # Requeued although it was not dead.
    SETTLED_TOO_LATE = "settled_too_late"  # A lease was settled by its holder when it was over.
    EXPIRED_TOO_EARLY = "expired_too_early"  # A lease was ended as expired while it was valid.
    TIMES_OUT_OF_ORDER = "times_out_of_order"  # Over before it began, or leased before the job was created.
    STATE_CONTRADICTS_OUTCOME = "state_contradicts_outcome"  # The outcome cannot lead to the state.
    # It ends a lease and there was none, or the other way round.
    LEASE_CONTRADICTS_OUTCOME = "lease_contradicts_outcome"
    UNKNOWN_OUTCOME = "unknown_outcome"
    # The same row of the log, or the same end of a lease, is there more than once.
    DUPLICATE_ROW = "duplicate_row"
    LEASE_TOO_LONG = "lease_too_long"
    SETTLED_BY_ANOTHER = "settled_by_another"
    # A failed job was to wait, and its next lease was due before it failed.
    RETRIED_TOO_EARLY = "retried_too_early"
    TIME_WENT_BACK = "time_went_back"  # A later row has a lease that began before that of an earlier row.
    DONE_WITH_ERROR = "done_with_error"
    JOB_CHANGED = "job_changed"  # The queue or the key of a job changed, or the type of one without a key.
    # Merged into another job although it was not blocked: it had run before.
    RAN_AND_MERGED = "ran_and_merged"
    TICK_DOUBLED = "tick_doubled"  # A tick of a schedule has two jobs, or its job lived twice.
    TICK_LOST = "tick_lost"  # A tick was due when its schedule was worked on, and it has no job.
    LOST_JOB = "lost_job"  # Its last state is not terminal and the store does not have it.
    # The store is behind what the log says had happened before.
    STORE_CONTRADICTS_LOG = "store_contradicts_log"
    DIED_TOO_EARLY = "died_too_early"  # An expired lease ended the job, and its executions were not used up.
    TOO_MANY_EXECUTIONS = "too_many_executions"
    DONE_WITHOUT_ROW = "done_without_row"
    LEFT_WAITING = "left_waiting"  # Due for longer than the limit that was asked for, and nobody claimed it.


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A broken guarantee: the job, the leases, the instant and a sentence. An audit gives rows with these columns."""

    kind: str
    source: str | None
    queue: str | None
    job_id: str | None
    other_job_id: str | None
    fence: int | None
    other_fence: int | None
    at: datetime | None
    text: str
