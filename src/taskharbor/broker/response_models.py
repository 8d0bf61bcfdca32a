"""Response bodies of the JSON API, made from the driver's answers. Instants as RFC 3339 in UTC, durations in seconds.

A lease token is only in the answer of a claim or a heartbeat: whoever has it can end the job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from taskharbor.broker.problems import job_error_code
from taskharbor.drivers.contract import QueueSettings, QueueStats
from taskharbor.errors import JobError
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Lease, Micros, Outcome, to_datetime


class Submitted(msgspec.Struct):
    """The job that will do the work: a new one, or one that was there already."""

    id: str
    existed: bool


class SubmittedJobs(msgspec.Struct):
    """One for each job that was sent, in that order."""

    jobs: list[Submitted]


class Job(msgspec.Struct, kw_only=True):
    """A job as it is stored. The payload is there where it was asked for: as JSON, or in base64 where its codec is another."""

    id: str
    type: str
    queue: str
    state: JobState
    priority: int
    created_at: datetime
    run_at: datetime
    finished_at: datetime | None
    failed_at: datetime | None
    attempts: int
    stalls: int
    max_attempts: int
    max_stalls: int
    fence: int
    timeout_seconds: float | None
    backoff_seconds: tuple[float, float]
    key: str | None
    idempotency_key: str | None
    headers: dict[str, str]
    codec: str
    worker: str | None
    reserved_at: datetime | None
    expires_at: datetime | None
    cancel_requested: bool
    merged_into: str | None
    last_error: str | None
    progress: msgspec.Raw | UnsetType = UNSET
    payload: msgspec.Raw | UnsetType = UNSET
    payload_base64: bytes | UnsetType = UNSET
    result: msgspec.Raw | UnsetType = UNSET
    result_base64: bytes | UnsetType = UNSET


class ClaimedJob(Job, kw_only=True):
    """A job that is yours until `expires_at`. The token proves it."""

    token: str


class ClaimedJobs(msgspec.Struct):
    """Empty where nothing was runnable."""

    jobs: list[ClaimedJob]


class Jobs(msgspec.Struct):
    """Newest accepted first. `cursor` leads to the next page; null when nothing follows."""

    jobs: list[Job]
    cursor: str | None


class ItemError(msgspec.Struct):
    """Why one job of a batch was left as it was."""

    code: str
    detail: str


class Held(msgspec.Struct, kw_only=True):
    """The lease that holds from now on. Where a cancel is requested, stop and discard the job."""

    id: str
    token: str
    expires_at: datetime
    cancel_requested: bool


class HeldItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    error: ItemError | None = None
    token: str | None = None
    expires_at: datetime | None = None
    cancel_requested: bool | None = None


class HeldItems(msgspec.Struct):
    results: list[HeldItem]


Applied = Literal["complete", "retry", "fail", "release", "discard"]


class Settled(msgspec.Struct, kw_only=True):
    """What was written. A failure is a `retry` until the job's attempts are used up, then a `fail`."""

    id: str
    applied: Applied
    run_at: datetime | None = None


class SettledItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    error: ItemError | None = None
    applied: Applied | None = None
    run_at: datetime | None = None


class SettledItems(msgspec.Struct):
    """One for each settlement, in order; each stands for itself."""

    results: list[SettledItem]


class State(msgspec.Struct):
    id: str
    state: JobState


class StateItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    error: ItemError | None = None
    state: JobState | None = None


class StateItems(msgspec.Struct):
    results: list[StateItem]


class AttemptRow(msgspec.Struct, kw_only=True):
    """One row of the attempt log: how a lease ended, or how a job ended without one."""

    seq: int
    job_id: str
    queue: str
    type: str
    key: str | None
    priority: int
    fence: int
    worker: str | None
    created_at: datetime
    run_at: datetime
    reserved_at: datetime | None
    lease_expires_at: datetime | None
    ended_at: datetime
    outcome: Outcome
    state: JobState
    error_type: str | None
    error_message: str | None
    payload_bytes: int


class JobAttempts(msgspec.Struct):
    attempts: list[AttemptRow]


class Attempts(msgspec.Struct):
    """In log order. `cursor` resumes after the last row, even when no row came."""

    attempts: list[AttemptRow]
    cursor: str


class QueueView(msgspec.Struct, kw_only=True):
    """A queue's settings. Retention in seconds; null keeps for ever."""

    queue: str
    paused: bool
    max_inflight: int | None
    failure_queue: str | None
    keep_done_seconds: float | None
    keep_dead_seconds: float | None
    keep_attempts_seconds: float | None


class QueueNumbers(msgspec.Struct, kw_only=True):
    """A queue at a glance. `lag_seconds`: for how long its next job has been due."""

    queue: str
    counts: dict[str, int]
    done_total: int
    completed_total: int = msgspec.field(name="completedTotal")
    dead_total: int
    cancelled_total: int
    lag_seconds: float | None
    settings: QueueView


