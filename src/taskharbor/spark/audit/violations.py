"""The form of a violation, rules over rows that make violations, and the meaning of a lease for all rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from functools import reduce
from operator import or_
from typing import NamedTuple

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F


class Kind(StrEnum):
    """The kinds of violations. A correct driver never causes one, whatever crashes or races happened."""

    OVERLAPPING_LEASES = "overlapping_leases"
    """Two leases of one job were valid at once."""
    FENCE_OUT_OF_ORDER = "fence_out_of_order"
    """A later row of a job carries a lower fence than an earlier one."""
    FENCE_USED_TWICE = "fence_used_twice"
    """Two leases of one job have the same fence."""
    FENCE_GAP = "fence_gap"
    """A lease was granted and left no row."""
    LIMIT_EXCEEDED = "limit_exceeded"
    """A lease was granted while max_inflight others were valid in the queue."""
    STARTED_EARLY = "started_early"
    """Leased before run_at."""
    KEY_HELD_TWICE = "key_held_twice"
    """Two jobs of one (queue, key) were leased at once."""
    ENDED_TWICE = "ended_twice"
    """A second terminal state without a requeue in between."""
    ACTIVE_AFTER_END = "active_after_end"
    """Something happened to a job that had ended and was not requeued."""
    REQUEUED_ALIVE = "requeued_alive"
    """Requeued although it was not dead."""
    SETTLED_TOO_LATE = "settled_too_late"
    """A lease was settled by its holder when it was over."""
    EXPIRED_TOO_EARLY = "expired_too_early"
    """A lease was ended as expired while it was valid."""
    TIMES_OUT_OF_ORDER = "times_out_of_order"
    """Ended before it began, expired before it began, or leased before the job was created."""
    STATE_CONTRADICTS_OUTCOME = "state_contradicts_outcome"
    """The outcome cannot lead to the state."""
    LEASE_CONTRADICTS_OUTCOME = "lease_contradicts_outcome"
    """The outcome ends a lease and there was none, or the other way round."""
    UNKNOWN_OUTCOME = "unknown_outcome"
    DUPLICATE_ROW = "duplicate_row"
    """The same row of the log, or the same end of a lease, is there more than once."""
    LOST_JOB = "lost_job"
    """Its last state is not terminal and the store does not have it."""
    STORE_CONTRADICTS_LOG = "store_contradicts_log"
    """The store is behind what the log says had happened before."""


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


CLOCK_SLACK_SECONDS = 5
"""The largest difference between the clocks of two callers, in seconds, for calls whose order the log does not tell. Far more
than the error of a sampled backend clock, and far less than a lease."""

_NAME = re.compile(r"\{([\w.]+)\}")


class Rule(NamedTuple):
    """Broken by a row where `broken` is true of it. The row must have source, queue, job_id and fence.

    `text` has a {name} for every value: a column of the row, `at`, or one of `values`.
    """

    kind: Kind
    broken: Column
    text: str
    at: Column | None = None
    """The instant of the violation; None: that of the row's end."""
    other_job_id: Column | None = None
    other_fence: Column | None = None
    values: Mapping[str, Column] = {}


def broken(rows: DataFrame, *rules: Rule) -> DataFrame:
    """Return one violation for every rule that a row breaks, in one pass over the rows."""
    # Almost no row breaks a rule. The rows that do are found before any sentence is made.
    suspects = rows.where(reduce(or_, (F.coalesce(rule.broken, F.lit(False)) for rule in rules)))
    findings = F.array(*(F.when(rule.broken, _finding(rule)) for rule in rules))
    found = suspects.select(F.explode(F.array_compact(findings)).alias("finding"))
    return found.select(*(f"finding.{name}" for name in Violation.__struct_fields__))


def _finding(rule: Rule) -> Column:
    at = F.col("ended_at") if rule.at is None else rule.at
    return F.struct(
        F.lit(str(rule.kind)).alias("kind"),
        *("source", "queue", "job_id", "fence"),
        F.lit(rule.other_job_id).cast("string").alias("other_job_id"),
        F.lit(rule.other_fence).cast("bigint").alias("other_fence"),
        at.alias("at"),
        _sentence(rule.text, {"at": at, **rule.values}).alias("text"),
    )


def _sentence(text: str, values: Mapping[str, Column]) -> Column:
    """Instants are written as in ISO 8601, a missing value as `none`."""
    names = _NAME.findall(text)
    columns = (F.coalesce(values.get(name, F.col(name)).cast("string"), F.lit("none")) for name in names)
    return F.format_string(_NAME.sub("%s", text), *columns)


# -- leases ---------------------------------------------------------------------------------------------------------


def is_leased() -> Column:
    """True for rows with a lease. Rows of jobs that were cancelled or merged while waiting, or requeued, have none."""
    return F.col("reserved_at").isNotNull() & F.col("lease_expires_at").isNotNull()


def valid_until() -> Column:
    """Return the end of the lease's validity. It is valid from reserved_at up to, not including, this instant."""
    return F.least("ended_at", "lease_expires_at")


def clock_slack() -> Column:
    return F.expr(f"INTERVAL {CLOCK_SLACK_SECONDS} SECONDS")
