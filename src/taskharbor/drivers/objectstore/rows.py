"""A row of the attempt log as it is stored: in the tail of a queue's state first, in a segment later."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from taskharbor.jobs import Attempt, Failure, JobRecord, JobState, Micros, Outcome


class StoredRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One row. The queue is that of the log it is in."""

    number: int
    ended_at: Micros
    outcome: str
    state: str
    job_id: str
    type: str
    key: str | None
    priority: int
    fence: int
    worker: str | None
    created_at: Micros
    run_at: Micros
    reserved_at: Micros | None
    lease_expires_at: Micros | None
    payload_size: int
    error_type: str | None = None
    error_message: str | None = None


def row_of(
    number: int, record: JobRecord, outcome: Outcome, state: JobState, error: Failure | None, ended_at: Micros
) -> StoredRow:
    """`record` as it is before the change."""
    return StoredRow(
        number,
        ended_at,
        outcome._value_,
        state._value_,
        record.id,
        record.type,
        record.key,
        record.priority,
        record.fence,
        record.worker,
        record.created_at_us,
        record.run_at_us,
        record.reserved_at_us,
        record.expires_at_us,
        len(record.payload),
        None if error is None else error.type,
        None if error is None else error.message,
    )


def attempts_of(queue: str, rows: Iterable[StoredRow]) -> list[Attempt]:
    return [
        Attempt(
            seq=row.number,
            job_id=row.job_id,
            queue=queue,
            type=row.type,
            key=row.key,
            priority=row.priority,
            fence=row.fence,
            worker=row.worker,
            created_at_us=row.created_at,
            run_at_us=row.run_at,
            reserved_at_us=row.reserved_at,
            lease_expires_at_us=row.lease_expires_at,
            ended_at_us=row.ended_at,
            outcome=Outcome(row.outcome),
            state=JobState(row.state),
            error_type=row.error_type,
            error_message=row.error_message,
            payload_size=row.payload_size,
        )
        for row in rows
    ]
