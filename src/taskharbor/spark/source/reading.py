"""A table as it is now: planned where the query is, read by the tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from taskharbor.bulk.store import open_store
from taskharbor.bulk.tables import Part
from taskharbor.spark.source.options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa


class TablePart(InputPartition):
    """What one task reads. Goes from process to process, so it is plain data, and without the URL."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)

    @property
    def part(self) -> Part:
        part: Part = self.value
        return part


class TaskHarborReader(DataSourceReader):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        with open_store(self._options.url) as store:
            parts = store.parts(
                self._options.table, self._options.selection, parallelism=self._options.parallelism
            )
        return [TablePart(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(self._options.url, partition)


def read_part(url: str, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, TablePart)
    with open_store(url) as store:
        yield from store.read(partition.part)
