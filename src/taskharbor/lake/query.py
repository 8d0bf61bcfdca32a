"""SQL over the lake by DuckDB, in this process and without Java, and an overview of the tables."""

from __future__ import annotations

import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Any

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.fs as pafs
import pyarrow.parquet
from deltalake.fs import DeltaStorageHandler

from taskharbor.errors import InvalidRequest, MissingExtra
from taskharbor.lake.delta import Lake, Table
from taskharbor.lake.tables import TABLES

# Seconds in which an object store answers, or never.
_LAST_READS = 60.0


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
    """Return the result of a query over the tables, named like `silver.attempts`. Instants are in UTC. Columns of one name get
    numbers.

    Raises InvalidRequest for a query that DuckDB refuses.
    """
    there = lake.tables()
    scans: list[Any] = []
    # It is in C: a thread that says so runs no line of Python any more, in which it could be when Python ends.
    over: SimpleQueue[Any] = SimpleQueue()
    try:
        with _duckdb() as connection:
            for schema in {name.partition(".")[0] for name in TABLES}:
                connection.execute(f"CREATE SCHEMA {schema}")
            for name, table in there.items():
                # Through Arrow: DuckDB's own reader of Delta tables is a download.
                registered = name.replace(".", "_")
                connection.register(registered, _dataset(table, scans, over))
                connection.execute(f"CREATE VIEW {name} AS FROM {registered}")
            return _answer(connection, query, there)
    finally:
        with suppress(Empty):
            for _ in scans:
                over.get(timeout=_LAST_READS)


def _answer(connection: Any, query: str, there: dict[str, Table]) -> pa.Table:
    from duckdb import Error

    try:
        if (found := connection.sql(query)) is None:
            raise InvalidRequest("there is no query: write one like SELECT count(*) FROM silver.attempts")
        return found.query("answer", "FROM answer").to_arrow_table()
    except Error as error:
        for table in there.values():
            table.check_files()
        missing = ", ".join(name for name in TABLES if name not in there)
        hint = f". The lake has no {missing}: `taskharbor pipeline run` makes them" if missing else ""
        raise InvalidRequest(f"DuckDB refuses the query: {str(error).partition(chr(10))[0]}{hint}") from None


def _duckdb() -> Any:
    try:
        import duckdb
        import pytz  # noqa: F401
    except ImportError as error:
        raise MissingExtra("SQL over the lake needs DuckDB: pip install 'taskharbor[lake]'") from error
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def _dataset(table: Table, scans: list[Any], over: SimpleQueue[Any]) -> Any:
    """The rows of a table. `over` gets an entry when no thread of Arrow reads them any more."""
    assert table.delta is not None
    if table.place.is_folder:
        # Arrow's own files call no Python.
        return table.delta.to_pyarrow_dataset(filesystem=table.place.filesystem(table.name))
    handler = _Files(table.place.uri(table.name), table.place.options)
    scans.append(weakref.ref(handler, over.put))
    return table.delta.to_pyarrow_dataset(filesystem=pafs.PyFileSystem(handler))


class _Files(DeltaStorageHandler):
    """Files that Arrow's threads read through Python. It lives as long as one of them may do that.

    A query with a LIMIT ends before they do. A thread that still reads when Python ends crashes the process, or hangs it.
    """

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(_File(self, self._handler.open_input_file(path)), "r")


class _File:
    def __init__(self, files: _Files, file: Any) -> None:
        self._files, self._file = files, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def write_result(rows: pa.Table, kind: str, sink: IO[bytes]) -> None:
    """Write rows as `csv`, `parquet` or `json`, a list of objects. Bytes are Base64 in JSON, and in CSV as DuckDB writes them."""
    if kind == "csv":
        with _duckdb() as connection:
            # Arrow's CSV knows neither bytes nor lists.
            texts = connection.from_arrow(rows).select("COLUMNS(*)::VARCHAR").to_arrow_table()
        for place, one in enumerate(rows.schema):
            if pa.types.is_nested(one.type) or pa.types.is_binary(one.type):
                rows = rows.set_column(place, one.name, texts[place])
        pyarrow.csv.write_csv(rows, sink)
    elif kind == "parquet":
        pyarrow.parquet.write_table(rows, sink)
    else:
        sink.write(msgspec.json.encode(rows.to_pylist()) + b"\n")
