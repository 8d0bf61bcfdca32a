"""The entry of the data source, what a reader was told by `.option(...)`, a table as it is now, and the attempt log as it grows.

Spark makes a data source per read or write, in several processes, and asks it for what does the work. Options are checked before
anything runs; no message repeats the URL, which may hold a password. An offset of a stream is the log's own cursor, so a query
that is started again goes on where it was. Nothing is ever removed because Spark says that it is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming import datasource as streams

from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.bulk.tables import SCHEMAS, Selection, Table
from taskharbor.drivers.urls import Reader, choice, whole
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobState, Micros, to_micros
from taskharbor.spark.session import require_shared_store
from taskharbor.spark.source.writing import ENQUEUE, JobWriter, TriageWriter, mode_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType


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
        return read_options(self.options).schema()

    def _reading(self, schema: StructType) -> ReadOptions:
        """Raise InvalidRequest for a schema that somebody else made."""
        options = read_options(self.options)
        if schema != options.schema():
            raise InvalidRequest(
                f"the table {options.table} has a schema of its own: leave out .schema(...), and select and cast afterwards"
            )
        return options

    def reader(self, schema: StructType) -> TaskHarborReader:
        return TaskHarborReader(self._reading(schema))

    def streamReader(self, schema: StructType) -> TaskHarborStreamReader:
        options = self._reading(schema)
        if options.table != "attempts":
            raise InvalidRequest(
                f"the table {options.table} cannot be read as a stream, because its rows change: read the stream of attempts, "
                "or read it anew with spark.read"
            )
        return TaskHarborStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Every row becomes a job, or is an id of a job to requeue, cancel or purge."""
        mode, columns = mode_of(self.options, overwrite=overwrite), schema.fieldNames()
        if mode == ENQUEUE:
            return JobWriter(self.options, columns, is_stream=False)
        return TriageWriter(self.options["url"], mode, columns)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Every row becomes a job, once per query and batch."""
        if (mode := mode_of(self.options, overwrite=overwrite)) != ENQUEUE:
            raise InvalidRequest(f"mode={mode!r} is for df.write; in a stream use foreachBatch")
        return JobWriter(self.options, schema.fieldNames(), is_stream=True)


# -- options ---------------------------------------------------------------------------------------------------------


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The names of fields are those of options."""

    url: str
    table: Table = "attempts"
    selection: Selection = Selection()
    parallelism: int | None = None
    startingOffsets: Literal["earliest", "latest"] = "earliest"
    maxRowsPerBatch: int | None = None

    def __repr__(self) -> str:
        return f"ReadOptions(table={self.table!r}, selection={self.selection!r})"

    @property
    def tasks(self) -> int:
        # Jobs move between tables while they are read: one part is one snapshot.
        return self.parallelism or (8 if self.table == "attempts" else 1)

    def schema(self) -> StructType:
        return from_arrow_schema(SCHEMAS[self.table], prefer_timestamp_ntz=False)


def _instant(name: str, text: str) -> Micros:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"{name}={text!r} is not a time: write it like 2026-01-31 or 2026-01-31T12:00:00+00:00"
        ) from None
    return to_micros(when if when.tzinfo is not None else when.replace(tzinfo=UTC))


_SELECTING = {"queue": "queue", "type": "type", "state": "state", "since": "since_us", "until": "until_us"}
_COUNT = whole(1, 2**31 - 1)
_READERS: dict[str, Reader] = {
    **dict.fromkeys(("url", "queue", "type"), lambda name, text: text),
    "table": choice(*SCHEMAS),
    "state": choice(*JobState),
    **dict.fromkeys(("since", "until"), _instant),
    "parallelism": _COUNT,
    # Of streams. Spark asks for a schema before it says which of the two it is.
    "startingOffsets": choice("earliest", "latest"),
    "maxRowsPerBatch": _COUNT,
}


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Check the options of `spark.read` and `spark.readStream`."""
    known = {name.lower() for name in _READERS}
    unknown = sorted(name for name in given if name.lower() not in known)
    if unknown:
        raise InvalidRequest(f"unknown option {', '.join(unknown)}: known are {', '.join(_READERS)}")
    if "://" not in given.get("url", ""):
        raise InvalidRequest(
            'say which store: .option("url", "postgresql://user@host/database") or sqlite:////path/to/jobs.db'
        )
    require_shared_store(given["url"])
    found = {name: read(name, given[name]) for name, read in _READERS.items() if name in given}
    selecting = {field: found.pop(name) for name, field in _SELECTING.items() if name in found}
    options = msgspec.convert({**found, "selection": selecting}, ReadOptions)
    if options.table == "queues" and options.selection != Selection(queue=options.selection.queue):
        raise InvalidRequest("the table queues can be restricted by the option queue, and by nothing else")
    return options


# -- a table ---------------------------------------------------------------------------------------------------------


class TaskHarborReader(DataSourceReader):
    """A table as it is now: planned where the query is, read by the tasks. What a task is sent is a part without the URL."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with open_store(options.url) as store:
            parts = store.parts(options.table, options.selection, parallelism=options.tasks)
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with open_store(self._options.url) as store:
            yield from store.read(partition.value)


# -- the attempt log as a stream -------------------------------------------------------------------------------------


# As Spark writes it into the checkpoint, in JSON.
Offset: TypeAlias = dict[Literal["cursor"], str]


class TaskHarborStreamReader(DataSourceStreamReader, streams.SupportsTriggerAvailableNow):
    """Spark keeps one of these in a process of its own for as long as the query runs and asks it how far the log goes; tasks in
    other processes read what it planned."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        # The cursor at which a query with Trigger.AvailableNow ends, whatever is written meanwhile.
        self._target: str | None = None

    @cached_property
    def _store(self) -> BulkStore:
        # Made when it is first needed: Spark sends copies of this object to tasks, which a connection would not survive.
        return open_store(self._options.url)

    def initialOffset(self) -> Offset:
        store = self._store
        return {"cursor": store.start() if self._options.startingOffsets == "earliest" else store.latest()}

    def getDefaultReadLimit(self) -> streams.ReadLimit:
        rows = self._options.maxRowsPerBatch
        return streams.ReadAllAvailable() if rows is None else streams.ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._store.latest()

    def latestOffset(self, start: Offset, limit: streams.ReadLimit) -> Offset:
        end = self._store.latest() if self._target is None else self._target
        rows = limit.max_rows if isinstance(limit, streams.ReadMaxRows) else None
        return {"cursor": self._store.limited(start["cursor"], end, rows=rows)}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        selection = self._options.selection
        parts = self._store.between(start["cursor"], end["cursor"], parallelism=self._options.tasks)
        return [InputPartition(msgspec.structs.replace(part, selection=selection)) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return TaskHarborReader(self._options).read(partition)

    def stop(self) -> None:
        self._store.close()
