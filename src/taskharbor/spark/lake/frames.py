"""Tables of the lake as DataFrames, and DataFrames as files of the lake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from taskharbor.bulk.tables import ATTEMPTS, QUEUES
from taskharbor.errors import TaskHarborError
from taskharbor.lake.delta import Table
from taskharbor.lake.files import FACTS, File, read_files, write_files
from taskharbor.lake.tables import TABLES

ATTEMPT_COLUMNS: StructType = from_arrow_schema(ATTEMPTS)
QUEUE_COLUMNS: StructType = from_arrow_schema(QUEUES)
COLUMNS: dict[str, StructType] = {name: from_arrow_schema(schema) for name, schema in TABLES.items()}
FACT_COLUMNS: StructType = from_arrow_schema(FACTS)


class SchemaViolated(TaskHarborError):
    """A transformation made other columns than its table declares."""


def read(
    spark: SparkSession, table: Table, files: Sequence[File] | None = None, *, with_file: bool = False
) -> DataFrame:
    """Return the rows of these files, or of all. `with_file`: with a column `file`, the name of a row's file."""
    chosen = table.files() if files is None else files
    schema, place, name = COLUMNS[table.name], table.place, table.name
    with_name = StructType([*schema.fields, StructField("file", StringType())])
    names = with_name.names if with_file else schema.names
    if not chosen:
        return spark.createDataFrame([], with_name).select(*names)
    if place.is_folder:
        root = place.uri(name)
        # The schema is declared and not looked up, and Spark finds the date in the path, below the table's folder.
        reader = spark.read.schema(schema).option("basePath", root)
        rows = reader.parquet(*(f"{root}/{one.path}" for one in chosen))
        return (
            rows.select("*", F.col("_metadata.file_name").alias("file")).select(*names) if with_file else rows
        )

    def read_share(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from read_files([chosen[index] for index in batch.column(0).to_pylist()], place, name)

    tasks = min(len(chosen), 4 * spark.sparkContext.defaultParallelism)
    return spark.range(0, len(chosen), 1, tasks).mapInArrow(read_share, with_name).select(*names)


def write(frame: DataFrame, table: Table) -> list[File]:
    """Write the rows into files, which are no part of the table until they are committed."""
    rows = declared(frame, table.name)
    task = partial(write_files, place=table.place, table=table.name)
    return [File(**row.asDict()) for row in rows.mapInArrow(task, FACT_COLUMNS).collect()]


def declared(frame: DataFrame, table: str) -> DataFrame:
    """The frame with the columns of this table, in the declared order. Raises where one is missing, too many or of another type.

    Whether a column may be null is not compared: the tables give that up.
    """
    wanted = {field.name: field.dataType for field in COLUMNS[table]}
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
