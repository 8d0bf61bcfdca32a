"""From what the driver says to what the JSON API answers."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import Any, TypeVar

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

_FIRST = datetime(1, 1, 1, tzinfo=UTC)
_LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)


@functools.lru_cache(4096)
def instant(us: Micros) -> datetime:
    """Clipped to what a date can say: a store may hold any number. Jobs of one batch have most of theirs in common."""
    try:
        return to_datetime(us)
    except OverflowError:
        return _FIRST if us < 0 else _LAST


def _instant(us: Micros | None) -> datetime | None:
    return None if us is None else instant(us)


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


def _made(kind: type[J], record: JobRecord, **more: Any) -> J:
    return kind(
        id=record.id,
        type=record.type,
        queue=record.queue,
        state=record.state,
        priority=record.priority,
        created_at=instant(record.created_at_us),
        run_at=instant(record.run_at_us),
        finished_at=_instant(record.finished_at_us),
        failed_at=_instant(record.failed_at_us),
        attempts=record.attempts,
        stalls=record.stalls,
        max_attempts=record.max_attempts,
        max_stalls=record.max_stalls,
        fence=record.fence,
        timeout_seconds=record.timeout_us / SECOND if record.timeout_us else None,
        backoff_seconds=(record.backoff_min_us / SECOND, record.backoff_max_us / SECOND),
        key=record.key,
        idempotency_key=record.idempotency_key,
        headers=record.headers,
        codec=record.codec,
        worker=record.worker,
        reserved_at=_instant(record.reserved_at_us),
        expires_at=_instant(record.expires_at_us),
        cancel_requested=record.cancel_requested,
        merged_into=record.merged_into,
        last_error=record.last_error,
        **more,
    )


def job_of(record: JobRecord, *, payload: bool) -> Job:
    job = _made(Job, record)
    if record.progress is not None:
        job.progress = json_or_none(record.progress) or UNSET
    if payload:
        _fill(job, record)
    return job


def claimed_of(record: JobRecord) -> ClaimedJob:
    job = _made(ClaimedJob, record, token=record.token or "")
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
    return AttemptRow(
        seq=row.seq,
        job_id=row.job_id,
        queue=row.queue,
        type=row.type,
        key=row.key,
        priority=row.priority,
        fence=row.fence,
        worker=row.worker,
        created_at=instant(row.created_at_us),
        run_at=instant(row.run_at_us),
        reserved_at=_instant(row.reserved_at_us),
        lease_expires_at=_instant(row.lease_expires_at_us),
        ended_at=instant(row.ended_at_us),
        outcome=row.outcome,
        state=row.state,
        error_type=row.error_type,
        error_message=row.error_message,
        payload_bytes=row.payload_size,
    )


def queue_view(queue: str, settings: QueueSettings) -> QueueView:
    return QueueView(
        queue=queue,
        paused=settings.paused,
        max_inflight=settings.max_inflight,
        failure_queue=settings.failure_queue,
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
