"""Compaction and vacuum, by deltalake. Commits of bronze and silver repeat what they say about the last run."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
from deltalake import WriterProperties
from deltalake.exceptions import CommitFailedError

from taskharbor.errors import InvalidRequest
from taskharbor.lake.delta import Lake, LakeChanged
from taskharbor.lake.files import counted
from taskharbor.lake.tables import BRONZE, WHOLE

# Longer than a run takes, and than anybody reads an old version.
KEEP_FOR = timedelta(days=7)


class CompactSummary(msgspec.Struct, kw_only=True):
    """Files that became fewer, by table."""

    files_before: dict[str, int]
    files_after: dict[str, int]


class VacuumSummary(msgspec.Struct, kw_only=True):
    """Files that were removed, and files of dates that were dropped."""

    files: int
    dropped: int


def compact(lake: Lake) -> CompactSummary:
    """Make few files of many. The rows stay the same. Raises LakeChanged if a run was in the way; the tables done stay done."""
    found = CompactSummary(files_before={}, files_after={})
    for table in lake.tables().values():
        assert table.delta is not None
        try:
            done = table.delta.optimize.compact(
                writer_properties=WriterProperties(compression="ZSTD"), commit_properties=table.unchanged()
            )
        except CommitFailedError as error:
            raise LakeChanged(f"a run changed {table.name} of {lake} meanwhile: compact it again") from error
        if done["numFilesRemoved"]:
            found.files_before[table.name] = done["numFilesRemoved"]
            found.files_after[table.name] = done["numFilesAdded"]
    return found


def vacuum(lake: Lake, *, keep_for: timedelta = KEEP_FOR, before: date | None = None) -> VacuumSummary:
    """Remove files that no version younger than `keep_for` needs, those of lost tasks among them. `before`: drop the rows of
    earlier dates first; their files go once no younger version has them. Raises InvalidRequest unless it is past."""
    if before is not None and before >= datetime.now(UTC).date():
        raise InvalidRequest(f"{before} is not past: its rows would be dropped while they are written")
    dropped = 0 if before is None else _drop_dates(lake, before)
    hours, removed = math.ceil(keep_for / timedelta(hours=1)), 0
    known: Any = {"dry_run": False, "enforce_retention_duration": False, "full": True}
    for table in lake.tables().values():
        assert table.delta is not None
        removed += len(table.delta.vacuum(hours, **known, commit_properties=table.unchanged()))
    return VacuumSummary(files=removed, dropped=dropped)


def _drop_dates(lake: Lake, before: date) -> int:
    """The commit of bronze says how many rows are left, for those who check that none is missing."""
    dropped = 0
    for table in lake.tables().values():
        if table.name in WHOLE:
            continue
        assert table.delta is not None
        left = [one for one in table.files() if one.date is None or one.date >= before]
        changes: dict[str, object] = {}
        if table.name == BRONZE:
            changes["totals"] = dict(counted(left, table.place, table.name, "source"))
        dropped += len(table.files()) - len(left)
        is_old = f"date < '{before}'"
        if table.name == "silver.lifecycles":
            # A dead job has no date, since it may go on, and has an end.
            is_old += f" OR finished_at < '{before}T00:00:00Z'"
        table.delta.delete(is_old, commit_properties=table.unchanged(**changes))
    return dropped
