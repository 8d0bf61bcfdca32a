"""The schema: fresh, dry run, repeated, raced for, beside newer versions, and by somebody who may not change it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import pytest
from msgspec.structs import replace
from psycopg import sql

from drivers.postgres.harness import DAY, NOW, SECOND, Raw, claim, held, ids, make_record, make_records
from taskharbor.drivers.contract import Ack, Extension, Fail, JobFilter, QueueSettings, Release
from taskharbor.drivers.migrations import BREAKS, Migration
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres.connections import Session, connect
from taskharbor.drivers.postgres.migrations import FUNCTIONS_VERSION, known_steps, migrate
from taskharbor.drivers.postgres.rows import stored_value
from taskharbor.drivers.records import OUTCOMES, STATES
from taskharbor.errors import BackendUnavailable, SchemaMismatch, TaskHarborError
from taskharbor.jobs import Failure, JobState, UpdateFlags

*TABLES, FUNCTIONS = known_steps()
NAMES = [step.name for step in known_steps()]


@pytest.fixture
def url(postgres_url: str) -> str:
    """A schema of the test's own, which is not there yet."""
    return postgres_url


async def apply(url: str, *steps: Migration) -> list[str]:
    """As a version of TaskHarbor that knows these steps, or as this one."""
    options = PostgresDriver.from_url(url).options
    async with await connect(options) as connection:
        return await migrate(Session(connection, options), options, known=steps or known_steps())


def newer(step: Migration) -> list[Migration]:
    return [*TABLES, step, FUNCTIONS]


def functions_of(version: int) -> Migration:
    return Migration(f"functions_{version:04}_00000000", FUNCTIONS.sql)


def relations(raw: Raw) -> set[str]:
    query = "SELECT relname FROM pg_class JOIN pg_namespace AS n ON relnamespace = n.oid WHERE nspname = %s"
    return {name for (name,) in raw(query, raw.schema)}


def applied(raw: Raw) -> list[str]:
    return [name for (name,) in raw("SELECT name FROM migrations ORDER BY name")]


_HOURS = itertools.count(NOW, 3600 * SECOND)


async def work(driver: PostgresDriver) -> None:
    """Most of what a handle does, by way of every table. Each time it is an hour later."""
    now = next(_HOURS)
    jobs = make_records(4, now=now)
    await driver.enqueue(jobs, now=now)
    await driver.enqueue([make_record(now=now, key="k", idempotency_key="i", queue="keyed")], now=now)
    await driver.enqueue([make_record(now=now, key="k", queue="keyed")], now=now)
    leased = await claim(driver, 4, now=now, lease=SECOND)
    assert ids(leased) == ids(jobs)
    done, dead, back, lost = map(held, leased)
    await driver.extend_lease([Extension(*done), Extension(*lost)], lease_for=SECOND, now=now)
    settled = await driver.settle([Ack(*done), Fail(*dead, 1, Failure("E", "no")), Release(*back)], now=now)
    assert settled == [None, None, None]
    assert await driver.reclaim(now=now + SECOND) == 1
    assert await driver.requeue([dead[0]], now=now) == [JobState.READY]
    assert await driver.cancel([dead[0], back[0], lost[0]], now=now) == [JobState.CANCELLED] * 3
    assert None not in await driver.get(ids(jobs), now=now)
    assert len((await driver.list_jobs(JobFilter(queue="q"), now=now)).jobs) >= 4
    await driver.configure("other", QueueSettings(max_inflight=1), now=now)
    assert (await driver.settings("other")).max_inflight == 1
    assert [stats.queue for stats in await driver.stats(now=now)] == ["keyed", "other", "q"]
    assert len(await driver.job_attempts(done[0])) == 1
    assert (await driver.read_attempts()).attempts
    await driver.wait(["q"], now=now, timeout=0)
    assert await driver.prune(now=now + 8 * DAY) == 4
    assert await driver.purge(JobFilter(queue="q")) == 0
    keyed = await driver.list_jobs(JobFilter(queue="keyed"), now=now)
    await driver.cancel(ids(keyed.jobs), now=now)
    await driver.purge(JobFilter())


