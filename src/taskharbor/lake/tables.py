"""The tables of the lake and their columns, once: what is written, what is read, what transformations must produce.

All but `WHOLE` are partitioned by `date`. `state.*` are kept between runs so that the next one need not read the history
again; they are nobody else's business. A newer release may add columns, before the date, and never changes or removes one.
"""

from __future__ import annotations

import pyarrow as pa

from taskharbor.bulk.tables import ATTEMPTS, INSTANT, QUEUES

TEXT, LONG, INT, REAL = pa.string(), pa.int64(), pa.int32(), pa.float64()
# A KLL sketch of Apache DataSketches, of whole numbers.
SKETCH = pa.binary()

Columns = list[pa.Field]


def _all(kind: pa.DataType, names: str) -> Columns:
    return [pa.field(name, kind) for name in names.split()]


def _table(*columns: Columns) -> pa.Schema:
    # Delta tables can be written by many engines: no column is promised to have a value.
    fields = [field.with_nullable(True) for group in columns for field in group]
    return pa.schema([*fields, pa.field("date", pa.date32())])


_CELL = _all(TEXT, "source queue type")
_TALLIES = _all(
    LONG,
    "arrivals starts completions failures retries expiries releases cancellations requeues finished busy_us",
)
_PERCENTILES = _all(LONG, "wait_p50_us wait_p95_us wait_p99_us run_p50_us run_p95_us run_p99_us")
_SKETCHES = _all(SKETCH, "wait_sketch run_sketch")

_REFINED = [
    *_all(TEXT, "source"),
    *ATTEMPTS,
    *_all(LONG, "wait_us run_us"),
    *_all(INSTANT, "valid_until"),
]

# The table with which a run begins: its commit says how far the log was read.
BRONZE = "bronze.attempts"

TABLES: dict[str, pa.Schema] = {
    BRONZE: _table(list(ATTEMPTS), _all(TEXT, "source"), _all(LONG, "run"), _all(INSTANT, "ingested_at")),
    "bronze.queues": _table(
        list(QUEUES), _all(TEXT, "source"), _all(LONG, "run"), _all(INSTANT, "observed_at")
    ),
    "silver.attempts": _table(_REFINED),
    "quarantine.attempts": _table(_REFINED, _all(TEXT, "reason")),
    # By the date on which the job was done or cancelled. All others have no date: a dead job may be requeued.
    "silver.lifecycles": _table(
        _all(TEXT, "source job_id queue type key"),
        _all(INT, "priority"),
        _all(INSTANT, "created_at first_run_at first_reserved_at last_ended_at finished_at"),
        _all(TEXT, "state"),
        _all(LONG, "executions done retried dead expired released cancelled merged requeued"),
        _all(LONG, "first_wait_us total_wait_us total_run_us total_us max_fence last_seq"),
        _all(TEXT, "last_error_type last_error_message"),
        # The run in which the job was first heard of: the only column that depends on how the log was cut into runs.
        _all(LONG, "first_seen_run"),
    ),
    "gold.minutes": _table(
        _CELL, _all(INSTANT, "minute"), _TALLIES, _PERCENTILES, _all(REAL, "concurrency"), _SKETCHES
    ),
    "gold.hours": _table(
        _CELL, _all(INSTANT, "hour"), _TALLIES, _PERCENTILES, _all(REAL, "concurrency"), _SKETCHES
    ),
    "gold.queue_minutes": _table(
        _all(TEXT, "source queue"),
        _all(INSTANT, "minute"),
        _all(LONG, "waiting busy_us"),
        _all(REAL, "concurrency"),
        _all(INT, "max_inflight"),
        _all(REAL, "ratio"),
    ),
    "gold.workers": _table(
        _all(TEXT, "source worker"),
        _all(INSTANT, "hour"),
        _all(LONG, "executions busy_us"),
        _all(REAL, "utilisation"),
    ),
    "gold.errors": _table(
        _all(TEXT, "source queue type error_type fingerprint"),
        _all(LONG, "count"),
        _all(INSTANT, "first_seen last_seen"),
        _all(TEXT, "sample_message sample_job"),
    ),
    "gold.objectives": _table(
        _all(TEXT, "source objective queue type kind"),
        _all(INSTANT, "hour"),
        _all(LONG, "total bad"),
        _all(REAL, "target burn_rate"),
    ),
    # By how much each day changed a queue's backlog: what a later day starts from.
    "state.backlog_days": _table(_all(TEXT, "source queue"), _all(LONG, "change")),
}

# Small tables without partitions. They say something of all dates: a backlog goes on from days that are long gone.
WHOLE = ("gold.errors", "state.backlog_days")

TALLY_NAMES: tuple[str, ...] = tuple(field.name for field in _TALLIES)
CELL_NAMES: tuple[str, ...] = tuple(field.name for field in _CELL)


def fitted(rows: pa.RecordBatch, table: str) -> pa.Table:
    """Return the rows with the table's columns, in its order. A column that they do not have is null."""
    schema = TABLES[table]
    whole = pa.concat_tables(
        [schema.empty_table(), pa.Table.from_batches([rows])], promote_options="permissive"
    )
    return whole.select(schema.names).cast(schema)
