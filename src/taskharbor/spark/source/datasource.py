"""The entry of the data source, what a reader was told by `.option(...)`, a table as it is now, and the attempt log as it grows.

Spark makes a data source per read or write, in several processes, and asks it for what does the work. Options are checked before
anything runs; no message repeats the URL, which may hold a password. An offset of a stream is the log's own cursor, so a query
that is started again goes on where it was. Nothing is ever removed because Spark says that it is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, cast

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming import datasource as streams

from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.bulk.tables import SCHEMAS, Selection, Table
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobState, Micros, to_micros
from taskharbor.spark.session import require_shared_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType

StartingOffsets: TypeAlias = Literal["earliest", "latest"]

_BATCH = ("url", "table", "queue", "type", "state", "since", "until", "parallelism")
_STREAM = (*_BATCH, "startingOffsets", "maxRowsPerBatch")
_DEFAULT_PARALLELISM: dict[Table, int] = {
    "attempts": 8,
    # Jobs move between tables while they are read: one part is one snapshot.
    "jobs": 1,
    "queues": 1,
}


class TaskHarborDataSource(DataSource):
    """`spark.read.format("taskharbor").option("url", "postgresql://...").option("table", "attempts").load()`

    Reading takes the options `url`, `table` (attempts, jobs, queues), `queue`, `type`, `state`, `since`, `until` and
    `parallelism`; a stream also `startingOffsets` (earliest, latest) and `maxRowsPerBatch`.
    """

    @classmethod
    def name(cls) -> str:
        return "taskharbor"

    def schema(self) -> StructType:
        # Spark asks for this first, when the DataFrame is made, so wrong options are reported here.
        return _spark_schema(read_options(self.options))

    def reader(self, schema: StructType) -> TaskHarborReader:
        options = read_options(self.options)
        _check_schema(options, schema)
        return TaskHarborReader(options)

    def streamReader(self, schema: StructType) -> TaskHarborStreamReader:
        options = stream_options(self.options)
        _check_schema(options, schema)
        return TaskHarborStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from taskharbor.spark.source.writing import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from taskharbor.spark.source.writing import stream_writer

        return stream_writer(self.options, schema, overwrite)


def _spark_schema(options: ReadOptions) -> StructType:
    return from_arrow_schema(SCHEMAS[options.table], prefer_timestamp_ntz=False)


def _check_schema(options: ReadOptions, schema: StructType) -> None:
    if schema != _spark_schema(options):
        raise InvalidRequest(
            f"the table {options.table} has a schema of its own: leave out .schema(...), and select and cast afterwards"
        )


# -- options ---------------------------------------------------------------------------------------------------------


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    table: Table
    selection: Selection
    parallelism: int
    starting: StartingOffsets = "earliest"
    rows_per_batch: int | None = None

    def __repr__(self) -> str:
        return (
            f"ReadOptions(table={self.table!r}, selection={self.selection!r}, parallelism={self.parallelism})"
        )


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """For `spark.read`, and for as much of `spark.readStream` as Spark asks before it says which of the two it is."""
    _check_names(given, _STREAM)
    url = given.get("url", "")
    if "://" not in url:
        raise InvalidRequest(
            'say which store: .option("url", "postgresql://user@host/database") or sqlite:////path/to/jobs.db'
        )
    require_shared_store(url)
    table = given.get("table", "attempts")
    if table not in SCHEMAS:
        raise InvalidRequest(f"table={table!r}: choose one of {', '.join(SCHEMAS)}")
    selection = Selection(
        queue=given.get("queue"),
        type=given.get("type"),
        state=_state(given.get("state")),
        since_us=_instant("since", given.get("since")),
        until_us=_instant("until", given.get("until")),
    )
    if table == "queues" and selection != Selection(queue=selection.queue):
        raise InvalidRequest("the table queues can be restricted by the option queue, and by nothing else")
    starting = given.get("startingOffsets", "earliest")
    if starting not in ("earliest", "latest"):
        raise InvalidRequest(f"startingOffsets={starting!r}: choose earliest or latest")
    return ReadOptions(
        url=url,
        table=table,
        selection=selection,
        parallelism=_count("parallelism", given.get("parallelism")) or _DEFAULT_PARALLELISM[table],
        starting=cast(StartingOffsets, starting),
        rows_per_batch=_count("maxRowsPerBatch", given.get("maxRowsPerBatch")),
    )


def stream_options(given: Mapping[str, str]) -> ReadOptions:
    options = read_options(given)
    if options.table != "attempts":
        raise InvalidRequest(
            f"the table {options.table} cannot be read as a stream, because its rows change: read the stream of attempts, "
            "or read it anew with spark.read"
        )
    return options


def _check_names(given: Mapping[str, str], known: tuple[str, ...]) -> None:
    names = {name.lower() for name in known}
    unknown = sorted(name for name in given if name.lower() not in names)
    if unknown:
        raise InvalidRequest(
            f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}: known are {', '.join(known)}"
        )


def _state(value: str | None) -> JobState | None:
    if value is None:
        return None
    try:
        return JobState(value)
    except ValueError:
        raise InvalidRequest(f"state={value!r}: choose one of {', '.join(JobState)}") from None


def _instant(name: str, value: str | None) -> Micros | None:
    if value is None:
        return None
    try:
        when = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidRequest(
            f"{name}={value!r} is not a time: write it like 2026-01-31 or 2026-01-31T12:00:00+00:00"
        ) from None
    return to_micros(when if when.tzinfo is not None else when.replace(tzinfo=UTC))


def _count(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isdecimal() and 0 < int(value) < 2**31):
        raise InvalidRequest(f"{name}={value!r}: give a whole number above zero")
    return int(value)


# -- a table ---------------------------------------------------------------------------------------------------------


class TaskHarborReader(DataSourceReader):
    """A table as it is now: planned where the query is, read by the tasks. What a task is sent is a part without the URL."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with open_store(options.url) as store:
            parts = store.parts(options.table, options.selection, parallelism=options.parallelism)
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_part(self._options.url, partition)


