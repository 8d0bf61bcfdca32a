"""Structs of the driver contract beside jobs: settlements, settings, filters, pages, and the job for a failure queue. Their
bounds hold on every store; `jobs` has the types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from taskharbor.errors import InvalidRequest, JobDamaged, TaskHarborError
from taskharbor.jobs import (
    SECOND,
    Attempt,
    Blob,
    Count,
    Duration,
    Failure,
    Instant,
    JobRecord,
    JobState,
    Micros,
    Name,
    Outcome,
    Text,
    Tries,
    UpdateFlags,
)

DAY: Micros = 86_400 * SECOND

STATES: Final = tuple(JobState)
OUTCOMES: Final = tuple(Outcome)
STATE_NUMBERS: Final = {state: number for number, state in enumerate(STATES)}
"""The numbers by which stores keep states and outcomes are their places here. They never change."""

LeaseTime: TypeAlias = Annotated[Micros, Meta(ge=1, le=DAY)]
PageSize: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
LogPlace: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
BlobName: TypeAlias = Annotated[str, Meta(pattern=r"\A(writes|staging(/[a-z0-9-]{1,64}){0,3})\Z")]
"""The record of bulk writes, or a name below the folder of staged jobs. No other object of a store can be named."""
BlobNames: TypeAlias = Annotated[list[BlobName], Meta(max_length=10_000)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=86_400)]

FAILURE_TYPE = "taskharbor.failure"
"""Type of the job that a failure queue receives for every dead job."""
FAILURE_ATTEMPTS = 100
"""Its executions. It is the last word of a dead job, so crashes of workers must not use them up."""


class Enqueued(msgspec.Struct, frozen=True, gc=False):
    """The answer for one enqueued record."""

    id: str
    """The id of the job that will do the work: the new one, or one that was there already."""
    existed: bool = False


class _Settlement(msgspec.Struct, frozen=True, gc=False, tag=str.lower):
    """A lease and its end. On the wire, `type` distinguishes the kinds."""

    job_id: Name
    token: Text


class Ack(_Settlement, frozen=True):
    """The execution succeeded; the job becomes done."""

    type: ClassVar = "ack"
    result: Blob | None = None


class RetryAt(_Settlement, frozen=True, tag="retry"):
    """The execution failed and the core grants another; the job becomes ready or scheduled, by run_at."""

    type: ClassVar = "retry"
    run_at_us: Instant
    attempts: Tries
    """The new number of recorded failures."""
    error: Failure


class Fail(_Settlement, frozen=True):
    """The execution failed for good; the job becomes dead. If the queue names a failure queue, a job is added there."""

    type: ClassVar = "fail"
    attempts: Tries
    error: Failure


class Release(_Settlement, frozen=True):
    """The job goes back and spends nothing: no attempt, no stall. It keeps its place, or waits until `run_at_us` (a snooze)."""

    type: ClassVar = "release"
    run_at_us: Instant | None = None


class Discard(_Settlement, frozen=True):
    """The holder ends the job on purpose, because of a cancel request or by the handler; the job becomes cancelled."""

    type: ClassVar = "discard"
    reason: Failure | None = None


Settlement: TypeAlias = Ack | RetryAt | Fail | Release | Discard


class Extension(msgspec.Struct, frozen=True, gc=False):
    """A heartbeat for one job: proves the lease and brings progress."""

    job_id: Name
    token: Text
    progress: Blob | None = None
    """None leaves the stored progress as it is."""


SettingsField: TypeAlias = Literal[
    "paused", "max_inflight", "failure_queue", "keep_done_us", "keep_dead_us", "keep_attempts_us"
]
"""The settings that an operator changes, each on its own."""
# None: all.
FieldNames: TypeAlias = Sequence[SettingsField] | None


def changed_fields(fields: FieldNames, declares: bool) -> list[str]:
    """Return the names of the settings that a call of `configure` changes."""
    return [*(get_args(SettingsField) if fields is None else fields), *["declaration"] * declares]


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's settings of a queue. Retention is in microseconds; None keeps for ever."""

    paused: bool = False
    max_inflight: Count | None = None
    """The limit of valid leases at one instant. None: no limit."""
    failure_queue: Name | None = None
    keep_done_us: Duration | None = 7 * DAY
    """The time that done and cancelled jobs stay after their end."""
    keep_dead_us: Duration | None = 90 * DAY
    keep_attempts_us: Duration | None = 30 * DAY
    """The time that rows of the attempt log stay after `ended_at`."""
    declaration: Text | None = None
    """The declaration in code that was applied last. Only a call with `declares` sets it."""


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a queue. They cost the same for ten jobs and for ten million."""

    queue: str
    counts: dict[JobState, int]
    """Jobs per state now; every state is present."""
    done_total: int = 0
    dead_total: int = 0
    cancelled_total: int = 0
    """Jobs that ever ended so, including jobs that retention has removed. A merge counts as cancelled."""
    head_run_at_us: Micros | None = None
    """The instant at which the next job to be claimed became due. It shows how far the queue lags behind."""
    settings: QueueSettings = QueueSettings()


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the jobs of a listing or a purge. A field that is None does not restrict."""

    queue: Name | None = None
    states: frozenset[JobState] | None = None
    types: frozenset[Name] | None = None
    key: Name | None = None
    worker: Name | None = None
    finished_before_us: Instant | None = None
    until: Text | None = None
    """A listing ends with the job at which this cursor stands. A purge ignores it."""


