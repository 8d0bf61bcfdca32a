"""Compaction: the small files that many runs leave become few, and the rows stay the same."""

from __future__ import annotations

import time
from datetime import date

import msgspec
from pyspark.sql import SparkSession

from taskharbor.spark.lake.layout import Lake, Progress
from taskharbor.spark.lake.manifests import Directory

FILE_BYTES = 128 * 2**20
"""About what one file should hold."""


class CompactSummary(msgspec.Struct, kw_only=True):
    """The work of one compaction. `tables` has the number of dates written anew, by table."""

    tables: dict[str, int]
    files_before: int
    files_after: int
    seconds: float


def compact(spark: SparkSession, lake: Lake, *, progress: Progress | None = None) -> CompactSummary:
    """Write the dates anew that lie in more directories or files than they need. Vacuum removes the old ones later."""
    began = time.monotonic()
    change = lake.begin("compact")
    before = after = 0
    scattered = {table: _scattered(by_date) for table, by_date in change.manifest.tables.items()}
    scattered = {table: dates for table, dates in scattered.items() if dates}
    for number, (table, dates) in enumerate(scattered.items()):
        if progress is not None:
            progress(table, number, len(scattered))
        by_date = change.manifest.tables[table]
        before += sum(one.files for day in dates for one in by_date[day.isoformat()])
        # Spark splits a date that is too large for one task, and puts small ones together.
        rows = change.read(spark, table, dates).hint("rebalance", "date")
        written = change.replace(table, rows, dates)
        after += sum(one.files for one in written.by_date.values())
    if scattered:
        change.commit()
    tables = {table: len(dates) for table, dates in scattered.items()}
    return CompactSummary(
        tables=tables, files_before=before, files_after=after, seconds=time.monotonic() - began
    )


def _scattered(by_date: dict[str, list[Directory]]) -> list[date]:
    """Twice as many files as needed are bearable: beyond that a date is worth the work."""
    found = []
    for day, directories in by_date.items():
        needed = 1 + sum(one.bytes for one in directories) // FILE_BYTES
        if len(directories) > 1 or sum(one.files for one in directories) > 2 * needed:
            found.append(date.fromisoformat(day))
    return found
