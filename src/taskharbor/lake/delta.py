"""Delta tables that grow by numbered runs, and all tables of one run together.

A run N commits bronze first. That commit says how far the log was read and what a later process needs to compute the other
tables from the rows of run N. Each other table then gets one commit with the application transaction N. So a run that ended in
between is finished by the next one: a table that has N is left alone. Two processes can do this at once: of two commits of one
table and run, the second finds the first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import date, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from taskharbor.errors import InvalidRequest, TaskHarborError
from taskharbor.lake.files import File
from taskharbor.lake.storage import parse_place, plain_failure
from taskharbor.lake.tables import BRONZE, TABLES, WHOLE

# The id of our application transactions, and our place in a commit's metadata.
_APP = _KEY = "taskharbor"
# Commits of other engines that leave the rows as they are.
_KEEPING = ("OPTIMIZE", "VACUUM START", "VACUUM END")
# What deltalake raises.
LibraryError = DeltaError


class LakeChanged(TaskHarborError):
    """Another process committed to the table meanwhile. Nothing of this commit took effect."""


class LakeUnreadable(TaskHarborError):
    """The lake is incomplete or damaged: what is there must not be taken for everything."""


class NoLake(InvalidRequest):
    """There is no lake in this place."""


class RunRecord(msgspec.Struct, kw_only=True):
    """The record of a run in a commit of bronze. Commits that keep bronze in order repeat it.

    `at`: when the rows were taken in, which they carry as `ingested_at`. Unless `is_unique`, some may be there twice. `dates` are
    those on which anything is counted for them, `created` those on which their jobs were created. A run `again` takes in nothing
    and computes its dates again from bronze. By source: `cursors` has how far its log was read, `totals` the rows of bronze, and
    `queues` its queues when they were last seen. Unless it `has_ticks`, no row is of a
    schedule or of a job of one. The `objectives` hold from the run `objectives_since` on, which computes them
    for all rows.
    """

    run: int = 0
    source: str = ""
    at: str = ""
    rows: int = 0
    is_unique: bool = True
    has_ticks: bool = True
    dates: list[date] = []
    again: bool = False
    created: list[date] = []
    cursors: dict[str, str] = {}
    totals: dict[str, int] = {}
    queues: dict[str, list[dict[str, Any]]] = {}
    objectives: str = "[]"
    objectives_since: int = 0


class Table:
    """A table as it was when it was opened."""

    def __init__(self, lake: Lake, name: str) -> None:
        self.lake, self.name, self.place = lake, name, lake.place
        self.delta: DeltaTable | None = None
        try:
            self.delta = DeltaTable(self.place.uri(name), storage_options=self.place.options)
        except TableNotFoundError:
            pass
        except (DeltaError, OSError) as error:
            raise LakeUnreadable(
                f"the table {name} of {self.lake} cannot be read: {plain_failure(error)}"
            ) from error

    @property
    def run(self) -> int:
        """The last run that it has; 0 if none."""
        return 0 if self.delta is None else self.delta.transaction_version(_APP) or 0

    @property
    def record(self) -> dict[str, Any]:
        """The record of the run in its last commit. Raises LakeUnreadable if others have changed the rows since."""
        if self.delta is None:
            return {}
        # The newest commit, unless another engine has kept the table in order since.
        for commit in (one for limit in (1, None) for one in self.delta.history(limit)):
            if _KEY in commit:
                return dict(commit[_KEY])
            if commit.get("operation") not in _KEEPING:
                break
        raise LakeUnreadable(
            f"{self.name} of {self.lake} was changed by another program, or lost commits: restore its folder, or make a new lake"
        )

    def files(self, dates: Collection[date | None] | None = None) -> list[File]:
        """Return the table's files, only of these dates if some are given."""
        return [file for file, _ in self._files if dates is None or file.date in dates]

    def files_with(self, column: str, values: Collection[Any]) -> list[File]:
        """Return the files that may have rows with one of these numbers, or of these dates of an instant."""

        def may_have(facts: dict[str, Any]) -> bool:
            low, high = (facts.get(f"{bound}.{column}") for bound in ("min", "max"))
            if low is None or high is None:
                return True
            if isinstance(low, datetime):
                low, high = low.date(), high.date()
            return any(low <= value <= high for value in values)

        return [file for file, facts in self._files if may_have(facts)]

    @cached_property
    def _files(self) -> list[tuple[File, dict[str, Any]]]:
        found = [] if self.delta is None else pa.table(self.delta.get_add_actions(flatten=True)).to_pylist()
        facts = ("path", "partition.date", "num_records", "size_bytes")
        return [(File(*map(one.get, facts)), one) for one in found]

    @property
    def rows(self) -> int:
        """The number of rows, as the commits say."""
        return sum(file.rows for file in self.files())

    def check_files(self) -> None:
        """Raise LakeUnreadable if files that commits name are not there, or not whole."""
        listed = self.place.filesystem(self.name).get_file_info(pafs.FileSelector("", recursive=True))
        there = {one.path: one.size for one in listed}
        if gone := [file.path for file in self.files() if there.get(file.path) != file.size]:
            raise LakeUnreadable(
                f"files of {self.name} in {self.lake} are missing or damaged ({len(gone)}), such as {gone[0]}: restore them, or "
                "make a new lake"
            )

    def commit(
        self, run: int, added: Sequence[File], removed: Sequence[File] = (), record: object = None
    ) -> None:
        """Add and remove files as one, for this run. Raises LakeChanged unless the table is as it was when it was opened."""
        # No commit of ours may hide one of another program.
        _ = self.record
        if self.run >= run:
            raise LakeChanged(self._changed)
        now = time.time_ns() // 1_000_000
        schema, keys = Schema.from_arrow(TABLES[self.name]), [] if self.name in WHOLE else ["date"]
        adds = [AddAction(one.path, one.size, self._values(one), now, True, one.stats) for one in added]
        gone = [RemoveAction(one.path, True, now, one.size, self._values(one)) for one in removed]
        known: Any = {
            # A lower number would be accepted, and a second commit of this one too, if this commit were tried again by itself.
            "commit_properties": CommitProperties(
                custom_metadata={_KEY: msgspec.to_builtins(record or {"run": run})},
                app_transactions=[Transaction(_APP, run)],
                max_commit_retries=0,
            )
        }
        try:
            if self.delta is None:
                uri, options = self.place.uri(self.name), self.place.options
                create_table_with_add_actions(
                    uri, schema, adds, partition_by=keys, storage_options=options, **known
                )
            else:
                self._add_columns()
                self.delta.create_write_transaction([*adds, *gone], "append", schema, keys, **known)
        except CommitFailedError as error:
            raise LakeChanged(self._changed) from error
        except DeltaError as error:
            if self.delta is None and Table(self.lake, self.name).delta is not None:
                raise LakeChanged(self._changed) from error
            raise

    @property
    def _changed(self) -> str:
        return f"another process committed to {self.name} of {self.lake} meanwhile, and nothing of this one: run it again"

    def _values(self, file: File) -> dict[str, str | None]:
        return {} if self.name in WHOLE else {"date": None if file.date is None else file.date.isoformat()}

    def _add_columns(self) -> None:
        """Give a table of an older release the columns that are new."""
        assert self.delta is not None
        there = {field.name for field in self.delta.schema().fields}
        if new := [field for field in Schema.from_arrow(TABLES[self.name]).fields if field.name not in there]:
            self.delta.alter.add_columns(new, commit_properties=self.unchanged())

    def unchanged(self, **changes: object) -> CommitProperties:
        """For a commit outside of runs: it repeats what the last one said, but for the changes."""
        return CommitProperties(custom_metadata={_KEY: self.record | changes})


