"""The records of the system: request, job, lease, attempt.

`JobRequest` is the user's request. `JobRecord` is the job that every driver stores. `Lease` is the right to work on a job until
an instant. `Attempt` is a row of the log; every lease that ends leaves one.

Instants are whole microseconds since the epoch, UTC, in fields that end in `_us`. A property of the same name without the ending
gives a timezone-aware `datetime`. Integers are exact in every backend and cost nothing on the hot path.

`gc=False`: these structs hold plain values and form no cycle, so the garbage collector need not visit a million of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from taskharbor.errors import InvalidRequest

Micros: TypeAlias = int
"""Microseconds: since the epoch in UTC for an instant, plain for a duration."""

SECOND: Micros = 1_000_000

DEFAULT_QUEUE = "default"
DEFAULT_MAX_ATTEMPTS = 5
DEFAULT_BACKOFF_MIN: Micros = 1 * SECOND
DEFAULT_BACKOFF_MAX: Micros = 3600 * SECOND

MAX_NAME_LENGTH = 200
MAX_PAYLOAD_BYTES = 1_048_576
LARGEST_PAYLOAD = 16_777_216
"""The most bytes of a payload that a driver accepts, however large the limits of its clients are."""
MAX_RESULT_BYTES = 65_536
MAX_HEADERS_BYTES = 8_192
MAX_PROGRESS_BYTES = 4_096
MAX_ERROR_CHARS = 8_192
_MAX_ERROR_TYPE_CHARS = 200
_MAX_MESSAGE_CHARS = 500
MAX_PRIORITY = 32_767
MAX_TRIES = 1_000_000
LATEST: Micros = 2**53 - 1
"""The last instant, in the year 2255, and the longest duration. It is exact as a floating-point number; Redis counts in those."""

# Types with bounds that every store can keep. msgspec checks them when it decodes. `drivers.validation` checks them in
# structs that Python code made. It also refuses values that no bound can exclude: blank names, and texts with NUL or lone
# surrogates.
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
Instant: TypeAlias = Annotated[Micros, Meta(ge=-LATEST, le=LATEST)]
Now: TypeAlias = Annotated[Micros, Meta(ge=0, le=LATEST)]
"""The time of a caller's clock, which is never before 1970."""
Duration: TypeAlias = Annotated[Micros, Meta(ge=0, le=LATEST)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tries: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TRIES)]
Priority: TypeAlias = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Payload: TypeAlias = Annotated[bytes, Meta(max_length=2**28)]
"""A request may have `LARGEST_PAYLOAD`. Copies for failure queues are in base64 and larger: a chain of them still fits into
512 MiB, the longest value of a Redis server."""
Blob: TypeAlias = Annotated[bytes, Meta(max_length=1_048_576)]
"""A result, or progress."""
Text: TypeAlias = Annotated[str, Meta(max_length=65_536)]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ONE_MICROSECOND = timedelta(microseconds=1)


def to_micros(when: datetime | timedelta) -> Micros:
    """Convert exactly. `timestamp() * 1e6` would round through a float."""
    if isinstance(when, timedelta):
        return when // _ONE_MICROSECOND
    if when.tzinfo is None:
        raise InvalidRequest(
            f"{when!r} has no time zone: use an aware datetime, e.g. datetime.now(timezone.utc)"
        )
    return (when - _EPOCH) // _ONE_MICROSECOND


def to_datetime(us: Micros) -> datetime:
    """Return an instant as a datetime. One beyond all bounds, which only a damaged job has, becomes the first or the last one."""
    return _EPOCH + timedelta(microseconds=max(-LATEST, min(us, LATEST)))


class JobState(StrEnum):
    """The states of a job. An accepted job is in exactly one of them, until retention removes an ended job."""

    SCHEDULED = "scheduled"
    READY = "ready"
    BLOCKED = "blocked"
    INFLIGHT = "inflight"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """True if the job has ended: done, dead or cancelled."""
        return self in TERMINAL_STATES

    @property
    def is_waiting(self) -> bool:
        """True if the job waits: scheduled, ready or blocked."""
        return self in WAITING_STATES