class Page(msgspec.Struct, frozen=True):
    """Part of a listing, newest accepted first. `cursor` is opaque, and None if nothing follows."""

    jobs: list[JobRecord]
    cursor: str | None


def loaded(job_id: str, load: Callable[..., JobRecord], *stored: Any) -> JobRecord:
    """Load a stored job for somebody who looks at it. Raises JobDamaged."""
    try:
        return load(*stored)
    except Exception as error:
        what = f"job {job_id[:200]!r} cannot be loaded: a stored value is damaged"
        raise JobDamaged(f"{what}: run `taskharbor doctor --repair`") from error


class AttemptPage(msgspec.Struct, frozen=True):
    """Part of the attempt log, in log order. `cursor` resumes after the last row, even if the page is empty."""

    attempts: list[Attempt]
    cursor: str


class LogStream(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sequence of rows of the attempt log. Each row has a place. No new row appears at a place before `last`."""

    name: str
    """A name that only the store interprets."""
    queue: str | None
    """The queue of these rows; None: all queues."""
    last: int
    """The place of the last row that was ever written; 0: none."""
    trimmed: int | None
    """The highest place of a row that retention removed; 0: none; None: the store does not know."""
    is_dense: bool = False
    """True if places follow one another without a gap, from 1 on."""
    # True if places come from a clock. Then a store that lost its last rows gives none of their places to others.
    is_timed: bool = False


class LogState(msgspec.Struct, frozen=True):
    """All streams of the attempt log. `store_id` distinguishes the store from others, and from an earlier store in the same
    place."""

    store_id: str
    streams: list[LogStream]


class LogPage(msgspec.Struct, frozen=True):
    """Rows of one stream, in order: all rows up to `place`. The next page goes on from there."""

    attempts: list[Attempt]
    place: int


class JobShare(msgspec.Struct, frozen=True, kw_only=True):
    """A share of the job listing: one queue or all, after one cursor of `list_jobs` and up to another."""

    queue: str | None = None
    after: str | None = None
    until: str | None = None


class Woken(msgspec.Struct, frozen=True):
    """The answer of a `wait`."""

    woken: bool
    seen: str
    """Opaque text for the next wait for the same queues."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a driver beyond the contract, for workers, the conformance kit and `doctor`."""

    durable: bool = True
    """An accepted job survives the death of every process."""
    multi_process: bool = True
    """Several processes can open the same store."""
    passes_over_busy: bool = False
    """`reserve` may leave out a job that another call is changing at that moment, instead of waiting for it, and may count the
    lease of such a job as held. That other call then wakes the waiters. A settlement or heartbeat without the lease of such a job
    may get the error of the moment before or after the change."""
    publishes_at_once: bool = False
    """`publish_blobs` turns any number of blobs into jobs in one transaction."""
    waits_by_requests: bool = False
    """A `wait` asks the store again and again, and each request has its price."""
    ticks_schedules: bool = False
    """A broker in front of the store makes the jobs of due schedules, so its workers need not."""
    batch: int = 1000
    """The number of quick jobs that a worker leases or settles in one call. A larger number makes a call cheaper per job, and
    makes others wait longer."""


class Greeting(msgspec.Struct, kw_only=True):
    """Facts about the broker and the store behind it that a client needs."""

    version: int
    capabilities: Capabilities
    max_batch: int
    """Jobs in one call, or on one page."""
    max_body: int
    """Bytes in one call."""
    max_wait: float
    """Seconds after which the broker ends a wait in any case."""


def numbered_attempt(row: Sequence[Any]) -> Attempt:
    """Make a row of the log from columns in the order of its fields, with numbers for outcome and state."""
    fields = dict(zip(Attempt.__struct_fields__, row, strict=False))
    try:
        fields |= {"outcome": OUTCOMES[fields["outcome"]], "state": STATES[fields["state"]]}
    except IndexError:
        said = "row {seq} of the attempt log, of queue {queue}, has outcome {outcome} and state {state}: not both are known"
        raise TaskHarborError(said.format_map(fields)) from None
    return Attempt(**fields)


def not_a_cursor(text: str) -> InvalidRequest:
    """Make the error for a text that no page gave."""
    return InvalidRequest(f"{text[:60]!r} is not a cursor of this store: pass on what the last page gave")


def cursor_number(cursor: str) -> int:
    """Read a cursor that consists of one number."""
    if not (cursor.isdecimal() and len(cursor) < 19):
        raise not_a_cursor(cursor)
    return int(cursor)


def gather_flags(kept: UpdateFlags, newer: UpdateFlags) -> UpdateFlags:
    """Return the flags of a blocked job after one more enqueue onto it. No request is dropped."""
    return UpdateFlags(
        payload=kept.payload or newer.payload,
        run_at=kept.run_at if newer.run_at == "no" else newer.run_at,
        retry=kept.retry or newer.retry,
        reset_counts=kept.reset_counts or newer.reset_counts,
        priority=kept.priority or newer.priority,
    )


EXPIRED_ERROR = Failure(
    "LeaseExpired", "the lease expired before the job was settled (worker lost or stalled)"
)
"""The last_error of a job that died by a stall, and the error of every `expired` row."""


class FailurePayload(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of a failure queue's job (JSON; bytes in base64): the dead job, its payload and the error."""

    job_id: str
    queue: str
    type: str
    codec: str
    payload: bytes
    error: str
    attempts: int
    stalls: int
    key: str | None = None


def failure_record(dead: JobRecord, *, job_id: str, queue: str, now: Micros) -> JobRecord:
    """Make the job for a failure queue. `dead` has its final counters and last_error."""
    payload = FailurePayload(
        job_id=dead.id,
        queue=dead.queue,
        type=dead.type,
        codec=dead.codec,
        payload=dead.payload,
        error=dead.last_error or "",
        attempts=dead.attempts,
        stalls=dead.stalls,
        key=dead.key,
    )
    return JobRecord(
        id=job_id,
        type=FAILURE_TYPE,
        queue=queue,
        payload=msgspec.json.encode(payload),
        headers=dead.headers,
        run_at_us=now,
        created_at_us=now,
        max_attempts=FAILURE_ATTEMPTS,
    )