class Lake:
    """The tables below one folder, which all machines of a cluster must reach under the same path, or in an object store."""

    def __init__(self, place: str | Path) -> None:
        self.place = parse_place(place)

    def __str__(self) -> str:
        return self.place.root

    def table(self, name: str) -> Table:
        """Open a table as it is now."""
        if name not in TABLES:
            raise InvalidRequest(f"the lake has no table {name!r}: it has {', '.join(TABLES)}")
        return Table(self, name)

    def tables(self) -> dict[str, Table]:
        """Open the tables that are there. Raises NoLake if there are none."""
        found = {name: table for name in TABLES if (table := self.table(name)).delta is not None}
        if not found:
            raise NoLake(
                f"there is no lake in {self}: `taskharbor pipeline run` makes one; --lake names its place"
            )
        return found

    def record(self) -> RunRecord:
        """Return the record of the newest run. Raises LakeUnreadable if bronze went back behind a table that is made of it."""
        # Bronze is the first to have a run, so it is opened last.
        tables = {name: self.table(name) for name in reversed(TABLES)}
        bronze = tables[BRONZE]
        if ahead := ", ".join(f"{name} ({one.run})" for name, one in tables.items() if one.run > bronze.run):
            raise LakeUnreadable(
                f"{BRONZE} of {self} has run {bronze.run}, others a later one: {ahead}. Restore its commits, or make a new lake"
            )
        return msgspec.convert(bronze.record, RunRecord)

    def snapshot(self) -> Snapshot:
        """Open all tables of one run, and check that nothing of them is missing.

        Raises NoLake, or LakeUnreadable, which says what is missing.
        """
        there = self.tables()
        tables = {name: there.get(name) or self.table(name) for name in TABLES}
        runs = {name: table.run for name, table in tables.items()}
        newest = max(runs.values())
        if late := ", ".join(f"{name} ({run})" for name, run in runs.items() if run < newest):
            raise LakeUnreadable(
                f"the lake {self} has tables without run {newest}, with the run that they have: {late}. A run is going on, or "
                "one was ended, or commits are missing. `taskharbor pipeline run` finishes a run; it cannot restore a commit"
            )
        # Bronze is the first.
        record, *_ = [msgspec.convert(one.record, RunRecord) for one in tables.values()]
        for table in tables.values():
            table.check_files()
        rows = {name: table.rows for name, table in tables.items()}
        given, bronze = sum(record.totals.values()), rows[BRONZE]
        silver, apart = rows["silver.attempts"], rows["quarantine.attempts"]
        if not given == bronze == silver + apart:
            raise LakeUnreadable(
                f"the lake {self} was given {given:,} rows of the log by run {newest}; bronze has {bronze:,} of them, silver "
                f"{silver:,} and quarantine {apart:,}"
            )
        return Snapshot(self, newest, tables, record)


class Snapshot(NamedTuple):
    """All tables of one run."""

    lake: Lake
    run: int
    tables: dict[str, Table]
    record: RunRecord
