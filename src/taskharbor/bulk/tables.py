"""The tables as Arrow: their columns, and batches made of the driver contract's records.

Instants are microseconds in UTC. Order, types and nullability are binding: Spark takes Arrow batches as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from taskharbor.drivers.contract import QueueStats
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros

Table: TypeAlias = Literal["attempts", "jobs", "queues"]


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows; a field that is None does not restrict. Instants are those of `ended_at` (attempts) and `created_at` (jobs):
    from `since_us` on, and before `until_us`."""

    queue: str | None = None
    type: str | None = None
    state: JobState | None = None
    since_us: Micros | None = None
    until_us: Micros | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A share of a table that one task reads. `bounds` means something to the store that made it, and to nobody else."""

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
"""Columns whose records have another name for it."""
_encode_json = msgspec.json.Encoder().encode


def _places(table: Table, record: type[Attempt] | type[JobRecord]) -> list[int]:
    """Of each column, the place of its field in the record."""
    fields = record.__struct_fields__
    names = _JOB_NAMES if record is JobRecord else {}
    return [
        fields.index(
            names.get(column.name, column.name) + ("_us" if pa.types.is_timestamp(column.type) else "")
        )
        for column in SCHEMAS[table]
    ]


_ATTEMPT_PLACES = _places("attempts", Attempt)
_JOB_PLACES = _places("jobs", JobRecord)
_HEADERS = JobRecord.__struct_fields__.index("headers")


def attempts_batch(attempts: Iterable[Attempt]) -> pa.RecordBatch:
    rows = list(zip(*map(msgspec.structs.astuple, attempts), strict=True))
    return _batch("attempts", [rows[place] for place in _ATTEMPT_PLACES])


def jobs_batch(jobs: Iterable[JobRecord]) -> pa.RecordBatch:
    rows: list[Sequence[Any]] = list(zip(*map(msgspec.structs.astuple, jobs), strict=True))
    rows[_HEADERS] = [_encode_json(headers).decode() if headers else None for headers in rows[_HEADERS]]
    return _batch("jobs", [rows[place] for place in _JOB_PLACES])


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
    """Columns in the schema's order, cast where they differ. Whole numbers become instants without being copied."""
    schema = SCHEMAS[table]
    cast = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(cast, schema=schema)


def selected(batch: pa.RecordBatch, selection: Selection, instant: str) -> pa.RecordBatch:
    """The rows of a batch that are selected. `instant`: the column that `since_us` and `until_us` mean."""
    at = batch.column(instant).cast(pa.int64())
    state = None if selection.state is None else selection.state.value
    conditions = [
        compare(batch.column(name), value)
        for name, value, compare in (
            ("queue", selection.queue, pc.equal),
            ("type", selection.type, pc.equal),
            ("state", state, pc.equal),
        )
        if value is not None
    ]
    conditions += [] if selection.since_us is None else [pc.greater_equal(at, selection.since_us)]
    conditions += [] if selection.until_us is None else [pc.less(at, selection.until_us)]
    if not conditions:
        return batch
    wanted = conditions[0]
    for condition in conditions[1:]:
        wanted = pc.and_(wanted, condition)
    return batch.filter(wanted)
