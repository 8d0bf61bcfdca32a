"""Structs that the driver contract takes and gives beside jobs: settlements, settings, filters, pages, and the job that a failure
queue receives. Their bounds hold on every store; see `jobs` for the types.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from taskharbor.jobs import (
    LATEST,
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
    Text,
    UpdateFlags,
)

DAY: Micros = 86_400 * SECOND

LeaseTime: TypeAlias = Annotated[Micros, Meta(ge=1, le=LATEST)]
PageSize: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
LogPlace: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
BlobName: TypeAlias = Annotated[str, Meta(pattern=r"\A(writes|staging(/[a-z0-9-]{1,64}){0,3})\Z")]
"""The record of bulk writes, or below the folder of staged jobs: no other object of a store can be named."""
BlobNames: TypeAlias = Annotated[list[BlobName], Meta(max_length=10_000)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=86_400)]

FAILURE_TYPE = "taskharbor.failure"
"""Type of the job that a failure queue receives for every job that died."""


class Enqueued(msgspec.Struct, frozen=True, gc=False):
    """What became of one enqueued record."""

    id: str
    """The job that will do the work: the new one, or the one that was already there."""
    existed: bool = False


class Ack(msgspec.Struct, frozen=True, gc=False, tag="ack"):
    """The execution succeeded. -> done"""

    job_id: Name
    token: Text
    result: Blob | None = None


class Retry(msgspec.Struct, frozen=True, gc=False, tag="retry"):
    """The execution failed and the core grants another. -> ready or scheduled, by run_at"""

    job_id: Name
    token: Text
    run_at_us: Instant
    attempts: Count
    """The new number of recorded failures."""
    error: Failure


class Fail(msgspec.Struct, frozen=True, gc=False, tag="fail"):
    """The execution failed for good. -> dead, and a job in the failure queue where the queue names one"""

    job_id: Name
    token: Text
    attempts: Count
    error: Failure


class Release(msgspec.Struct, frozen=True, gc=False, tag="release"):
    """The job goes back unspent: no attempt, no stall. Keeps its place, or waits until `run_at_us` (a snooze)."""

    job_id: Name
    token: Text
    run_at_us: Instant | None = None


class Discard(msgspec.Struct, frozen=True, gc=False, tag="discard"):
    """The holder ends the job on purpose: a cancel request was honoured, or the handler said so. -> cancelled"""

    job_id: Name
    token: Text
    reason: Failure | None = None


Settlement: TypeAlias = Ack | Retry | Fail | Release | Discard


class Extension(msgspec.Struct, frozen=True, gc=False):
    """A heartbeat for one job: proves the lease, carries progress up."""

    job_id: Name
    token: Text
    progress: Blob | None = None
    """None leaves the stored progress as it is."""


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator can say of a queue. Retention in microseconds; None keeps for ever."""

    paused: bool = False
    max_inflight: Count | None = None
    """W: never more valid leases than this at once. None: no limit."""
    failure_queue: Name | None = None
    keep_done_us: Duration | None = 7 * DAY
    """How long done and cancelled jobs stay after they ended."""
    keep_dead_us: Duration | None = 90 * DAY
    keep_attempts_us: Duration | None = 30 * DAY
    """How long rows of the attempt log stay after `ended_at`."""


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at a glance. Costs the same for ten jobs and for ten million."""

    queue: str
    counts: dict[JobState, int]
    """Jobs per state now; every state is present."""
    done_total: int = 0
    dead_total: int = 0
    cancelled_total: int = 0
    """Jobs that ever ended so, including those retention has removed. A merge counts as cancelled."""
    head_run_at_us: Micros | None = None
    """When the job that would be claimed next became due: how far the queue lags behind."""
    settings: QueueSettings = QueueSettings()


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs a listing or a purge means; what is None does not restrict."""

    queue: Name | None = None
    states: frozenset[JobState] | None = None
    types: frozenset[Name] | None = None
    key: Name | None = None
    worker: Name | None = None
    finished_before_us: Instant | None = None
    until: Text | None = None
    """A listing ends with the job that this cursor of it stands behind. No purge heeds it."""


