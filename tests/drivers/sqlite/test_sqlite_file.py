"""The file: what a URL may say, how the driver says no, and the schema beside newer versions. And the plans that keep a claim

flat: every hot look is an index search, and none of them sorts."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

from drivers.sqlite.conftest import Query
from records import NOW, make_record
from taskharbor.drivers.engine import schema_migrations
from taskharbor.drivers.engine.reserve import OF_ONE_TYPE
from taskharbor.drivers.engine.tables import load
from taskharbor.drivers.migrations import BREAKS, Migration
from taskharbor.drivers.records import OUTCOMES, STATES
from taskharbor.drivers.registry import connect
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.drivers.sqlite.file import SQLiteOptions, apply_pending, open_connection, parse_url
from taskharbor.errors import BackendUnavailable, InvalidRequest, SchemaMismatch, TaskHarborError

Newer = Callable[[Migration], list[str]]
KNOWN = schema_migrations.known()
NAMES = [migration.name for migration in KNOWN]


def test_three_slashes_are_relative_and_four_absolute() -> None:
    assert parse_url("sqlite:///jobs.db").path == Path("jobs.db")
    options = parse_url("sqlite:////tmp/a%20b%3F.db?durability=normal&busy_timeout=2.5")
    assert (options.path, options.durability, options.busy_timeout) == (Path("/tmp/a b?.db"), "normal", 2.5)


@pytest.mark.parametrize(
    "url",
    [
        *("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://host/jobs.db", "sqlite:///folder/"),
        *("sqlite:///jobs.db?mode=ro", "sqlite:///jobs.db?durability=off", "postgres:///jobs.db"),
        *("sqlite:///jobs.db?busy_timeout=soon", "sqlite:///jobs.db?busy_timeout=-1"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(url: str) -> None:
    with pytest.raises(InvalidRequest, match="memory://" if "memory" in url else None):
        parse_url(url)


async def test_a_missing_folder_and_what_is_no_database_are_named_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="nowhere does not exist"):
        await connect(f"sqlite:///{tmp_path}/nowhere/jobs.db").open()
    path = tmp_path / "letter.txt"
    path.write_text("Dear database, " * 500)
    with pytest.raises(TaskHarborError, match="not an SQLite database"):
        await connect(f"sqlite:///{path}").open()
    assert path.read_text() == "Dear database, " * 500


@pytest.mark.parametrize("name", ["späße.db", "it's.db", 'say "hi".db', "100%.db", "a?b#c.db", "日本.db"])
async def test_any_file_name_works_once_the_driver_is_open(tmp_path: Path, name: str) -> None:
    driver = connect(f"sqlite:///{quote(str(tmp_path / name))}")
    with pytest.raises(BackendUnavailable, match="open"):
        await driver.stats(now=0)
    async with driver:
        assert await driver.stats(now=0) == []
    assert (tmp_path / name).exists()


# -- the schema -------------------------------------------------------------------------------------------


@pytest.fixture
def newer(path: Path, monkeypatch: pytest.MonkeyPatch) -> Newer:
    """Open the file with a version that knows one more step. The names of the steps taken."""

    def apply(step: Migration) -> list[str]:
        options = SQLiteOptions(path=path)
        with monkeypatch.context() as later, closing(open_connection(options, writing=True)) as connection:
            later.setattr(schema_migrations, "known", lambda: (*KNOWN, step))
            return apply_pending(connection, options)

    return apply


async def test_migrating_takes_each_step_once(driver: SQLiteDriver, path: Path, query: Query) -> None:
    assert [int(name[:4]) for name in NAMES] == list(range(1, len(NAMES) + 1))
    assert await driver.migrate(dry_run=True) == NAMES
    assert not path.exists()
    assert await driver.migrate() == NAMES
    assert await driver.migrate() == await driver.migrate(dry_run=True) == []
    assert query("SELECT name FROM taskharbor_migrations ORDER BY name") == [(name,) for name in NAMES]


async def test_an_older_version_works_beside_a_newer_one(driver: SQLiteDriver, newer: Newer) -> None:
    """Unless that one broke with it."""
    column, table = "ALTER TABLE jobs ADD COLUMN colour TEXT;\n", "CREATE TABLE shades (name TEXT);\n"
    assert newer(Migration("0998_colour", column + table)) == [*NAMES, "0998_colour"]
    async with driver:
        await driver.enqueue([make_record()], now=NOW)
        (job,) = await driver.reserve("q", limit=1, lease_for=1000, now=NOW, worker="w")
        await driver.ack(job.id, job.token or "", now=NOW)
    newer(Migration("0999_other_world", f"{BREAKS}\nCREATE TABLE other (name TEXT);\n"))
    with pytest.raises(SchemaMismatch, match="0999_other_world"):
        await driver.open()


async def test_a_step_that_fails_leaves_nothing(driver: SQLiteDriver, newer: Newer, query: Query) -> None:
    """And tables of another program are not touched."""
    with pytest.raises(sqlite3.OperationalError):
        newer(Migration("0999_broken", "CREATE TABLE half (name TEXT);\nCREATE TABLE half (name TEXT);\n"))
    assert query("SELECT count(*) FROM sqlite_master") == [(0,)]
    query("CREATE TABLE jobs (name TEXT)")
    with pytest.raises(SchemaMismatch, match="another program"):
        await driver.open()
    assert query("SELECT name FROM sqlite_master") == [("jobs",)]


def test_numbers_in_the_file_mean_what_they_always_meant() -> None:
    """Changing the order of an enum would silently change every stored job."""
    assert " ".join(STATES) == "scheduled ready blocked inflight done dead cancelled"
    assert " ".join(OUTCOMES) == "done retried dead expired released cancelled merged requeued"


# -- plans ------------------------------------------------------------------------------------------------

_PLANS = {
    "jobs_ready": "reserve.first_of_any_type reserve.ready_types reserve.put_back inspect.head_ready",
    "jobs_ready_type": "reserve.first_of_one_type reserve.first_by_type",
    "INTEGER PRIMARY KEY": "reserve.chosen settle.check_acks settle.finish_acks inspect.attempts",
    "jobs_scheduled_type": "reserve.scheduled_types one_type.due_priorities one_type.promote",
    "jobs_scheduled": "reserve.due_priorities reserve.promote inspect.due_scheduled inspect.watch queues.earliest_scheduled",
    "jobs_leases": "reserve.probe reserve.valid_leases settle.expired",
    "jobs_id": "unit.load settle.leases",
    "jobs_waiting_key": "unit.load_waiting",
    "jobs_inflight_key": "unit.load_inflight",
    "jobs_ended": "operate.ended",
    "attempts_age": "operate.attempts",
    "attempts_job": "inspect.job_attempts",
}
"""The statements that search each index, by the file of their text."""

_SOURCES = {"first_of_any_type", "first_of_one_type", "chosen"}
"""Where the rows of a claim come from: parts of one statement."""


@pytest.mark.parametrize(
    ("statement", "index"), [(name, index) for index, names in _PLANS.items() for name in names.split()]
)
async def test_the_plan_searches_its_index(
    driver: SQLiteDriver, query: Query, statement: str, index: str
) -> None:
    await driver.migrate()
    family, _, name = statement.partition(".")
    statements = OF_ONE_TYPE if family == "one_type" else load(family)
    sql = statements[name]
    if name in _SOURCES:
        sql = statements["leased_rows"].replace("/*jobs*/", sql)
    named = dict.fromkeys(re.findall(r":(\w+)", sql), "[]")
    values = [] if named else ["[]"] * sql.count("?")
    plan = [row[3] for row in query(f"EXPLAIN QUERY PLAN {sql}", *values, **named)]
    assert any("SEARCH" in step and index in step for step in plan), plan
    assert not [step for step in plan if "TEMP B-TREE" in step], plan
    scans = [step for step in plan if step.startswith("SCAN jobs") or step.startswith("SCAN attempts")]
    assert not scans, plan
