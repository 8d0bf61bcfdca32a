"""Rows of the driver contract as Arrow batches that fit `bulk.schemas`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from taskharbor.bulk.contract import Table
from taskharbor.bulk.schemas import SCHEMAS
from taskharbor.drivers.contract import QueueStats
from taskharbor.jobs import Attempt, JobRecord, JobState

_encode = msgspec.json.Encoder().encode


def fitted(table: Table, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Columns in the schema's order, cast where they differ. Whole numbers become instants without being copied."""
    schema = SCHEMAS[table]
    cast = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(cast, schema=schema)


def from_rows(table: Table, rows: Iterable[tuple[Any, ...]]) -> pa.RecordBatch | None:
    """Rows with instants as microseconds; None where there are none."""
    columns = list(zip(*rows, strict=True))
    if not columns:
        return None
    return fitted(
        table,
        [
            pa.array(values, pa.int64() if pa.types.is_timestamp(field.type) else field.type)
            for values, field in zip(columns, SCHEMAS[table], strict=True)
        ],
    )


def attempt_row(one: Attempt) -> tuple[Any, ...]:
    return (
        one.seq,
        one.job_id,
        one.queue,
        one.type,
        one.key,
        one.priority,
        one.fence,
        one.worker,
        one.created_at_us,
        one.run_at_us,
        one.reserved_at_us,
        one.lease_expires_at_us,
        one.ended_at_us,
        one.outcome.value,
        one.state.value,
        one.error_type,
        one.error_message,
        one.payload_size,
    )


def job_row(job: JobRecord) -> tuple[Any, ...]:
    return (
        job.id,
        job.queue,
        job.type,
        job.state.value,
        job.key,
        job.idempotency_key,
        job.priority,
        job.run_at_us,
        job.created_at_us,
        job.attempts,
        job.stalls,
        job.fence,
        job.max_attempts,
        job.max_stalls,
        job.worker,
        job.reserved_at_us,
        job.expires_at_us,
        job.failed_at_us,
        job.finished_at_us,
        job.last_error,
        job.merged_into,
        job.codec,
        _encode(job.headers).decode() if job.headers else None,
        job.payload,
        job.result,
    )


def queue_row(one: QueueStats) -> tuple[Any, ...]:
    return (
        one.queue,
        *(one.counts[state] for state in JobState),
        one.done_total,
        one.dead_total,
        one.cancelled_total,
        one.head_run_at_us,
        one.settings.paused,
        one.settings.max_inflight,
        one.settings.failure_queue,
    )
