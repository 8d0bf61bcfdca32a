"""The entry: Spark makes one of these per read or write, in several processes, and asks it for what does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import from_arrow_schema

from taskharbor.bulk.tables import SCHEMAS
from taskharbor.errors import InvalidRequest
from taskharbor.spark.source.options import ReadOptions, read_options, stream_options
from taskharbor.spark.source.reading import TaskHarborReader
from taskharbor.spark.source.streaming import TaskHarborStreamReader

if TYPE_CHECKING:
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
        # Spark asks this first, when the DataFrame is made: whatever is wrong with the options is said here.
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