TERMINAL_STATES = frozenset({JobState.DONE, JobState.DEAD, JobState.CANCELLED})
WAITING_STATES = frozenset({JobState.SCHEDULED, JobState.READY, JobState.BLOCKED})


class Outcome(StrEnum):
    """The reason for a row of the attempt log."""

    DONE = "done"
    RETRIED = "retried"
    DEAD = "dead"
    EXPIRED = "expired"
    RELEASED = "released"
    CANCELLED = "cancelled"
    MERGED = "merged"
    REQUEUED = "requeued"


UpdateRunAt: TypeAlias = Literal["yes", "no", "later", "earlier"]


class UpdateFlags(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of a waiting job that an enqueue with the same key replaces.

    The default replaces type, payload, codec, headers and timeout. It keeps the time, the limits of retries, the counts of
    attempts and stalls, and the priority.
    """

    payload: bool = True
    run_at: UpdateRunAt = "no"
    retry: bool = False
    reset_counts: bool = False
    priority: bool = False


DEFAULT_FLAGS = UpdateFlags()


def _storable(text: str, limit: int) -> str:
    return text[:limit].encode(errors="backslashreplace").decode().replace("\0", "\\0")[:limit]


class Failure(msgspec.Struct, frozen=True, gc=False):
    """The error of one execution, as the attempt log and `last_error` keep it."""

    type: Text
    message: Text
    detail: Text = ""
    """The traceback, if there is one."""

    @classmethod
    def of(cls, type: str, message: str, detail: str = "") -> Failure:
        """Make a failure of any texts that every store can keep. One odd file name in a message must not stop a batch."""
        return cls(
            _storable(type, _MAX_ERROR_TYPE_CHARS),
            _storable(message, _MAX_MESSAGE_CHARS),
            _storable(detail[-MAX_ERROR_CHARS:], MAX_ERROR_CHARS),
        )

    @property
    def text(self) -> str:
        """The text for `last_error`: one line, then the traceback if there is one."""
        line = f"{self.type}: {self.message}" if self.message else self.type
        return f"{line}\n{self.detail}" if self.detail else line


class JobRequest(msgspec.Struct, kw_only=True):
    """A user's request for a job. The client checks it, fills in the defaults and makes a `JobRecord` of it."""

    type: str
    payload: Any = None
    queue: str | None = None
    run_at: datetime | None = None
    delay: timedelta | float | None = None
    timeout: timedelta | float | None = None
    priority: int | None = None
    key: str | None = None
    update: UpdateFlags | None = None
    idempotency_key: str | None = None
    max_attempts: int | None = None
    max_stalls: int | None = None
    backoff: tuple[float, float] | None = None
    headers: Mapping[str, str] | None = None
    codec: str | None = None


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to work on a job until `expires_at`. A random token proves it."""

    job_id: str
    token: str
    expires_at_us: Micros
    cancel_requested: bool = False

    @property
    def expires_at(self) -> datetime:
        """The instant at which the lease expires."""
        return to_datetime(self.expires_at_us)


class JobRecord(msgspec.Struct, kw_only=True, gc=False):
    """A job as every driver stores it. Drivers store these fields; the core gives them meaning."""

    id: Name
    type: Name
    queue: Name = DEFAULT_QUEUE
    payload: Payload = b""
    codec: Name = "json"
    headers: dict[str, str] = {}
    priority: Priority = 0
    run_at_us: Instant
    created_at_us: Instant
    timeout_us: Duration = 0
    """0: no timeout."""
    key: Name | None = None
    update: UpdateFlags | None = None
    """The change that this request makes to a job with the same key. Kept while the job is blocked, for the merge."""
    idempotency_key: Name | None = None

    max_attempts: Tries = DEFAULT_MAX_ATTEMPTS
    """Bound of executions: the job dies when attempts + stalls reach it. With `max_stalls`, bound of the attempts alone."""
    max_stalls: Tries = 0
    """Bound of expired leases, which then spend nothing of `max_attempts`. 0: they spend of that."""
    backoff_min_us: Duration = DEFAULT_BACKOFF_MIN
    backoff_max_us: Duration = DEFAULT_BACKOFF_MAX

    # The store alone sets the fields from here on. An enqueue ignores them.
    state: JobState = JobState.READY
    attempts: int = 0
    """The number of recorded failures."""
    stalls: int = 0
    """The number of leases that expired."""
    fence: int = 0
    """The number of leases granted so far. It only grows, so a resource can refuse an older holder."""
    last_error: str | None = None
    failed_at_us: Micros | None = None
    finished_at_us: Micros | None = None
    result: bytes | None = None
    progress: bytes | None = None
    cancel_requested: bool = False
    merged_into: str | None = None
    """Set on a cancelled job that was merged into another with the same key: the id of that other job."""

    token: str | None = None
    worker: str | None = None
    expires_at_us: Micros | None = None
    reserved_at_us: Micros | None = None

    @property
    def spent(self) -> int:
        """The executions that count against `max_attempts`."""
        return self.attempts if self.max_stalls else self.attempts + self.stalls

    @property
    def lease(self) -> Lease | None:
        """The lease, or None if the job is not inflight."""
        if self.token is None or self.expires_at_us is None:
            return None
        return Lease(self.id, self.token, self.expires_at_us, self.cancel_requested)

    def is_overdue(self, now: Micros) -> bool:
        """Return True if the job is inflight and its lease began longer than its timeout ago."""
        began = self.reserved_at_us if self.state is JobState.INFLIGHT and self.timeout_us else None
        return began is not None and now - began > self.timeout_us

    @property
    def run_at(self) -> datetime:
        """The instant from which the job may run."""
        return to_datetime(self.run_at_us)

    @property
    def created_at(self) -> datetime:
        """The instant of acceptance."""
        return to_datetime(self.created_at_us)

    @property
    def failed_at(self) -> datetime | None:
        """The instant of the last failure."""
        return None if self.failed_at_us is None else to_datetime(self.failed_at_us)

    @property
    def finished_at(self) -> datetime | None:
        """The instant at which the job ended."""
        return None if self.finished_at_us is None else to_datetime(self.finished_at_us)

    @property
    def expires_at(self) -> datetime | None:
        """The instant at which the lease expires."""
        return None if self.expires_at_us is None else to_datetime(self.expires_at_us)

    @property
    def reserved_at(self) -> datetime | None:
        """The instant at which the lease began."""
        return None if self.reserved_at_us is None else to_datetime(self.reserved_at_us)

    @property
    def timeout(self) -> timedelta | None:
        """The longest time for one execution."""
        return timedelta(microseconds=self.timeout_us) if self.timeout_us else None


class Attempt(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """One row of the attempt log: the end of a lease, or the end of a job without one."""

    seq: int
    """The number of the row in its driver's log. Rows of one job are in the order of their numbers. If several writers commit at
    once, the log as a whole is read in the order of commits, which may be another."""
    job_id: str
    queue: str
    type: str
    key: str | None
    priority: int
    fence: int
    worker: str | None
    created_at_us: Micros
    run_at_us: Micros
    """The instant at which the job was due for this execution."""
    reserved_at_us: Micros | None
    """None if there was no lease (cancelled or merged while waiting, requeued)."""
    lease_expires_at_us: Micros | None
    ended_at_us: Micros
    outcome: Outcome
    state: JobState
    """The job's state after the attempt. An expired lease may leave it ready, dead or cancelled."""
    error_type: str | None = None
    error_message: str | None = None
    payload_size: int = 0

    @property
    def ended_at(self) -> datetime:
        """The instant at which the attempt ended."""
        return to_datetime(self.ended_at_us)

    @property
    def reserved_at(self) -> datetime | None:
        """The instant at which the lease began, or None for a change without a lease."""
        return None if self.reserved_at_us is None else to_datetime(self.reserved_at_us)
