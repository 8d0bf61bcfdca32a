"""The nouns of the system: what a user asks for, what a driver stores, what a handler sees.

`JobRequest` is the user's wish, `JobRecord` what every driver persists, `Lease` the right to work on a job for a
while, `Attempt` one row of the log that every ended lease leaves behind. Instants are whole microseconds
since the epoch, UTC, in fields ending in `_us`; each has a property of the same name without the ending that gives
a timezone-aware `datetime`. Integers are exact in every backend and cost nothing per job on the hot path.
`gc=False`: these hold plain values and can form no cycle, so the collector need not walk a million of them.
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
MAX_RESULT_BYTES = 65_536
MAX_HEADERS_BYTES = 8_192
MAX_PROGRESS_BYTES = 4_096
MAX_ERROR_CHARS = 8_192
_MAX_ERROR_TYPE_CHARS = 200
_MAX_MESSAGE_CHARS = 500
MAX_PRIORITY = 32_767
MAX_TRIES = 1_000_000
LATEST: Micros = 2**53 - 1
"""The last instant, in the year 2255, and the longest duration: still exact as a floating-point number, which Redis counts in."""

# Types with bounds that every store can keep. msgspec checks them when it decodes; `drivers.dispatch` checks them in structs
# that Python code made, and refuses what no bound can say: blank names, and texts with NUL or lone surrogates.
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
Instant: TypeAlias = Annotated[Micros, Meta(ge=-LATEST, le=LATEST)]
Duration: TypeAlias = Annotated[Micros, Meta(ge=0, le=LATEST)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tries: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TRIES)]
Priority: TypeAlias = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Payload: TypeAlias = Annotated[bytes, Meta(max_length=2**28)]
"""The copy that a failure queue gets, in base64, still fits into 512 MiB: the longest value of a Redis server."""
Blob: TypeAlias = Annotated[bytes, Meta(max_length=1_048_576)]
"""A result, or progress."""
Text: TypeAlias = Annotated[str, Meta(max_length=65_536)]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ONE_MICROSECOND = timedelta(microseconds=1)


def to_micros(when: datetime | timedelta) -> Micros:
    """Exact, unlike `timestamp() * 1e6`, which rounds through a float."""
    if isinstance(when, timedelta):
        return when // _ONE_MICROSECOND
    if when.tzinfo is None:
        raise InvalidRequest(
            f"{when!r} has no time zone: use an aware datetime, e.g. datetime.now(timezone.utc)"
        )
    return (when - _EPOCH) // _ONE_MICROSECOND


def to_datetime(us: Micros) -> datetime:
    return _EPOCH + timedelta(microseconds=us)


class JobState(StrEnum):
    """A job that was accepted is in exactly one of these, until retention removes a terminal one."""

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
    """Why a row of the attempt log was written."""

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
    """What an enqueue onto a job with the same key changes in it.

    The default replaces what to do (type, payload, codec, headers, timeout) and leaves when to do it, how often
    to try, and what was already tried.
    """

    payload: bool = True
    run_at: UpdateRunAt = "no"
    retry: bool = False
    reset_counts: bool = False


DEFAULT_FLAGS = UpdateFlags()


def _storable(text: str, limit: int) -> str:
    return text[:limit].encode(errors="backslashreplace").decode().replace("\0", "\\0")[:limit]


class Failure(msgspec.Struct, frozen=True, gc=False):
    """What went wrong in one execution, as the attempt log and `last_error` keep it."""

    type: Text
    message: Text
    detail: Text = ""
    """A traceback, where there is one."""

    @classmethod
    def of(cls, type: str, message: str, detail: str = "") -> Failure:
        """A failure that every store can keep, of texts from anywhere: one odd file name in a message must not stop a batch."""
        return cls(
            _storable(type, _MAX_ERROR_TYPE_CHARS),
            _storable(message, _MAX_MESSAGE_CHARS),
            _storable(detail[-MAX_ERROR_CHARS:], MAX_ERROR_CHARS),
        )

    @property
    def text(self) -> str:
        """What `last_error` stores: one line, then the traceback where there is one."""
        line = f"{self.type}: {self.message}" if self.message else self.type
        return f"{line}\n{self.detail}" if self.detail else line


class JobRequest(msgspec.Struct, kw_only=True):
    """A user's wish. The client validates it, fills in what was left open and makes a `JobRecord` of it."""

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
    """The right to work on a job until `expires_at`, proved by a random token."""

    job_id: str
    token: str
    expires_at_us: Micros
    cancel_requested: bool = False

    @property
    def expires_at(self) -> datetime:
        """The instant at which the lease expires."""
        return to_datetime(self.expires_at_us)


class JobRecord(msgspec.Struct, kw_only=True, gc=False):
    """A job as every driver stores it. Drivers persist these fields; the core gives them meaning."""

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
    """How this request changes a job with the same key; kept while blocked, for the merge."""
    idempotency_key: Name | None = None

    max_attempts: Tries = DEFAULT_MAX_ATTEMPTS
    """Bounds executions: the job dies when attempts + stalls reach it."""
    max_stalls: Tries = 0
    """Bounds expired leases apart from that; 0: no bound of its own."""
    backoff_min_us: Duration = DEFAULT_BACKOFF_MIN
    backoff_max_us: Duration = DEFAULT_BACKOFF_MAX

    # From here on only a store decides: an enqueue ignores these.
    state: JobState = JobState.READY
    attempts: int = 0
    """Recorded failures."""
    stalls: int = 0
    """Leases that expired."""
    fence: int = 0
    """Leases granted so far; strictly increasing, so a resource can refuse an older holder."""
    last_error: str | None = None
    failed_at_us: Micros | None = None
    finished_at_us: Micros | None = None
    result: bytes | None = None
    progress: bytes | None = None
    cancel_requested: bool = False
    merged_into: str | None = None
    """Set on a cancelled job that was merged into another with the same key: read that one instead."""

    token: str | None = None
    worker: str | None = None
    expires_at_us: Micros | None = None
    reserved_at_us: Micros | None = None

    @property
    def lease(self) -> Lease | None:
        """The lease, while the job is inflight."""
        if self.token is None or self.expires_at_us is None:
            return None
        return Lease(self.id, self.token, self.expires_at_us, self.cancel_requested)

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
    """One row of the attempt log: how a lease ended, or how a job ended without one."""

    seq: int
    """Names the row in its driver's log. Rows of one job are in the order of their numbers; where several writers commit
    at once, the log as a whole is read in the order of commits, which may be another."""
    job_id: str
    queue: str
    type: str
    key: str | None
    priority: int
    fence: int
    worker: str | None
    created_at_us: Micros
    run_at_us: Micros
    """When the job was due for this execution."""
    reserved_at_us: Micros | None
    """None where no lease was held (cancelled or merged while waiting, requeued)."""
    lease_expires_at_us: Micros | None
    ended_at_us: Micros
    outcome: Outcome
    state: JobState
    """What the job became: an expired lease may leave it ready, dead or cancelled."""
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
