"""Vacuum: remove what no manifest needs any more, and on request what is older than a date."""

from __future__ import annotations

import os
import shutil
import time
from datetime import date, timedelta
from pathlib import Path

import msgspec

from taskharbor.errors import InvalidRequest
from taskharbor.spark.lake.layout import Lake
from taskharbor.spark.lake.manifests import FOLDER, load, numbers, path_of

KEEP_MANIFESTS = 2
UNLISTED_FOR = timedelta(hours=6)
"""Longer than a run takes: what a run is writing is in no manifest yet."""
_ALWAYS_WHOLE = ("gold.errors", "state.backlog_days")
"""These say something of all dates: a backlog goes on from days that are long gone."""


class VacuumSummary(msgspec.Struct, kw_only=True):
    """The work of one vacuum. `dates` counts those dropped because they are older than asked for, over all tables."""

    directories: int
    bytes: int
    manifests: int
    dates: int


def vacuum(
    lake: Lake,
    *,
    keep_manifests: int = KEEP_MANIFESTS,
    unlisted_for: timedelta = UNLISTED_FOR,
    before: date | None = None,
) -> VacuumSummary:
    """Readers that began with one of the newest `keep_manifests` states can finish; older states go.

    `before`: drop the rows of earlier dates first. That itself is a new state, so their files go once the states that still
    have them do.
    """
    if keep_manifests < 1:
        raise InvalidRequest("keep_manifests must be at least 1: the newest manifest is the lake")
    dates = 0 if before is None else _drop_dates(lake, before)
    there = numbers(lake.path)
    gone, kept = there[:-keep_manifests], there[-keep_manifests:]
    needed = {path for number in kept for path in load(lake.path, number).directories()}
    # Manifests first: a crash in between leaves directories without a manifest, never a manifest without its directories.
    for number in gone:
        path_of(lake.path, number).unlink(missing_ok=True)
    directories, size = _remove_unlisted(lake.path, needed, time.time() - unlisted_for.total_seconds())
    return VacuumSummary(directories=directories, bytes=size, manifests=len(gone), dates=dates)


def _drop_dates(lake: Lake, before: date) -> int:
    change = lake.begin("vacuum")
    dropped = 0
    for table, by_date in change.manifest.tables.items():
        for day in [] if table in _ALWAYS_WHOLE else [day for day in by_date if day < before.isoformat()]:
            del by_date[day]
            dropped += 1
    if dropped:
        change.commit()
    return dropped


def _remove_unlisted(lake: Path, needed: set[str], older_than: float) -> tuple[int, int]:
    directories = size = 0
    for write in sorted(lake.glob("*/*/write=*")):
        if write.parts[-3] == FOLDER:
            continue
        parts = sorted(write.glob("date=*"))
        listed = [part for part in parts if str(part.relative_to(lake)) in needed]
        # Where one date of a write is listed, its run is over, and the rest is old whatever its age.
        for part in [write] if not listed else [part for part in parts if part not in listed]:
            if listed or _newest(part) <= older_than:
                size += sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
                shutil.rmtree(part)
                directories += 1
    for draft in (lake / FOLDER).glob("draft-*"):
        if draft.stat().st_mtime <= older_than:
            draft.unlink(missing_ok=True)
    return directories, size


def _newest(folder: Path) -> float:
    """When something below was last changed."""
    return max(os.stat(root).st_mtime for root, _, _ in os.walk(folder))
