"""The schema: fresh, dry run, repeated, and beside newer versions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from records import NOW, make_record
from taskharbor.drivers.engine.tables import OUTCOMES, STATES
from taskharbor.drivers.migrations import BREAKS, Migration, known_migrations
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.drivers.sqlite.file import SQLiteOptions, apply_pending, open_connection
from taskharbor.errors import SchemaMismatch

Query = Callable[..., list[tuple[Any, ...]]]
NAMES = [migration.name for migration in known_migrations("taskharbor.drivers.engine")]


def _apply(path: Path, *more: Migration) -> list[str]:
    options = SQLiteOptions(path=path)
    with closing(open_connection(options, writing=True)) as connection:
        return apply_pending(connection, options, [*known_migrations("taskharbor.drivers.engine"), *more])


async def test_migrating_takes_every_step_once_and_a_dry_run_none(driver: SQLiteDriver, path: Path) -> None:
    assert [int(name[:4]) for name in NAMES] == list(range(1, len(NAMES) + 1))
    assert await driver.migrate(dry_run=True) == NAMES
    assert not path.exists()
    assert await driver.migrate() == NAMES
    assert await driver.migrate() == []


async def test_opening_migrates(opened: SQLiteDriver, query: Query) -> None:
    assert await opened.migrate(dry_run=True) == []
    assert query("SELECT name FROM taskharbor_migrations ORDER BY name") == [(name,) for name in NAMES]


async def test_an_older_version_works_beside_a_newer_one(driver: SQLiteDriver, path: Path) -> None:
    newer = Migration(
        "0999_colour", "ALTER TABLE jobs ADD COLUMN colour TEXT;\nCREATE TABLE shades (name TEXT);\n"
    )
    assert _apply(path, newer) == [*NAMES, "0999_colour"]

    async with driver:
        await driver.enqueue([make_record()], now=NOW)
        (job,) = await driver.reserve("q", limit=1, lease_for=1000, now=NOW, worker="w")
        await driver.ack(job.id, job.token or "", now=NOW)


async def test_an_older_version_refuses_what_a_newer_one_broke(driver: SQLiteDriver, path: Path) -> None:
    _apply(path, Migration("0999_other_world", f"{BREAKS}\nCREATE TABLE other (name TEXT);\n"))
    with pytest.raises(SchemaMismatch, match="0999_other_world"):
        await driver.open()


def test_a_step_that_fails_leaves_nothing(path: Path, query: Query) -> None:
    broken = Migration("0999_broken", "CREATE TABLE half (name TEXT);\nCREATE TABLE half (name TEXT);\n")
    with pytest.raises(sqlite3.OperationalError):
        _apply(path, broken)
    assert query("SELECT count(*) FROM sqlite_master") == [(0,)]


async def test_another_programs_tables_are_not_touched(driver: SQLiteDriver, query: Query) -> None:
    query("CREATE TABLE jobs (name TEXT)")
    with pytest.raises(SchemaMismatch, match="another program"):
        await driver.open()
    assert query("SELECT name FROM sqlite_master") == [("jobs",)]


def test_numbers_in_the_file_mean_what_they_always_meant() -> None:
    """Changing the order of an enum would silently change every stored job."""
    assert " ".join(STATES) == "scheduled ready blocked inflight done dead cancelled"
    assert " ".join(OUTCOMES) == "done retried dead expired released cancelled merged requeued"
