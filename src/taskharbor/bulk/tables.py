"""The tables as Arrow: their columns, and batches made of the driver contract's records.

Instants are microseconds in UTC. Order, types and nullability are binding: Spark takes Arrow batches as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from taskharbor.drivers.contract import QueueStats
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros

Table: TypeAlias = Literal["attempts", "jobs", "queues"]


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """A selection of rows. A field that is None does not restrict. Instants are `ended_at` (attempts) and `created_at` (jobs):
    from `since_us` on, and before `until_us`."""

    queue: str | None = None
    type: str | None = None
    state: JobState | None = None
    since_us: Micros | None = None
    until_us: Micros | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A share of a table that one task reads. Only the store that made it interprets `bounds`."""

    table: Table
    selection: Selection = Selection()
    bounds: dict[str, Any] = {}


INSTANT = pa.timestamp("us", tz="UTC")


def _schema(*fields: tuple[str, pa.DataType, bool]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=nullable) for name, kind, nullable in fields])


ATTEMPTS = _schema(
    ("seq", pa.int64(), False),
    ("job_id", pa.string(), False),
    ("queue", pa.string(), False),
    ("type", pa.string(), False),
    ("key", pa.string(), True),
    ("priority", pa.int32(), False),
    ("fence", pa.int64(), False),
    ("worker", pa.string(), True),
    ("created_at", INSTANT, False),
    ("run_at", INSTANT, False),
    ("reserved_at", INSTANT, True),
    ("lease_expires_at", INSTANT, True),
    ("ended_at", INSTANT, False),
    ("outcome", pa.string(), False),
    ("state", pa.string(), False),
    ("error_type", pa.string(), True),
    ("error_message", pa.string(), True),
    ("payload_size", pa.int32(), False),
)

JOBS = _schema(
    ("id", pa.string(), False),
    ("queue", pa.string(), False),
    ("type", pa.string(), False),
    ("state", pa.string(), False),
    ("key", pa.string(), True),
    ("idempotency_key", pa.string(), True),
    ("priority", pa.int32(), False),
    ("run_at", INSTANT, False),
    ("created_at", INSTANT, False),
    ("attempts", pa.int32(), False),
    ("stalls", pa.int32(), False),
    ("fence", pa.int64(), False),
    ("max_attempts", pa.int32(), False),
    ("max_stalls", pa.int32(), False),
    ("worker", pa.string(), True),
    ("reserved_at", INSTANT, True),
    ("lease_expires_at", INSTANT, True),
    ("failed_at", INSTANT, True),
    ("finished_at", INSTANT, True),
    ("last_error", pa.string(), True),
    ("merged_into", pa.string(), True),
    ("codec", pa.string(), False),
    ("headers", pa.string(), True),  # JSON
    ("payload", pa.binary(), False),
    ("result", pa.binary(), True),
)

QUEUES = _schema(
    ("queue", pa.string(), False),
    ("scheduled", pa.int64(), False),
    ("ready", pa.int64(), False),
    ("blocked", pa.int64(), False),
    ("inflight", pa.int64(), False),
    ("done", pa.int64(), False),
    ("dead", pa.int64(), False),
    ("cancelled", pa.int64(), False),
    ("done_total", pa.int64(), False),
    ("dead_total", pa.int64(), False),
    ("cancelled_total", pa.int64(), False),
    ("head_run_at", INSTANT, True),
    ("paused", pa.bool_(), False),
    ("max_inflight", pa.int32(), True),
    ("failure_queue", pa.string(), True),
)

SCHEMAS: dict[Table, pa.Schema] = {"attempts": ATTEMPTS, "jobs": JOBS, "queues": QUEUES}

_JOB_NAMES = {"lease_expires_at": "expires_at"}
"""Columns whose field in the record has another name."""
_encode_json = msgspec.json.Encoder().encode


def _columns(table: Table, names: dict[str, str]) -> list[Callable[[Any], Any]]:
    """Return the functions that read each column's value from a record."""
    return [
        attrgetter(names.get(one.name, one.name) + ("_us" if pa.types.is_timestamp(one.type) else ""))
        if one.name not in ("state", "outcome")
        else attrgetter(f"{one.name}._value_")
        for one in SCHEMAS[table]
    ]


_ATTEMPT_COLUMNS = _columns("attempts", {})
_JOB_COLUMNS = _columns("jobs", _JOB_NAMES)
_JOB_COLUMNS[JOBS.get_field_index("headers")] = lambda job: (
    _encode_json(job.headers).decode() if job.headers else None
)


def attempts_batch(attempts: Sequence[Attempt]) -> pa.RecordBatch:
    return _batch("attempts", [list(map(read, attempts)) for read in _ATTEMPT_COLUMNS])


def jobs_batch(jobs: Sequence[JobRecord]) -> pa.RecordBatch:
    return _batch("jobs", [list(map(read, jobs)) for read in _JOB_COLUMNS])


def queues_batch(queues: Iterable[QueueStats]) -> pa.RecordBatch:
    rows = [
        (
            one.queue, *(one.counts[state] for state in JobState), one.done_total, one.dead_total, one.cancelled_total,
            one.head_run_at_us, one.settings.paused, one.settings.max_inflight, one.settings.failure_queue,
        )
        for one in queues
    ]  # fmt: skip
    return _batch("queues", list(zip(*rows, strict=True)) if rows else [()] * len(QUEUES))


def _batch(table: Table, columns: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    kinds = [pa.int64() if pa.types.is_timestamp(field.type) else field.type for field in SCHEMAS[table]]
    return fitted(table, [pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True)])


def fitted(table: Table, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Put columns in the schema's order, and cast them if they differ. Whole numbers become instants without a copy."""
    schema = SCHEMAS[table]
    cast = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(cast, schema=schema)


def selected(batch: pa.RecordBatch, selection: Selection, instant: str) -> pa.RecordBatch:
    """Return the selected rows of a batch. `instant`: the column that `since_us` and `until_us` apply to."""
    if selection == Selection():
        return batch
    at = batch.column(instant).cast(pa.int64())
    wanted = [
        compare(column, value)
        for column, value, compare in (
            (batch.column("queue"), selection.queue, pc.equal),
            (batch.column("type"), selection.type, pc.equal),
            (batch.column("state"), selection.state and selection.state.value, pc.equal),
            (at, selection.since_us, pc.greater_equal),
            (at, selection.until_us, pc.less),
        )
        if value is not None
    ]
    return batch.filter(functools.reduce(pc.and_, wanted))
