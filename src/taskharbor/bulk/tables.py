"""The tables as Arrow: their columns, and batches made of the driver contract's records.

Instants are microseconds in UTC. Order, types and nullability are binding: Spark takes Arrow batches as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import attrgetter
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from taskharbor.drivers.contract import QueueStats
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros, Outcome

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

_JOB_FIELDS = [
    *("id", "queue", "type", "state", "key", "idempotency_key", "priority", "run_at_us", "created_at_us"),
    *("attempts", "stalls", "fence", "max_attempts", "max_stalls", "worker", "reserved_at_us"),
    *("expires_at_us", "failed_at_us", "finished_at_us", "last_error", "merged_into", "codec", "headers"),
    *("payload", "result"),
]
_NAMES = {"expires_at_us": "lease_expires_at"}
"""Columns whose field in the record has another name. An instant's column has the name of the field without `_us`."""
_TYPES = {str: pa.string(), bytes: pa.binary(), int: pa.int32(), JobState: pa.string(), Outcome: pa.string()}
_LONG = {"seq", "fence"}

_encode_json = msgspec.json.Encoder().encode
_Reader: TypeAlias = Callable[[Any], Any]
"""A function that returns a column's value of a record."""


def _columns(record: type[msgspec.Struct], fields: Sequence[str]) -> tuple[pa.Schema, list[_Reader]]:
    """Make columns of a record's fields."""
    hints = get_type_hints(record)
    columns: list[pa.Field] = []
    readers: list[_Reader] = []
    for field in fields:
        kinds = get_args(hints[field]) or (hints[field],)
        is_instant = field.endswith("_us")
        kind = INSTANT if is_instant else pa.int64() if field in _LONG else _TYPES[kinds[0]]
        is_nullable = NoneType in kinds or field == "headers"
        columns.append(pa.field(_NAMES.get(field, field.removesuffix("_us")), kind, nullable=is_nullable))
        readers.append(attrgetter(f"{field}._value_" if issubclass(kinds[0], Enum) else field))
    return pa.schema(columns), readers


ATTEMPTS, _ATTEMPT_READERS = _columns(Attempt, Attempt.__struct_fields__)
JOBS, _JOB_READERS = _columns(JobRecord, _JOB_FIELDS)
_JOB_READERS[_JOB_FIELDS.index("headers")] = lambda job: (
    _encode_json(job.headers).decode() if job.headers else None
)
_COUNTS = (*(state.value for state in JobState), "done_total", "dead_total", "cancelled_total")
QUEUES = pa.schema(
    [
        pa.field("queue", pa.string(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in _COUNTS),
        pa.field("head_run_at", INSTANT),
        pa.field("paused", pa.bool_(), nullable=False),
        pa.field("max_inflight", pa.int32()),
        pa.field("failure_queue", pa.string()),
    ]
)

SCHEMAS: dict[Table, pa.Schema] = {"attempts": ATTEMPTS, "jobs": JOBS, "queues": QUEUES}


def attempts_batch(attempts: Sequence[Attempt]) -> pa.RecordBatch:
    return _batch("attempts", [list(map(read, attempts)) for read in _ATTEMPT_READERS])


def jobs_batch(jobs: Sequence[JobRecord]) -> pa.RecordBatch:
    return _batch("jobs", [list(map(read, jobs)) for read in _JOB_READERS])


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
