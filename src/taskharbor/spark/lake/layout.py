"""The folders of the lake's tables, reading them, and changes to several tables that take effect as one.

    LAKE/silver/attempts/write=00000042-5f2c81d0/date=2026-01-31/part-….parquet
    LAKE/_lake/manifest-00000042.json

Files are never changed once written. A `Change` writes new directories, which nobody sees until its manifest lists them. A crash
before that leaves directories that no manifest lists, and `vacuum` removes those.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import pyarrow.parquet as parquet

from taskharbor.errors import InvalidRequest
from taskharbor.spark.lake.manifests import Directory, Manifest, commit, newest
from taskharbor.spark.lake.tables import TABLES, declared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Dates: TypeAlias = Collection[date] | None
"""None: all of them."""
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as each step begins: its name, its number from 0, and how many there are."""


class Lake:
    """The tables below one folder, which all machines of the cluster must reach under the same path."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    def manifest(self) -> Manifest:
        """Return the newest manifest."""
        return newest(self.path)

    def dates(self, table: str) -> list[date]:
        """The dates of which the table has rows, in order."""
        return sorted(date.fromisoformat(day) for day in self.manifest().tables.get(table, {}))

    def read(
        self, spark: SparkSession, table: str, dates: Dates = None, *, manifest: Manifest | None = None
    ) -> DataFrame:
        """Return the rows that the newest manifest (or the given one) lists; only of `dates` if some are given."""
        if table not in TABLES:
            raise InvalidRequest(f"the lake has no table {table!r}: it has {', '.join(TABLES)}")
        by_date = (self.manifest() if manifest is None else manifest).tables.get(table, {})
        wanted = set(by_date) if dates is None else {day.isoformat() for day in dates}
        paths = [one.path for day in sorted(wanted & set(by_date)) for one in by_date[day]]
        return self.read_paths(spark, table, paths)

    def read_paths(self, spark: SparkSession, table: str, paths: Iterable[str]) -> DataFrame:
        schema = TABLES[table]
        absolute = [str(self.path / path) for path in paths]
        if not absolute:
            return spark.createDataFrame([], schema)
        # The schema is declared and not looked up, and Spark finds the date in the path, below the table's folder.
        reader = spark.read.schema(schema).option("basePath", str(self.path / folder_of(table)))
        return reader.parquet(*absolute).select(*schema.names)

    def begin(self, made_by: str) -> Change:
        return Change(self, made_by)


class Change:
    """The changes of one run to the lake. The run sees its own writes; others see them after `commit`."""

    def __init__(self, lake: Lake, made_by: str) -> None:
        self.lake = lake
        self.manifest = lake.manifest()
        self.manifest.number += 1
        self.manifest.run += made_by == "run"
        self.manifest.made_by = made_by
        self.written: dict[str, int] = {}
        """Rows written, by table."""
        self._scratch: list[Written] = []

    def read(self, spark: SparkSession, table: str, dates: Dates = None) -> DataFrame:
        return self.lake.read(spark, table, dates, manifest=self.manifest)

    def append(self, table: str, rows: DataFrame) -> Written:
        """Add rows to the table."""
        written = self.stage(table, rows)
        by_date = self.manifest.tables.setdefault(table, {})
        for day, directory in written.by_date.items():
            by_date.setdefault(day, []).append(directory)
        return written

    def replace(self, table: str, rows: DataFrame, dates: Dates = None) -> Written:
        """Put these rows in the place of all rows of these dates; of the whole table where no dates are given."""
        written = self.stage(table, rows)
        by_date = self.manifest.tables.setdefault(table, {})
        for day in list(by_date) if dates is None else [one.isoformat() for one in dates]:
            by_date.pop(day, None)
        for day, directory in written.by_date.items():
            if day in by_date:
                raise AssertionError(f"rows of {day} in a replacement of other dates of {table}")
            by_date[day] = [directory]
        return written

    def stage(self, table: str, rows: DataFrame) -> Written:
        """Write rows that no manifest lists."""
        name = f"{folder_of(table)}/write={self.manifest.number:08d}-{secrets.token_hex(4)}"
        target = self.lake.path / name
        declared(rows, table).write.partitionBy("date").option("compression", "zstd").parquet(str(target))
        written = Written(table, name, _directories(self.lake.path, name))
        self.written[table] = self.written.get(table, 0) + written.rows
        return written

    def scratch(self, table: str, rows: DataFrame) -> Written:
        """Write rows that only this change needs."""
        written = self.stage(table, rows)
        self._scratch.append(written)
        return written

    def sweep(self) -> None:
        """Remove files that only this change needed. If this is missed, vacuum removes them."""
        for written in self._scratch:
            shutil.rmtree(self.lake.path / written.name, ignore_errors=True)

    def commit(self) -> Manifest:
        self.manifest.made_at = datetime.now(UTC).isoformat(timespec="microseconds")
        self.manifest.tables = {table: days for table, days in self.manifest.tables.items() if days}
        commit(self.lake.path, self.manifest)
        return self.manifest


class Written(NamedTuple):
    """The directories that one write made, by date."""

    table: str
    name: str
    by_date: dict[str, Directory]

    @property
    def rows(self) -> int:
        return sum(directory.rows for directory in self.by_date.values())

    @property
    def dates(self) -> list[date]:
        return sorted(map(date.fromisoformat, self.by_date))

    @property
    def paths(self) -> list[str]:
        return [directory.path for directory in self.by_date.values()]


def folder_of(table: str) -> str:
    return table.replace(".", "/")


def _directories(lake: Path, name: str) -> dict[str, Directory]:
    """Look at what Spark wrote: the dates, and from the files' own footers how many rows there are."""
    found: dict[str, Directory] = {}
    for folder in sorted((lake / name).glob("date=*")):
        files = sorted(folder.glob("*.parquet"))
        found[folder.name.removeprefix("date=")] = Directory(
            path=f"{name}/{folder.name}",
            rows=sum(parquet.read_metadata(file).num_rows for file in files),
            bytes=sum(file.stat().st_size for file in files),
            files=len(files),
        )
    return found