class Stats(msgspec.Struct, kw_only=True):
    """Totals over all queues, and each queue."""

    completed_total: int = msgspec.field(name="completedTotal")
    queues: list[QueueNumbers]


class Removed(msgspec.Struct):
    removed: int


class Time(msgspec.Struct):
    """The broker's clock, which is the store's: what every lease is measured by."""

    time: datetime
    microseconds: int


class Leader(msgspec.Struct):
    """`is_elected`: whether one of several brokers leads. Where not, any number of them answer."""

    is_leader: bool
    is_elected: bool
    leader_url: str | None


class Health(msgspec.Struct, kw_only=True, omit_defaults=True):
    status: str
    version: str = ""
    reason: str = ""


# -- from the driver's answers ------------------------------------------------------------------------------

J = TypeVar("J", bound=Job)
V = TypeVar("V", bound=msgspec.Struct)

_decode = msgspec.json.Decoder().decode


@functools.lru_cache(4096)
def instant(us: Micros) -> datetime:
    """Cached: jobs of one batch have most of theirs in common."""
    return to_datetime(us)


def _seconds(us: Micros | None) -> float | None:
    return None if us is None else us / SECOND


def _json_or_none(data: bytes) -> msgspec.Raw | None:
    """Stored bytes for an answer; None where they are not JSON after all. What a producer called JSON was not checked by all."""
    try:
        _decode(data)
    except (ValueError, RecursionError):
        return None
    return msgspec.Raw(data)


def _fill(job: Job, record: JobRecord) -> None:
    """Payload and result, as JSON where they are."""
    is_json = record.codec == "json"
    value = _json_or_none(record.payload) if is_json else None
    if value is not None:
        job.payload = value
    elif record.payload:
        job.payload_base64 = record.payload
    if record.result is not None:
        value = _json_or_none(record.result) if is_json else None
        if value is not None:
            job.result = value
        else:
            job.result_base64 = record.result


@functools.cache
def _fields(view: type[msgspec.Struct], source: type[msgspec.Struct]) -> list[tuple[str, str, bool]]:
    """Fields that a view shares with its source, their names there, and whether they are instants."""
    theirs = source.__struct_fields__
    names = [field.name for field in msgspec.structs.fields(view) if field.required]
    plain = [(name, name, False) for name in names if name in theirs]
    return plain + [(name, f"{name}_us", True) for name in names if f"{name}_us" in theirs]


def _view(view: type[V], source: msgspec.Struct, **more: Any) -> V:
    """The source's fields as the API shows them, and `more` beside them or in their places."""
    for name, theirs, is_instant in _fields(view, type(source)):
        if name not in more:
            value = getattr(source, theirs)
            more[name] = instant(value) if is_instant and value is not None else value
    return view(**more)


def _job(view: type[J], record: JobRecord) -> J:
    return _view(
        view,
        record,
        timeout_seconds=record.timeout_us / SECOND if record.timeout_us else None,
        backoff_seconds=(record.backoff_min_us / SECOND, record.backoff_max_us / SECOND),
    )


def job_of(record: JobRecord, *, payload: bool) -> Job:
    job = _job(Job, record)
    if record.progress is not None:
        job.progress = _json_or_none(record.progress) or UNSET
    if payload:
        _fill(job, record)
    return job


def claimed_of(record: JobRecord) -> ClaimedJob:
    job = _job(ClaimedJob, record)
    _fill(job, record)
    return job


def held(job_id: str, lease: Lease) -> Held:
    return _view(Held, lease, id=job_id)


def items(
    kind: type[V], one: Callable[[str, Any], msgspec.Struct], ids: Sequence[str], answers: Sequence[Any]
) -> list[V]:
    """The items of a batch's answer: errors, and what `one` makes of the answer for a single job."""
    found: list[V] = []
    for job_id, answer in zip(ids, answers, strict=True):
        if isinstance(answer, JobError):
            fields = {"id": job_id, "error": ItemError(job_error_code(answer), str(answer))}
        else:
            fields = msgspec.structs.asdict(one(job_id, answer))
        found.append(kind(**fields))
    return found


def attempt_row(row: Attempt) -> AttemptRow:
    return _view(AttemptRow, row, payload_bytes=row.payload_size)


def queue_view(queue: str, settings: QueueSettings) -> QueueView:
    return _view(
        QueueView,
        settings,
        queue=queue,
        keep_done_seconds=_seconds(settings.keep_done_us),
        keep_dead_seconds=_seconds(settings.keep_dead_us),
        keep_attempts_seconds=_seconds(settings.keep_attempts_us),
    )


def queue_numbers(stats: QueueStats, now: Micros) -> QueueNumbers:
    head = stats.head_run_at_us
    return _view(
        QueueNumbers,
        stats,
        counts={str(state): count for state, count in stats.counts.items()},
        completed_total=stats.done_total,
        lag_seconds=None if head is None else max(0, now - head) / SECOND,
        settings=queue_view(stats.queue, stats.settings),
    )
