"""Parquet files of a table: written by tasks, each into files of its own, and read by tasks.

A task writes one file per date and gives back what a commit needs to know of it. Files that no commit names, from tasks that
were lost or ran twice, are nothing to a reader, and vacuum removes them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date, datetime
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from taskharbor.lake.storage import LakePlace
from taskharbor.lake.tables import TABLES, WHOLE, fitted

_GROUP_ROWS = 128 * 1024
"""Rows of a row group, if the files of a task are few."""
_HELD_BYTES = 64 * 2**20
"""Above this size, what a task holds for its files is written, however small the row groups become."""
NO_DATE = "__HIVE_DEFAULT_PARTITION__"
FACTS = pa.schema(
    [
        pa.field("path", pa.string()),
        pa.field("date", pa.date32()),
        pa.field("rows", pa.int64()),
        pa.field("size", pa.int64()),
        pa.field("stats", pa.string()),
    ]
)


class File(NamedTuple):
    """A file of a table. `path` is relative to the table; `stats` are Delta's statistics in JSON, where they are new."""

    path: str
    date: date | None
    rows: int
    size: int
    stats: str = ""


def write_files(batches: Iterable[pa.RecordBatch], place: LakePlace, table: str) -> Iterator[pa.RecordBatch]:
    """Write all rows, and yield a row of `FACTS` for each file."""
    writer = _TaskFiles(place, table)
    for batch in batches:
        writer.add(fitted(batch, table))
    found = writer.close()
    yield pa.RecordBatch.from_pylist([one._asdict() for one in found], schema=FACTS)


def write_table(rows: pa.Table, place: LakePlace, table: str) -> list[File]:
    """Write a small table."""
    return [
        File(**one) for batch in write_files(rows.to_batches(), place, table) for one in batch.to_pylist()
    ]


def read_files(
    files: Sequence[File], place: LakePlace, table: str, columns: Collection[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the files, and in a last column `file` the name of the file that each comes from. Columns that are not
    asked for are null."""
    filesystem = place.filesystem(table)
    for file in files:
        with filesystem.open_input_file(file.path) as source:
            for batch in parquet.ParquetFile(source).iter_batches(columns=columns):
                rows = fitted(batch, table)
                if table not in WHOLE:
                    day = pa.array([file.date] * rows.num_rows, pa.date32())
                    rows = rows.set_column(rows.num_columns - 1, "date", day)
                name = pa.array([os.path.basename(file.path)] * rows.num_rows)
                yield from rows.append_column("file", name).to_batches()


class _TaskFiles:
    def __init__(self, place: LakePlace, table: str) -> None:
        self._filesystem = place.filesystem(table)
        self._root = place.uri(table) if place.is_folder else None
        self._is_whole = table in WHOLE
        fields = list(TABLES[table])
        # The date is in the commit, and for engines that look there in the path.
        self._schema = pa.schema(fields if self._is_whole else fields[:-1])
        self._open: dict[date | None, _Open] = {}
        self._held = 0

    def add(self, rows: pa.Table) -> None:
        days = [None] if self._is_whole else pc.unique(rows["date"]).to_pylist()
        for day in days:
            same = rows
            if len(days) > 1:
                is_same = pc.is_null(rows["date"]) if day is None else pc.equal(rows["date"], day)
                same = rows.filter(pc.fill_null(is_same, False))
            file = self._open.get(day) or self._create(day)
            file.held.append(same.select(self._schema.names))
            file.held_rows += same.num_rows
            self._held += same.nbytes
            if file.held_rows >= _GROUP_ROWS:
                self._held -= file.flush()
        if self._held > _HELD_BYTES:
            self._held -= sum(file.flush() for file in self._open.values())

    def close(self) -> list[File]:
        return [file.close(day) for day, file in self._open.items()]

    def _create(self, day: date | None) -> _Open:
        folder = "" if self._is_whole else f"date={day.isoformat() if day else NO_DATE}"
        path = os.path.join(folder, f"part-{secrets.token_hex(10)}.zstd.parquet")
        if self._root is not None:
            os.makedirs(os.path.join(self._root, folder), exist_ok=True)
        self._open[day] = file = _Open(path, self._filesystem.open_output_stream(path), self._schema)
        return file


class _Open:
    """A file that is being written, and the rows that it does not have yet."""

    def __init__(self, path: str, sink: Any, schema: pa.Schema) -> None:
        self.path = path
        self.held: list[pa.Table] = []
        self.held_rows = 0
        self._sink = sink
        self._written: list[Any] = []
        self._writer = parquet.ParquetWriter(
            sink, schema, compression="zstd", metadata_collector=self._written
        )

    def flush(self) -> int:
        """Write what is held; its size in memory."""
        size: int = sum(rows.nbytes for rows in self.held)
        if self.held:
            self._writer.write_table(pa.concat_tables(self.held))
        self.held, self.held_rows = [], 0
        return size

    def close(self, day: date | None) -> File:
        self.flush()
        self._writer.close()
        size = self._sink.tell()
        self._sink.close()
        (metadata,) = self._written
        return File(self.path, day, metadata.num_rows, size, _statistics(metadata))


def _statistics(metadata: Any) -> str:
    """Return the count, and the bounds of whole numbers and instants, as Delta writes them."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            name, found = column.path_in_schema, column.statistics
            if found is None:
                continue
            nulls[name] = nulls.get(name, 0) + found.null_count
            if found.has_min_max and isinstance(found.min, int | datetime):
                low[name] = min(low.get(name, found.min), found.min)
                high[name] = max(high.get(name, found.max), found.max)
    written = {
        "numRecords": metadata.num_rows,
        "minValues": {name: _text(value) for name, value in low.items()},
        "maxValues": {name: _text(value) for name, value in high.items()},
        "nullCount": nulls,
    }
    return msgspec.json.encode(written).decode()


def _text(value: int | datetime) -> int | str:
    return (
        value if isinstance(value, int) else f"{value.replace(tzinfo=None).isoformat('T', 'microseconds')}Z"
    )
