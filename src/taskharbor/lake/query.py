"""SQL over the lake by DuckDB, in this process and without Java, and an overview of the tables."""

from __future__ import annotations

from typing import IO

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from taskharbor.errors import InvalidRequest, MissingExtra
from taskharbor.lake.delta import Lake
from taskharbor.lake.tables import TABLES


class TableSummary(msgspec.Struct, kw_only=True):
    """A table as it is now."""

    name: str
    version: int
    run: int
    rows: int
    files: int
    bytes: int
    columns: dict[str, str]


def tables(lake: Lake) -> list[TableSummary]:
    """Describe the tables of the lake, without reading their rows."""
    found = []
    for table in lake.tables().values():
        assert table.delta is not None
        files, version = table.files(), table.delta.version()
        columns = {field.name: str(field.type.type) for field in table.delta.schema().fields}
        facts = {"rows": table.rows, "files": len(files), "bytes": sum(one.size for one in files)}
        found.append(TableSummary(name=table.name, version=version, run=table.run, columns=columns, **facts))
    return found


def sql(lake: Lake, query: str) -> pa.Table:
    """Return the result of a query over the tables, named like `silver.attempts`. Instants are in UTC.

    Raises InvalidRequest for a query that DuckDB refuses.
    """
    try:
        import duckdb
        import pytz  # noqa: F401
    except ImportError as error:
        raise MissingExtra("SQL over the lake needs DuckDB: pip install 'taskharbor[lake]'") from error
    there = lake.tables()
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for schema in {name.partition(".")[0] for name in TABLES}:
            connection.execute(f"CREATE SCHEMA {schema}")
        for name, table in there.items():
            assert table.delta is not None
            # Through Arrow: DuckDB's own reader of Delta tables is a download.
            registered = name.replace(".", "_")
            connection.register(registered, table.delta.to_pyarrow_dataset())
            connection.execute(f"CREATE VIEW {name} AS FROM {registered}")
        try:
            return connection.sql(query).to_arrow_table()
        except duckdb.Error as error:
            for table in there.values():
                table.check_files()
            missing = ", ".join(name for name in TABLES if name not in there)
            hint = f". The lake has no {missing}: `taskharbor pipeline run` makes them" if missing else ""
            raise InvalidRequest(
                f"DuckDB refuses the query: {str(error).partition(chr(10))[0]}{hint}"
            ) from None


def write_result(rows: pa.Table, kind: str, sink: IO[bytes]) -> None:
    """Write rows as `csv`, `parquet` or `json`, a list of objects."""
    if kind == "csv":
        pyarrow.csv.write_csv(rows, sink)
    elif kind == "parquet":
        pyarrow.parquet.write_table(rows, sink)
    else:
        sink.write(msgspec.json.encode(rows.to_pylist()) + b"\n")
