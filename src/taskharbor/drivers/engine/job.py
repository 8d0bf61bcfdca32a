"""A row of `jobs` while a unit works on it: read from one JSON text, changed in place, written back as a tuple."""

from __future__ import annotations

from typing import Any

import msgspec

from taskharbor.drivers.engine.rows import INLINE_PAYLOAD, READY, lease_token, spec_text
from taskharbor.jobs import JobRecord, Micros


class Job(msgspec.Struct, array_like=True, eq=False):
    """A row of `jobs`, in the order of `unit.sql`'s columns; then what only the unit knows."""

    seq: int
    id: str
    queue_id: int
    state: int
    priority: int
    run_at: Micros
    expires_at: Micros | None
    token: str | None
    worker: str | None
    reserved_at: Micros | None
    fence: int
    attempts: int
    stalls: int
    cancel_requested: int
    finished_at: Micros | None
    failed_at: Micros | None
    created_at: Micros
    max_attempts: int
    max_stalls: int
    type: str
    key: str | None
    last_error: str | None
    merged_into: str | None
    payload_size: int
    spec: str | None

    payload: bytes | None = None
    is_new: bool = False
    has_new_spec: bool = False
    has_new_payload: bool = False

    @property
    def full_token(self) -> str | None:
        return None if self.token is None else lease_token(self.token, self.seq)


decode_jobs = msgspec.json.Decoder(list[Job]).decode


def new_job(record: JobRecord, queue: int, seq: int) -> Job:
    return Job(
        seq=seq,
        id=record.id,
        queue_id=queue,
        state=READY,
        priority=record.priority,
        run_at=record.run_at_us,
        expires_at=None,
        token=None,
        worker=None,
        reserved_at=None,
        fence=0,
        attempts=0,
        stalls=0,
        cancel_requested=0,
        finished_at=None,
        failed_at=None,
        created_at=record.created_at_us,
        max_attempts=record.max_attempts,
        max_stalls=record.max_stalls,
        type=record.type,
        key=record.key,
        last_error=None,
        merged_into=None,
        payload_size=len(record.payload),
        spec=spec_text(record),
        payload=record.payload,
        is_new=True,
    )


def moved_row(job: Job) -> tuple[Any, ...]:
    return (
        job.seq,
        job.state,
        job.run_at,
        job.expires_at,
        job.token,
        job.worker,
        job.reserved_at,
        job.attempts,
        job.stalls,
        job.cancel_requested,
        job.finished_at,
        job.failed_at,
        job.last_error,
        job.merged_into,
    )


def new_row(job: Job) -> tuple[Any, ...]:
    return (
        job.seq,
        job.queue_id,
        job.state,
        job.priority,
        job.run_at,
        job.attempts,
        job.stalls,
        job.created_at,
        job.max_attempts,
        job.max_stalls,
        job.id,
        job.type,
        job.key,
        job.spec,
        job.payload_size,
        None if job.payload_size > INLINE_PAYLOAD else job.payload,
    )