async def test_steps_are_taken_once(driver: PostgresDriver, raw: Raw) -> None:
    public = "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace"
    before = raw.one(public)
    assert await driver.migrate(dry_run=True) == NAMES
    assert raw("SELECT 1 FROM pg_namespace WHERE nspname = %s", raw.schema) == []
    assert await driver.migrate() == NAMES
    assert await driver.migrate() == await driver.migrate(dry_run=True) == []
    assert applied(raw) == NAMES
    assert [int(step.name[:4]) for step in TABLES] == list(range(1, len(NAMES)))
    assert FUNCTIONS.name.startswith(f"functions_{FUNCTIONS_VERSION:04}_")
    # No other schema on the search path is touched.
    assert raw.one(public) == before


async def test_many_who_open_at_once_migrate_once(driver: PostgresDriver, raw: Raw) -> None:
    """Also into a schema that is there."""
    raw(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(raw.schema)))
    handles = [driver.clone() for _ in range(8)]
    await asyncio.gather(*(handle.open() for handle in handles))
    for handle in handles:
        await work(handle)
        await handle.close()
    assert applied(raw) == NAMES


async def test_without_migrating_only_an_up_to_date_schema_is_used(url: str, raw: Raw) -> None:
    driver = PostgresDriver.from_url(f"{url}&migrate=off")
    with pytest.raises(SchemaMismatch, match="taskharbor migrate"):
        await driver.open()
    assert relations(raw) == set()
    await apply(url)
    raw("DELETE FROM migrations WHERE name = %s", FUNCTIONS.name)
    with pytest.raises(SchemaMismatch, match=FUNCTIONS.name):
        await driver.open()
    await apply(url)
    async with driver:
        await work(driver)


@pytest.mark.parametrize("table", ["jobs", "queues", "attempts", "staged", "migrations"])
async def test_another_programs_tables_are_not_touched(driver: PostgresDriver, raw: Raw, table: str) -> None:
    raw(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(raw.schema)))
    raw(sql.SQL("CREATE TABLE {} (id integer, name text)").format(sql.Identifier(table)))
    with pytest.raises(SchemaMismatch, match=f"another program.*{table}"):
        await driver.open()
    assert relations(raw) == {table}


# -- beside other versions --------------------------------------------------------------------------------------


async def test_an_older_version_refuses_what_a_newer_one_broke(driver: PostgresDriver, url: str) -> None:
    step = Migration("0999_other_world", f"{BREAKS}\nCREATE TABLE other (name text);\n")
    await apply(url, *newer(step))
    for refused in (driver.open(), driver.migrate(dry_run=True)):
        with pytest.raises(SchemaMismatch, match="0999_other_world"):
            await refused


async def test_an_older_version_works_beside_a_newer_one(driver: PostgresDriver, url: str) -> None:
    """Opened before the newer one came, and after."""
    tables = {"jobs": "text", "ended": "text", "attempts": "text", "queues": "text NOT NULL DEFAULT 'red'"}
    columns = [f"ALTER TABLE {table} ADD COLUMN colour {kind};\n" for table, kind in tables.items()]
    more = "CREATE INDEX jobs_colour ON jobs (colour);\nCREATE TABLE shades (name text);\n"
    step = Migration("0999_colour", "".join(columns) + more)
    async with driver:
        # Often enough for plans to be kept.
        for _ in range(7):
            await work(driver)
        assert await apply(url, *newer(step)) == ["0999_colour"]
        await work(driver)
        async with driver.clone() as later:
            await work(later)


async def test_other_functions_are_replaced_unless_newer(driver: PostgresDriver, url: str, raw: Raw) -> None:
    await apply(url, *TABLES, functions_of(FUNCTIONS_VERSION))
    raw("DROP FUNCTION cancel_jobs")
    assert await apply(url) == [FUNCTIONS.name]
    assert raw.one("SELECT to_regproc('cancel_jobs') IS NOT NULL")
    later = functions_of(FUNCTIONS_VERSION + 1)
    assert await apply(url, *TABLES, later) == [later.name]
    async with driver:
        assert await driver.migrate(dry_run=True) == []
        await work(driver)
    assert applied(raw)[-1] == later.name


