"""The tables of the lake and their columns, once: what is written, what is read, what transformations must produce.

All but `WHOLE` are partitioned by `date`. `state.*` are kept between runs so that the next one need not read the history
again; they are nobody else's business. A newer release may add columns, before the date, and never changes or removes one.
"""

from __future__ import annotations

import pyarrow as pa

from taskharbor.bulk.tables import ATTEMPTS, INSTANT, QUEUES

_KINDS = {
    **{"text": pa.string(), "long": pa.int64(), "int": pa.int32(), "real": pa.float64(), "instant": INSTANT},
    # A KLL sketch of Apache DataSketches, of whole numbers.
    "sketch": pa.binary(),
}


def _table(*columns: str | pa.Schema) -> pa.Schema:
    """Columns as `kind name name, kind name`, or those of another schema, and the date."""
    fields: list[pa.Field] = []
    for some in columns:
        if isinstance(some, str):
            groups = (group.split() for group in some.split(", "))
            fields += [pa.field(name, _KINDS[kind]) for kind, *names in groups for name in names]
        else:
            # Delta tables can be written by many engines: no column is promised to have a value.
            fields += [field.with_nullable(True) for field in some]
    return pa.schema([*fields, pa.field("date", pa.date32())])


CELL_NAMES = ("source", "queue", "type")
TALLY_NAMES = (
    *("arrivals", "starts", "completions", "failures", "retries", "expiries", "releases", "cancellations"),
    *("requeues", "finished", "busy_us"),
)
_CELL, _TALLIES = f"text {' '.join(CELL_NAMES)}", f"long {' '.join(TALLY_NAMES)}"
_MEASURED = (
    "long wait_p50_us wait_p95_us wait_p99_us run_p50_us run_p95_us run_p99_us, real concurrency, "
    "sketch wait_sketch run_sketch"
)
_TIMED = "long wait_us run_us, instant valid_until"

# The table with which a run begins: its commit says how far the log was read.
BRONZE = "bronze.attempts"

TABLES: dict[str, pa.Schema] = {
    BRONZE: _table(ATTEMPTS, "text source, long run, instant ingested_at"),
    "bronze.queues": _table(QUEUES, "text source, long run, instant observed_at"),
    "silver.attempts": _table("text source", ATTEMPTS, _TIMED),
    "quarantine.attempts": _table("text source", ATTEMPTS, _TIMED, "text reason"),
    # By the date on which the job was done or cancelled. All others have no date: a dead job may be requeued.
    "silver.lifecycles": _table(
        "text source job_id queue type key, int priority",
        "instant created_at first_run_at first_reserved_at last_ended_at finished_at, text state",
        "long executions done retried dead expired released cancelled merged requeued",
        "long first_wait_us total_wait_us total_run_us total_us max_fence last_seq",
        "text last_error_type last_error_message",
        # The run in which the job was first heard of: the only column that depends on how the log was cut into runs.
        "long first_seen_run",
    ),
    "gold.minutes": _table(_CELL, "instant minute", _TALLIES, _MEASURED),
    "gold.hours": _table(_CELL, "instant hour", _TALLIES, _MEASURED),
    "gold.queue_minutes": _table(
        "text source queue, instant minute, long waiting busy_us, real concurrency, int max_inflight, real ratio"
    ),
    "gold.workers": _table("text source worker, instant hour, long executions busy_us, real utilisation"),
    "gold.errors": _table(
        "text source queue type error_type fingerprint, long count, instant first_seen last_seen",
        "text sample_message sample_job",
    ),
    "gold.objectives": _table(
        "text source objective queue type kind, instant hour, long total bad, real target burn_rate"
    ),
    # By the date on which the job was created, or the tick was skipped.
    "gold.ticks": _table(
        "text source schedule generation made_by job_id outcome, instant nominal made actual",
        "long lateness_us made_lateness_us last_seq",
    ),
    # By how much each day changed a queue's backlog: what a later day starts from.
    "state.backlog_days": _table("text source queue, long change"),
}

# Small tables without partitions. They say something of all dates: a backlog goes on from days that are long gone.
WHOLE = ("gold.errors", "state.backlog_days")


def fitted(rows: pa.RecordBatch, table: str) -> pa.Table:
    """Return the rows with the table's columns, in its order. A column that they do not have is null."""
    schema = TABLES[table]
    there = pa.schema([field for field in schema if field.name in rows.schema.names])
    known = pa.Table.from_batches([rows]).select(there.names).cast(there)
    return pa.concat_tables([schema.empty_table(), known], promote_options="default")
