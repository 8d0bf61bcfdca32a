"""Parquet files of a table: written by tasks, each into files of its own, and read by tasks.

A task writes one file per date and gives back what a commit needs to know of it. Files that no commit names, from tasks that
were lost or ran twice, are nothing to a reader, and vacuum removes them.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from taskharbor.lake.storage import LakePlace
from taskharbor.lake.tables import TABLES, WHOLE, fitted

# Rows of a row group at most.
_GROUP_ROWS = 128 * 1024
# A task writes what it holds for its files from this size on. So the row groups of many files are smaller.
_HELD_BYTES = 32 * 2**20
NO_DATE = "__HIVE_DEFAULT_PARTITION__"
FACTS = pa.schema(
    {"path": pa.string(), "date": pa.date32(), "rows": pa.int64(), "size": pa.int64(), "stats": pa.string()}
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
    filesystem, is_whole = place.filesystem(table), table in WHOLE
    # The date is in the commit, and for engines that look there in the path.
    schema = pa.schema(list(TABLES[table])[: None if is_whole else -1])
    opened: dict[date | None, _Open] = {}
    for rows in _gathered(batches, table):
        days = [None] if is_whole else pc.unique(rows["date"]).to_pylist()
        for day in days:
            if day not in opened:
                folder = "" if is_whole else f"date={day.isoformat() if day else NO_DATE}"
                if place.is_folder:
                    os.makedirs(os.path.join(place.uri(table), folder), exist_ok=True)
                path = os.path.join(folder, f"part-{secrets.token_hex(10)}.zstd.parquet")
                opened[day] = _Open(path, filesystem.open_output_stream(path), schema)
            wanted = pa.array([day], pa.date32())
            opened[day].write(rows if len(days) == 1 else rows.filter(pc.is_in(rows["date"], wanted)))
        # Not kept while the next rows are gathered: a task would hold twice as much.
        del rows
    found = [file.close(day)._asdict() for day, file in opened.items()]
    yield pa.RecordBatch.from_pylist(found, schema=FACTS)


def _gathered(batches: Iterable[pa.RecordBatch], table: str) -> Iterator[pa.Table]:
    """The rows as the table has them, together as far as they may be held."""
    held: list[pa.Table] = []
    size = 0
    for batch in batches:
        held.append(fitted(batch, table))
        size += held[-1].nbytes
        if size > _HELD_BYTES:
            yield pa.concat_tables(held)
            held, size = [], 0
    if held:
        yield pa.concat_tables(held)


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


def counted(files: Sequence[File], place: LakePlace, table: str, column: str) -> Counter[str]:
    """Count the rows of the files by the value of a column."""
    found: Counter[str] = Counter()
    for batch in read_files(files, place, table, [column]):
        found.update({one["values"]: one["counts"] for one in pc.value_counts(batch[column]).to_pylist()})
    return found


class _Open:
    """A file that is being written."""

    def __init__(self, path: str, sink: Any, schema: pa.Schema) -> None:
        self._path, self._sink, self._names = path, sink, schema.names
        self._facts: list[Any] = []
        self._writer = parquet.ParquetWriter(sink, schema, compression="zstd", metadata_collector=self._facts)

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows.select(self._names), _GROUP_ROWS)

    def close(self, day: date | None) -> File:
        self._writer.close()
        size = self._sink.tell()
        self._sink.close()
        (metadata,) = self._facts
        return File(self._path, day, metadata.num_rows, size, _statistics(metadata))


# The most characters of a bound of texts, and a text that comes after all others.
_LONGEST_BOUND = 64
_LAST = "\U0010ffff"


def _statistics(metadata: Any) -> str:
    """Return the count and the bounds as Delta writes them. Readers take a missing bound for null, and find nothing."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            name, found = column.path_in_schema, column.statistics
            if found is None:
                continue
            nulls[name] = nulls.get(name, 0) + found.null_count
            least: Any = found.min if found.has_min_max else None
            most: Any = found.max if found.has_min_max else None
            if found.num_values and found.logical_type.type == "STRING":
                # Parquet leaves out long bounds.
                least, most = (least or "")[:_LONGEST_BOUND], _LAST if most is None else most
                most = most if len(most) <= _LONGEST_BOUND else most[:_LONGEST_BOUND] + _LAST
            if isinstance(least, int | float | date | str):
                low[name] = min(low.get(name, least), least)
                high[name] = max(high.get(name, most), most)
    written = {"numRecords": metadata.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}
    return msgspec.json.encode(written).decode()