async def test_a_step_that_fails_leaves_nothing_and_those_before_it_are_kept(url: str, raw: Raw) -> None:
    broken = Migration("0002_broken", "CREATE TABLE half (name text);\nCREATE TABLE half (name text);\n")
    with pytest.raises(TaskHarborError, match="half"):
        await apply(url, TABLES[0], broken)
    assert applied(raw) == NAMES[:1]
    assert "half" not in relations(raw)
    assert await apply(url) == NAMES[1:]


def test_numbers_in_the_tables_mean_what_they_always_meant() -> None:
    """Changing the order of an enum would silently change every stored job."""
    assert " ".join(STATES) == "scheduled ready blocked inflight done dead cancelled"
    assert " ".join(OUTCOMES) == "done retried dead expired released cancelled merged requeued"
    flags = UpdateFlags(True, "later", True, True)
    assert stored_value("update", flags) == 1 + 2 + 4 + 2 * 8
    # A version without this flag takes it from a list of 32, counted from the end.
    assert stored_value("update", replace(flags, priority=True)) == 1 + 2 + 4 + 2 * 8 - 32


# -- roles ----------------------------------------------------------------------------------------------------


@pytest.fixture
def role_url(url: str, raw: Raw) -> Iterator[str]:
    """The URL of a store with a role that may only connect. `grant` gives it more."""
    asyncio.run(apply(url))
    name = sql.Identifier(f"th_role_{raw.schema}")
    raw(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'p'").format(name))
    parts = urlsplit(url)
    yield urlunsplit(parts._replace(netloc=f"th_role_{raw.schema}:p@{parts.hostname}:{parts.port}"))
    raw(sql.SQL("DROP OWNED BY {}").format(name))
    raw(sql.SQL("DROP ROLE {}").format(name))


def grant(raw: Raw, *grants: str) -> None:
    for one in (f'USAGE ON SCHEMA "{raw.schema}"', *grants):
        raw(f"GRANT {one} TO th_role_{raw.schema}")


async def test_a_role_that_may_not_change_the_schema_can_work(role_url: str, raw: Raw) -> None:
    grant(
        raw,
        "SELECT, INSERT, UPDATE, DELETE ON queues, jobs, ended, finished, dead, idempotency, repeated",
        "SELECT, INSERT, DELETE ON moves",
        "SELECT, INSERT ON attempts",
        "SELECT, UPDATE ON upkeep",
        "SELECT ON migrations, epochs, job_records",
        "USAGE, SELECT ON SEQUENCE job_seq",
        "USAGE ON SEQUENCE attempt_seq",
        "EXECUTE ON FUNCTION add_days, drop_days, prune, begin_epoch",
    )
    for options in ("", "&migrate=off"):
        async with PostgresDriver.from_url(role_url + options) as driver:
            await work(driver)
            # Its turn to fold.
            raw("UPDATE upkeep SET folded_at = '-infinity'")
            await work(driver)


async def test_a_role_that_only_enqueues_needs_less(role_url: str, raw: Raw) -> None:
    grant(
        raw,
        "SELECT, INSERT, UPDATE, DELETE ON jobs, idempotency",
        "SELECT, INSERT, DELETE ON queues",
        "INSERT ON moves",
        "SELECT, INSERT ON repeated",
        "SELECT ON ended, finished, dead, migrations, epochs",
        "USAGE ON SEQUENCE job_seq",
    )
    async with PostgresDriver.from_url(role_url) as driver:
        for _ in range(3):
            await driver.enqueue([make_record()], now=NOW, new_ids=True)
        await driver.enqueue(make_records(2), now=NOW)
        await driver.enqueue([make_record(key="k", queue="new")], now=NOW)
        (answer,) = await driver.enqueue([make_record(key="k", queue="new", idempotency_key="i")], now=NOW)
        assert answer.existed
        await driver.enqueue([make_record(idempotency_key="i")], now=NOW)
        with pytest.raises(BackendUnavailable, match="privilege"):
            await claim(driver)


async def test_a_role_without_rights_is_told_so(role_url: str) -> None:
    with pytest.raises(TaskHarborError, match=r"privilege|missing or old"):
        await PostgresDriver.from_url(role_url).open()
    elsewhere = PostgresDriver.from_url(role_url.partition("schema=")[0] + "schema=th_nobodys")
    with pytest.raises(BackendUnavailable, match="taskharbor migrate"):
        await elsewhere.open()
