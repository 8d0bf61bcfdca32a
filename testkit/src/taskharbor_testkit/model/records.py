"""Rules of the reference model that concern one record, whatever the store around it."""

from __future__ import annotations

import msgspec
import msgspec.inspect

from taskharbor.drivers.contract import Ack, Discard, Fail, JobFilter
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import DEFAULT_FLAGS, JobRecord, JobState, UpdateFlags

SUCCEEDS_AGAIN: dict[type, tuple[JobState, ...]] = {
    Ack: (JobState.DONE,),
    Fail: (JobState.DONE, JobState.DEAD),
    Discard: (JobState.CANCELLED,),
}
"""Per settlement: the states of an ended job in which it succeeds again and changes nothing."""


def longest(kind: type[msgspec.Struct], field: str) -> int:
    """Return the greatest length that the contract allows for a field."""
    info = msgspec.inspect.type_info(kind)
    (found,) = [one.type for one in getattr(info, "fields", ()) if one.name == field]
    bounds: list[int | None] = [getattr(one, "max_length", None) for one in getattr(found, "types", (found,))]
    return max(bound for bound in bounds if bound is not None)


def change(job: JobRecord, by: JobRecord, flags: UpdateFlags) -> None:
    """Apply to `job` the fields of `by` that the flags name."""
    if flags.payload:
        job.type, job.payload, job.codec = by.type, by.payload, by.codec
        job.headers, job.timeout_us = dict(by.headers), by.timeout_us
    if flags.run_at == "yes":
        job.run_at_us = by.run_at_us
    elif flags.run_at == "later":
        job.run_at_us = max(job.run_at_us, by.run_at_us)
    elif flags.run_at == "earlier":
        job.run_at_us = min(job.run_at_us, by.run_at_us)
    if flags.retry:
        job.max_attempts, job.max_stalls = by.max_attempts, by.max_stalls
        job.backoff_min_us, job.backoff_max_us = by.backoff_min_us, by.backoff_max_us
    if flags.reset_counts:
        job.attempts = job.stalls = 0
    if flags.priority:
        job.priority = by.priority


def flags_of(job: JobRecord) -> UpdateFlags:
    return job.update or DEFAULT_FLAGS


def own_copy(job: JobRecord) -> JobRecord:
    return msgspec.structs.replace(job, headers=dict(job.headers))


def matches(job: JobRecord, selection: JobFilter) -> bool:
    before = selection.finished_before_us
    return (
        selection.queue in (None, job.queue)
        and (selection.states is None or job.state in selection.states)
        and (selection.types is None or job.type in selection.types)
        and selection.key in (None, job.key)
        and selection.worker in (None, job.worker)
        and (before is None or (job.finished_at_us is not None and job.finished_at_us < before))
    )


def read_cursor(cursor: str | None, default: int) -> int:
    if cursor is not None and not cursor.isdecimal():
        raise InvalidRequest(f"{cursor!r} is not a cursor of this store")
    return default if cursor is None else int(cursor)


def clear_lease(job: JobRecord) -> None:
    job.token = job.worker = job.expires_at_us = job.reserved_at_us = None
    job.cancel_requested = False
