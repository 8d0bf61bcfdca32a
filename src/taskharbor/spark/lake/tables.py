"""The tables of the lake and their columns, once: what is written, what is read, what transformations must produce.

All are Parquet and have `date` as their last column, by which they are laid out. `state.*` are kept between runs so that the
next one need not read the history again; they are nobody else's business.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, types
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DataType, StructField, StructType

from taskharbor.bulk.tables import ATTEMPTS, QUEUES
from taskharbor.errors import TaskHarborError

TEXT, LONG, INT = types.StringType(), types.LongType(), types.IntegerType()
REAL, INSTANT, DATE = types.DoubleType(), types.TimestampType(), types.DateType()

Columns = list[StructField]


class SchemaViolated(TaskHarborError):
    """A transformation made other columns than its table declares."""


def _all(kind: DataType, names: str) -> Columns:
    return [StructField(name, kind) for name in names.split()]


def _table(*columns: Columns) -> StructType:
    return StructType([field for group in columns for field in group] + _all(DATE, "date"))


ATTEMPT_COLUMNS: StructType = from_arrow_schema(ATTEMPTS)
QUEUE_COLUMNS: StructType = from_arrow_schema(QUEUES)

_CELL = _all(TEXT, "source queue type")
_TALLIES = _all(
    LONG,
    "arrivals starts completions failures retries expiries releases cancellations requeues finished busy_us",
)
_PERCENTILES = _all(LONG, "wait_p50_us wait_p95_us wait_p99_us run_p50_us run_p95_us run_p99_us")

TABLES: dict[str, StructType] = {
    "bronze.attempts": _table(
        ATTEMPT_COLUMNS.fields, _all(TEXT, "source"), _all(LONG, "run"), _all(INSTANT, "ingested_at")
    ),
    "bronze.queues": _table(
        QUEUE_COLUMNS.fields, _all(TEXT, "source"), _all(LONG, "run"), _all(INSTANT, "observed_at")
    ),
    "silver.attempts": _table(
        _all(TEXT, "source"),
        ATTEMPT_COLUMNS.fields,
        _all(LONG, "wait_us run_us"),
        _all(INSTANT, "valid_until"),
    ),
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
    "gold.minutes": _table(_CELL, _all(INSTANT, "minute"), _TALLIES, _PERCENTILES, _all(REAL, "concurrency")),
    "gold.hours": _table(_CELL, _all(INSTANT, "hour"), _TALLIES, _PERCENTILES, _all(REAL, "concurrency")),
    "gold.concurrency": _table(
        _all(TEXT, "source queue"),
        _all(INSTANT, "minute"),
        _all(LONG, "busy_us"),
        _all(REAL, "concurrency"),
        _all(INT, "max_inflight"),
        _all(REAL, "ratio"),
    ),
    "gold.backlog": _table(_all(TEXT, "source queue"), _all(INSTANT, "minute"), _all(LONG, "waiting")),
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
    # The minutes that one run adds. Never listed: they live as long as the run.
    "state.tallies": _table(_CELL, _all(INSTANT, "minute"), _TALLIES),
    # Waits and runs as histograms whose buckets grow by a constant factor, so that they add up over time and runs.
    "state.durations": _table(
        _CELL, _all(INSTANT, "minute"), _all(TEXT, "metric"), _all(INT, "bucket"), _all(LONG, "count")
    ),
    # By how much each day changed a queue's backlog: what a later day starts from.
    "state.backlog_days": _table(_all(TEXT, "source queue"), _all(LONG, "change")),
}

TALLY_NAMES: tuple[str, ...] = tuple(field.name for field in _TALLIES)
CELL_NAMES: tuple[str, ...] = tuple(field.name for field in _CELL)


def declared(frame: DataFrame, table: str) -> DataFrame:
    """The frame with the columns of this table, in the declared order. Raises where one is missing, too many or of another type.

    Whether a column may be null is not compared: Parquet gives that up anyway.
    """
    wanted = {field.name: field.dataType for field in TABLES[table]}
    given = {field.name: field.dataType for field in frame.schema}
    if wanted != given:
        problems = [f"{name} is missing" for name in wanted if name not in given]
        problems += [f"{name} is not declared" for name in given if name not in wanted]
        both = [name for name in wanted if given.get(name, wanted[name]) != wanted[name]]
        problems += [
            f"{name} is {given[name].simpleString()}, not {wanted[name].simpleString()}" for name in both
        ]
        raise SchemaViolated(f"the columns of {table} are not those of lake/tables.py: {'; '.join(problems)}")
    return frame.select(*wanted)
