"""The attempt log as it grows. An offset is the log's own cursor, so a query that is started again goes on where it was.

Spark keeps one of these in a process of its own for as long as the query runs and asks it how far the log goes; tasks in
other processes read what it planned. Nothing is ever removed because Spark says that it is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

import msgspec
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.spark.source.options import ReadOptions
from taskharbor.spark.source.reading import TablePart, read_part

if TYPE_CHECKING:
    import pyarrow as pa


class Offset(TypedDict):
    """As Spark writes it into the checkpoint, in JSON."""

    cursor: str


class TaskHarborStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._opened: BulkStore | None = None
        self._target: str | None = None
        """Where a query with Trigger.AvailableNow ends, whatever is written meanwhile."""

    @property
    def _store(self) -> BulkStore:
        # Made when it is first needed: Spark sends copies of this object to tasks, which a connection would not survive.
        if self._opened is None:
            self._opened = open_store(self._options.url)
        return self._opened

    def initialOffset(self) -> Offset:  # type: ignore[override]
        store = self._store
        return {"cursor": store.start() if self._options.starting == "earliest" else store.latest()}

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self._options.rows_per_batch
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._store.latest()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # type: ignore[override]
        end = self._store.latest() if self._target is None else self._target
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return {"cursor": self._store.limited(start["cursor"], end, rows=rows)}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:  # type: ignore[override]
        parts = self._store.between(start["cursor"], end["cursor"], parallelism=self._options.parallelism)
        return [TablePart(msgspec.structs.replace(part, selection=self._options.selection)) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(self._options.url, partition)

    def stop(self) -> None:
        store, self._opened = self._opened, None
        if store is not None:
            store.close()
