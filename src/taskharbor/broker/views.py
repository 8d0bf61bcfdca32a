"""From what the driver says to what the JSON API answers."""

from __future__ import annotations

import functools
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from taskharbor.broker.answered import (
    AttemptRow,
    ClaimedJob,
    HeldItem,
    ItemError,
    Job,
    QueueNumbers,
    QueueView,
    StateItem,
)
from taskharbor.broker.json_values import json_or_none
from taskharbor.broker.problems import job_error_code
from taskharbor.drivers.contract import QueueSettings, QueueStats
from taskharbor.errors import JobError
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Lease, Micros, to_datetime

J = TypeVar("J", bound=Job)
V = TypeVar("V", bound=msgspec.Struct)


@functools.lru_cache(4096)
def instant(us: Micros) -> datetime:
    """Cached: jobs of one batch have most of theirs in common."""
    return to_datetime(us)


def _seconds(us: Micros | None) -> float | None:
    return None if us is None else us / SECOND


def _fill(job: Job, record: JobRecord) -> None:
    """Payload and result, as JSON where they are."""
    is_json = record.codec == "json"
    value = json_or_none(record.payload) if is_json else None
    if value is not None:
        job.payload = value
    elif record.payload:
        job.payload_base64 = record.payload
    if record.result is not None:
        value = json_or_none(record.result) if is_json else None
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
    """The source's fields as the API shows them, and those that it does not have."""
    for name, theirs, is_instant in _fields(view, type(source)):
        value = getattr(source, theirs)
        more[name] = instant(value) if is_instant and value is not None else value
    return view(**more)


def _job(view: type[J], record: JobRecord, **more: Any) -> J:
    return _view(
        view,
        record,
        timeout_seconds=record.timeout_us / SECOND if record.timeout_us else None,
        backoff_seconds=(record.backoff_min_us / SECOND, record.backoff_max_us / SECOND),
        **more,
    )


def job_of(record: JobRecord, *, payload: bool) -> Job:
    job = _job(Job, record)
    if record.progress is not None:
        job.progress = json_or_none(record.progress) or UNSET
    if payload:
        _fill(job, record)
    return job


def claimed_of(record: JobRecord) -> ClaimedJob:
    job = _job(ClaimedJob, record)
    _fill(job, record)
    return job


def item_error(error: JobError) -> ItemError:
    return ItemError(job_error_code(error), str(error))


def held_item(job_id: str, answer: Lease | JobError) -> HeldItem:
    if isinstance(answer, JobError):
        return HeldItem(id=job_id, error=item_error(answer))
    return HeldItem(
        id=job_id,
        token=answer.token,
        expires_at=instant(answer.expires_at_us),
        cancel_requested=answer.cancel_requested,
    )


def state_item(job_id: str, answer: JobState | JobError) -> StateItem:
    if isinstance(answer, JobError):
        return StateItem(id=job_id, error=item_error(answer))
    return StateItem(id=job_id, state=answer)


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
    return QueueNumbers(
        queue=stats.queue,
        counts={str(state): count for state, count in stats.counts.items()},
        done_total=stats.done_total,
        completed_total=stats.done_total,
        dead_total=stats.dead_total,
        cancelled_total=stats.cancelled_total,
        lag_seconds=None if head is None else max(0, now - head) / SECOND,
        settings=queue_view(stats.queue, stats.settings),
    )
