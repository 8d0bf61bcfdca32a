"""Copies of records, so that nobody outside the store holds what is inside it, and the changes keyed jobs make."""

from __future__ import annotations

from collections.abc import Callable

from taskharbor.drivers.memory.queues import READY, SCHEDULED
from taskharbor.jobs import JobRecord, Micros, UpdateFlags

# Unbound and straight from msgspec: half the cost of copy.copy, and it refuses anything but a record.
_copy: Callable[[JobRecord], JobRecord] = JobRecord.__copy__  # type: ignore[attr-defined]

_NO_HEADERS: dict[str, str] = {}
"""Shared by all stored records without headers: whatever leaves the store has a dict of its own."""


def copied(record: JobRecord) -> JobRecord:
    copy = _copy(record)
    copy.headers = {**record.headers}
    return copy


def accepted(record: JobRecord) -> JobRecord:
    """A copy as it may be stored: what only the store decides is at its beginning."""
    copy = _copy(record)
    copy.headers = {**record.headers} if record.headers else _NO_HEADERS
    # Testing is a third of the price of resetting, and a client's record is always untouched.
    if (
        copy.attempts
        or copy.stalls
        or copy.fence
        or copy.cancel_requested
        or copy.last_error is not None
        or copy.failed_at_us is not None
        or copy.finished_at_us is not None
        or copy.result is not None
        or copy.progress is not None
        or copy.merged_into is not None
        or copy.token is not None
        or copy.worker is not None
        or copy.expires_at_us is not None
        or copy.reserved_at_us is not None
    ):
        copy.attempts = copy.stalls = copy.fence = 0
        copy.cancel_requested = False
        copy.last_error = copy.failed_at_us = copy.finished_at_us = None
        copy.result = copy.progress = copy.merged_into = None
        copy.token = copy.worker = copy.expires_at_us = copy.reserved_at_us = None
    return copy


def as_read(record: JobRecord, now: Micros) -> JobRecord:
    """A copy whose state is true at `now`: a scheduled job whose time has come reads as ready."""
    copy = copied(record)
    if copy.state is SCHEDULED or copy.state is READY:
        copy.state = SCHEDULED if copy.run_at_us > now else READY
    return copy


def apply_update(target: JobRecord, source: JobRecord, flags: UpdateFlags) -> None:
    """Change a job by another request with the same key, as far as the flags say."""
    if flags.payload:
        target.type = source.type
        target.payload = source.payload
        target.codec = source.codec
        target.headers = {**source.headers}
        target.timeout_us = source.timeout_us
    if flags.run_at == "yes":
        target.run_at_us = source.run_at_us
    elif flags.run_at == "later":
        target.run_at_us = max(target.run_at_us, source.run_at_us)
    elif flags.run_at == "earlier":
        target.run_at_us = min(target.run_at_us, source.run_at_us)
    if flags.retry:
        target.max_attempts = source.max_attempts
        target.max_stalls = source.max_stalls
        target.backoff_min_us = source.backoff_min_us
        target.backoff_max_us = source.backoff_max_us
    if flags.reset_counts:
        target.attempts = target.stalls = 0