def _read_part(url: str, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    with open_store(url) as store:
        yield from store.read(partition.value)


# -- the attempt log as a stream -------------------------------------------------------------------------------------


class Offset(TypedDict):
    """As Spark writes it into the checkpoint, in JSON."""

    cursor: str


class TaskHarborStreamReader(DataSourceStreamReader, streams.SupportsTriggerAvailableNow):
    """Spark keeps one of these in a process of its own for as long as the query runs and asks it how far the log goes; tasks in
    other processes read what it planned."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._opened: BulkStore | None = None
        self._target: str | None = None
        """The cursor at which a query with Trigger.AvailableNow ends, whatever is written meanwhile."""

    @property
    def _store(self) -> BulkStore:
        # Made when it is first needed: Spark sends copies of this object to tasks, which a connection would not survive.
        if self._opened is None:
            self._opened = open_store(self._options.url)
        return self._opened

    def initialOffset(self) -> Offset:  # type: ignore[override]
        store = self._store
        return {"cursor": store.start() if self._options.starting == "earliest" else store.latest()}

    def getDefaultReadLimit(self) -> streams.ReadLimit:
        rows = self._options.rows_per_batch
        return streams.ReadAllAvailable() if rows is None else streams.ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._store.latest()

    def latestOffset(self, start: Offset, limit: streams.ReadLimit) -> Offset:  # type: ignore[override]
        end = self._store.latest() if self._target is None else self._target
        rows = limit.max_rows if isinstance(limit, streams.ReadMaxRows) else None
        return {"cursor": self._store.limited(start["cursor"], end, rows=rows)}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:  # type: ignore[override]
        parts = self._store.between(start["cursor"], end["cursor"], parallelism=self._options.parallelism)
        return [
            InputPartition(msgspec.structs.replace(part, selection=self._options.selection)) for part in parts
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_part(self._options.url, partition)

    def stop(self) -> None:
        store, self._opened = self._opened, None
        if store is not None:
            store.close()