class Page(msgspec.Struct, frozen=True):
    """Part of a listing, newest accepted first. `cursor` is opaque; None when nothing follows."""

    jobs: list[JobRecord]
    cursor: str | None


class AttemptPage(msgspec.Struct, frozen=True):
    """Part of the attempt log, in log order. `cursor` resumes after the last row, even when no row came."""

    attempts: list[Attempt]
    cursor: str


class LogStream(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sequence of rows of the attempt log. Each row has a place; no row ever appears before `last`."""

    name: str
    """Means something to the store only."""
    queue: str | None
    """The queue whose rows these are; None: of all queues."""
    last: int
    """The place of the last row that was ever written; 0: none."""
    trimmed: int | None
    """The highest place of a row that retention removed; 0: none; None: the store does not know."""
    is_dense: bool
    """Whether places follow one another without a gap, from 1 on."""


class LogState(msgspec.Struct, frozen=True):
    """All streams of the attempt log. `store_id` tells a store from another, and from one that was there before."""

    store_id: str
    streams: list[LogStream]


class LogPage(msgspec.Struct, frozen=True):
    """Rows of one stream, in order: all of those up to `place`, where the next page goes on."""

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
    """What workers, the conformance kit and `doctor` may expect of a driver beyond the contract."""

    durable: bool = True
    """A job accepted survives the death of every process."""
    multi_process: bool = True
    """Several processes can open the same store."""
    passes_over_busy: bool = False
    """`reserve` may leave out a job that another call is changing at that very moment, instead of waiting for it, and count the
    lease of such a job as held. That call then wakes whoever waits. And of a job that another call is changing, a settlement
    or heartbeat that does not hold the lease may be told by the error of the moment before or after."""
    publishes_at_once: bool = False
    """`publish_blobs` turns any number of blobs into jobs in one transaction."""
    batch: int = 1000
    """How many jobs a worker leases or settles in one call, where they are quick enough: more make a call cheaper per job, and
    keep others waiting for longer."""


class Greeting(msgspec.Struct, kw_only=True):
    """What a client must know of the broker and of the store behind it."""

    version: int
    capabilities: Capabilities
    max_batch: int
    """Jobs in one call, or on one page."""
    max_body: int
    """Bytes in one call."""
    max_wait: float
    """Seconds after which the broker ends a wait in any case."""


def gather_flags(kept: UpdateFlags, newer: UpdateFlags) -> UpdateFlags:
    """Flags of a blocked job after one more enqueue onto it: no wish is dropped."""
    return UpdateFlags(
        payload=kept.payload or newer.payload,
        run_at=kept.run_at if newer.run_at == "no" else newer.run_at,
        retry=kept.retry or newer.retry,
        reset_counts=kept.reset_counts or newer.reset_counts,
    )


EXPIRED_ERROR = Failure(
    "LeaseExpired", "the lease expired before the job was settled (worker lost or stalled)"
)
"""last_error of a job that died by a stall, and the error of every `expired` row."""


class FailurePayload(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of a failure queue's job (JSON; bytes in base64): what died, with what payload, and why."""

    job_id: str
    queue: str
    type: str
    codec: str
    payload: bytes
    error: str
    attempts: int
    stalls: int


_encode_failure = msgspec.json.Encoder().encode


def failure_record(dead: JobRecord, *, job_id: str, queue: str, now: Micros) -> JobRecord:
    """The job that a failure queue receives. `dead` carries its final counters and last_error."""
    payload = FailurePayload(
        job_id=dead.id,
        queue=dead.queue,
        type=dead.type,
        codec=dead.codec,
        payload=dead.payload,
        error=dead.last_error or "",
        attempts=dead.attempts,
        stalls=dead.stalls,
    )
    return JobRecord(
        id=job_id,
        type=FAILURE_TYPE,
        queue=queue,
        payload=_encode_failure(payload),
        headers=dead.headers,
        run_at_us=now,
        created_at_us=now,
    )
