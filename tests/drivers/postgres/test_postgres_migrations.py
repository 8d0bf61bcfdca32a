"""The schema: fresh, dry run, repeated, raced for, beside newer versions, and by somebody who may not change it."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit, urlunsplit

import pytest
from click.testing import CliRunner
from psycopg import sql

from drivers.postgres.pg_harness import DAY, NOW, Raw
from taskharbor.cli.root import root
from taskharbor.drivers.contract import Ack, Extension, Fail, JobFilter, QueueSettings, Release
from taskharbor.drivers.migrations import BREAKS, Migration
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres.connections import Session, connect
from taskharbor.drivers.postgres.migrations import FUNCTIONS_VERSION, known_steps, migrate
from taskharbor.drivers.postgres.rows import OUTCOMES, STATES
from taskharbor.errors import BackendUnavailable, SchemaMismatch, TaskHarborError
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState
from taskharbor_testkit.servers import PostgresAt

MakeRecord = Callable[..., JobRecord]

NAMES = [migration.name for migration in known_steps()]


def apply(url: str, steps: list[Migration]) -> list[str]:
    """As a version of TaskHarbor that knows these steps."""

    async def run() -> list[str]:
        options = PostgresDriver.from_url(url).options
        async with await connect(options) as connection:
            return await migrate(Session(connection, options), options, known=steps)

    return asyncio.run(run())


def newer(*steps: Migration) -> list[Migration]:
    *tables, functions = known_steps()
    return [*tables, *steps, functions]


def relations(raw: Raw) -> set[str]:
    found = raw(
        "SELECT relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE nspname = %s",
        raw.schema,
    )
    return {name for (name,) in found}


_HOURS = itertools.count(NOW, 3600 * SECOND)


async def work(driver: PostgresDriver, record: MakeRecord) -> None:
    """Most of what a handle does, by way of every table. Each time it is an hour later."""
    now = next(_HOURS)
    jobs = [record(run_at_us=now) for _ in range(4)]
    await driver.enqueue(jobs, now=now)
    await driver.enqueue([record(run_at_us=now, key="k", idempotency_key="i", queue="keyed")], now=now)
    await driver.enqueue([record(run_at_us=now, key="k", queue="keyed")], now=now)
    leased = await driver.reserve("q", limit=4, lease_for=SECOND, now=now, worker="w")
    assert [job.id for job in leased] == [job.id for job in jobs]
    done, dead, back, lost = ((job.id, job.token or "") for job in leased)
    await driver.extend_lease([Extension(*done), Extension(*lost)], lease_for=SECOND, now=now)
    settled = await driver.settle([Ack(*done), Fail(*dead, 1, Failure("E", "no")), Release(*back)], now=now)
    assert settled == [None, None, None]
    assert await driver.reclaim(now=now + SECOND) == 1
    assert await driver.requeue([dead[0]], now=now) == [JobState.READY]
    assert await driver.cancel([dead[0], back[0], lost[0]], now=now) == [JobState.CANCELLED] * 3
    assert len([job for job in await driver.get([job.id for job in jobs], now=now) if job is not None]) == 4
    assert len((await driver.list_jobs(JobFilter(queue="q"), now=now)).jobs) >= 4
    await driver.configure("other", QueueSettings(max_inflight=1), now=now)
    assert (await driver.settings("other")).max_inflight == 1
    assert [stats.queue for stats in await driver.stats(now=now)] == ["keyed", "other", "q"]
    assert len(await driver.job_attempts(done[0])) == 1
    assert (await driver.read_attempts()).attempts
    await driver.wait(["q"], now=now, timeout=0)
    assert await driver.prune(now=now + 8 * DAY) == 4
    assert await driver.purge(JobFilter(queue="q")) == 0
    await driver.cancel(
        [job.id for job in (await driver.list_jobs(JobFilter(queue="keyed"), now=now)).jobs], now=now
    )
    await driver.purge(JobFilter())


def test_a_dry_run_names_the_steps_and_makes_nothing(driver: PostgresDriver, raw: Raw) -> None:
    assert asyncio.run(driver.migrate(dry_run=True)) == NAMES
    assert raw("SELECT 1 FROM pg_namespace WHERE nspname = %s", raw.schema) == []


def test_migrating_takes_every_step_once(driver: PostgresDriver) -> None:
    assert asyncio.run(driver.migrate()) == NAMES
    assert asyncio.run(driver.migrate()) == []
    assert asyncio.run(driver.migrate(dry_run=True)) == []


def test_opening_migrates(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        async with driver:
            assert await driver.migrate(dry_run=True) == []
            await work(driver, record)

    asyncio.run(use())
    assert raw("SELECT name FROM migrations ORDER BY name") == [(name,) for name in NAMES]


def test_names_are_numbered_in_order() -> None:
    *tables, functions = NAMES
    assert [int(name[:4]) for name in tables] == list(range(1, len(tables) + 1))
    assert functions.startswith(f"functions_{FUNCTIONS_VERSION:04}_")


def test_the_schema_of_the_role_is_not_touched(driver: PostgresDriver, postgres_server: PostgresAt) -> None:
    """Neither `public` nor any other on the search path."""
    count = "SELECT count(*) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace WHERE nspname = 'public'"
    before = postgres_server.execute(count)
    asyncio.run(driver.migrate())
    assert postgres_server.execute(count) == before


def test_many_who_open_at_once_agree(driver: PostgresDriver, raw: Raw, record: MakeRecord) -> None:
    async def use() -> None:
        handles = [driver.clone() for _ in range(8)]
        await asyncio.gather(*(handle.open() for handle in handles))
        await asyncio.gather(*(handle.enqueue([record()], now=NOW) for handle in handles))
        (stats,) = await handles[0].stats(now=NOW)
        assert stats.counts[JobState.READY] == 8
        for handle in handles:
            await handle.close()

    asyncio.run(use())
    assert raw("SELECT name FROM migrations ORDER BY name") == [(name,) for name in NAMES]


_OPENER = """
import asyncio, sys
from taskharbor.drivers.registry import connect
sys.stdin.readline()
print(len(asyncio.run(connect(sys.argv[1]).migrate())))
"""


def test_processes_that_migrate_at_once_agree(postgres_url: str, raw: Raw) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _OPENER, postgres_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert raw("SELECT name FROM migrations ORDER BY name") == [(name,) for name in NAMES]


def test_without_migrating_a_missing_schema_is_refused(postgres_url: str, raw: Raw) -> None:
    with pytest.raises(SchemaMismatch, match="taskharbor migrate"):
        asyncio.run(PostgresDriver.from_url(f"{postgres_url}&migrate=off").open())
    assert relations(raw) == set()


def test_without_migrating_an_old_schema_is_refused(postgres_url: str, raw: Raw) -> None:
    apply(postgres_url, newer())
    raw("DELETE FROM migrations WHERE name = %s", NAMES[-1])
    with pytest.raises(SchemaMismatch, match=NAMES[-1]):
        asyncio.run(PostgresDriver.from_url(f"{postgres_url}&migrate=off").open())


def test_without_migrating_an_up_to_date_schema_is_used(postgres_url: str, record: MakeRecord) -> None:
    apply(postgres_url, newer())

    async def use() -> None:
        async with PostgresDriver.from_url(f"{postgres_url}&migrate=off") as driver:
            await work(driver, record)

    asyncio.run(use())


@pytest.mark.parametrize(
    "table", ["jobs", "queues", "attempts", "dead", "moves", "finished", "idempotency", "epochs"]
)
def test_another_programs_tables_are_not_touched(driver: PostgresDriver, raw: Raw, table: str) -> None:
    raw(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(raw.schema)))
    raw(sql.SQL("CREATE TABLE {} (name text)").format(sql.Identifier(table)))
    with pytest.raises(SchemaMismatch, match="another program"):
        asyncio.run(driver.open())
    assert relations(raw) == {table}


def test_another_programs_migrations_are_not_touched(driver: PostgresDriver, raw: Raw) -> None:
    raw(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(raw.schema)))
    raw("CREATE TABLE migrations (id integer, name text)")
    with pytest.raises(SchemaMismatch):
        asyncio.run(driver.open())
    assert relations(raw) == {"migrations"}


async def test_a_schema_that_is_there_and_empty_is_used(
    driver: PostgresDriver, raw: Raw, record: MakeRecord
) -> None:
    raw(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(raw.schema)))

    async with driver:
        await work(driver, record)


def test_an_older_version_refuses_what_a_newer_one_broke(driver: PostgresDriver, postgres_url: str) -> None:
    apply(postgres_url, newer(Migration("0999_other_world", f"{BREAKS}\nCREATE TABLE other (name text);\n")))
    with pytest.raises(SchemaMismatch, match="0999_other_world"):
        asyncio.run(driver.open())
    with pytest.raises(SchemaMismatch, match="0999_other_world"):
        asyncio.run(driver.migrate(dry_run=True))


async def test_an_older_version_works_beside_a_newer_one(
    driver: PostgresDriver, postgres_url: str, record: MakeRecord
) -> None:
    """Opened before the newer one came, and after."""
    step = Migration(
        "0999_colour",
        "ALTER TABLE jobs ADD COLUMN colour text;\n"
        "ALTER TABLE queues ADD COLUMN colour text NOT NULL DEFAULT 'red';\n"
        "ALTER TABLE ended ADD COLUMN colour text;\n"
        "ALTER TABLE attempts ADD COLUMN colour text;\n"
        "CREATE INDEX jobs_colour ON jobs (colour);\n"
        "CREATE TABLE shades (name text);\n",
    )

    async with driver:
        # Often enough for plans to be kept.
        for _ in range(7):
            await work(driver, record)
        assert await asyncio.to_thread(apply, postgres_url, newer(step)) == ["0999_colour"]
        await work(driver, record)
        async with driver.clone() as later:
            await work(later, record)


def functions_of(version: int, text: str) -> Migration:
    return Migration(f"functions_{version:04}_00000000", text)


def test_functions_are_installed_again_where_the_store_has_others(postgres_url: str, raw: Raw) -> None:
    *tables, functions = known_steps()
    apply(postgres_url, [*tables, functions_of(FUNCTIONS_VERSION, functions.sql)])
    raw("DROP FUNCTION cancel")
    assert apply(postgres_url, newer()) == [functions.name]
    assert raw.one("SELECT count(*) FROM pg_proc WHERE proname = 'cancel' AND pronamespace = %s::regnamespace",
                   f'"{raw.schema}"') == 1  # fmt: skip
    assert apply(postgres_url, newer()) == []


def test_an_older_version_leaves_the_functions_of_a_newer_one_alone(
    driver: PostgresDriver, postgres_url: str, raw: Raw, record: MakeRecord
) -> None:
    *tables, functions = known_steps()
    later = functions_of(FUNCTIONS_VERSION + 1, functions.sql)
    assert apply(postgres_url, [*tables, later]) == [*NAMES[:-1], later.name]

    async def use() -> None:
        async with driver:
            assert await driver.migrate(dry_run=True) == []
            await work(driver, record)

    asyncio.run(use())
    assert raw("SELECT name FROM migrations WHERE starts_with(name, 'functions_')") == [(later.name,)]


def test_a_store_from_before_the_first_release_is_refused(postgres_url: str, raw: Raw) -> None:
    apply(postgres_url, newer())
    raw("UPDATE migrations SET name = '0001_tables' WHERE starts_with(name, 'functions_')")
    with pytest.raises(SchemaMismatch, match="before the first release"):
        asyncio.run(PostgresDriver.from_url(postgres_url).open())


def test_a_step_that_fails_leaves_nothing(postgres_url: str, raw: Raw) -> None:
    apply(postgres_url, newer())
    before = relations(raw)
    broken = Migration("0999_broken", "CREATE TABLE half (name text);\nCREATE TABLE half (name text);\n")
    with pytest.raises(TaskHarborError, match="half"):
        apply(postgres_url, newer(broken))
    assert relations(raw) == before
    assert apply(postgres_url, newer()) == []


def test_steps_taken_before_one_that_fails_are_kept(postgres_url: str, raw: Raw) -> None:
    first, *rest = known_steps()
    with pytest.raises(TaskHarborError):
        apply(postgres_url, [first, Migration("0002_broken", "SELECT 1 / 0")])
    assert raw("SELECT name FROM migrations") == [(first.name,)]
    assert apply(postgres_url, [first, *rest]) == NAMES[1:]


def test_numbers_in_the_tables_mean_what_they_always_meant() -> None:
    """Changing the order of an enum would silently change every stored job."""
    assert [*STATES] == ["scheduled", "ready", "blocked", "inflight", "done", "dead", "cancelled"]
    assert [*OUTCOMES] == [
        "done",
        "retried",
        "dead",
        "expired",
        "released",
        "cancelled",
        "merged",
        "requeued",
    ]


def test_from_the_command_line(postgres_url: str, raw: Raw) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(root, ["migrate", "--url", postgres_url, *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    assert json.loads(run("--dry-run", "--json")) == {"steps": NAMES, "dry_run": True}
    assert relations(raw) == set()
    assert run("--dry-run") == "".join(f"would apply {name}\n" for name in NAMES)
    assert run() == "".join(f"applied {name}\n" for name in NAMES)
    assert run() == "up to date\n"


# -- roles ----------------------------------------------------------------------------------------------------


@pytest.fixture
def role(postgres_url: str, raw: Raw) -> Iterator[tuple[str, str]]:
    """A role that may only connect, and the URL with it."""
    name = f"th_role_{secrets.token_hex(4)}"
    apply(postgres_url, newer())
    raw(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'p'").format(sql.Identifier(name)))
    parts = urlsplit(postgres_url)
    yield name, urlunsplit(parts._replace(netloc=f"{name}:p@{parts.hostname}:{parts.port}"))
    raw(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
    raw(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def grant(raw: Raw, to: str, *grants: str) -> None:
    for one in grants:
        raw(sql.SQL("GRANT {} TO {}").format(sql.SQL(one), sql.Identifier(to)))  # type: ignore[arg-type]


def worker_grants(schema: str) -> list[str]:
    """What the documentation tells an administrator to grant to a role that does everything but change the schema."""
    return [
        f'USAGE ON SCHEMA "{schema}"',
        "SELECT, INSERT, UPDATE, DELETE ON queues, jobs, ended, finished, dead, idempotency",
        "SELECT, INSERT, DELETE ON moves",
        "SELECT, INSERT ON attempts",
        "SELECT, UPDATE ON upkeep",
        "SELECT, INSERT, UPDATE, DELETE ON repeated",
        "SELECT ON migrations, epochs, job_records",
        "USAGE, SELECT ON SEQUENCE job_seq",
        "USAGE ON SEQUENCE attempt_seq",
        "EXECUTE ON FUNCTION add_days, drop_days, prune, begin_epoch",
    ]


def producer_grants(schema: str) -> list[str]:
    """And to one that only enqueues."""
    return [
        f'USAGE ON SCHEMA "{schema}"',
        "SELECT, INSERT, UPDATE, DELETE ON jobs",
        "SELECT, INSERT, DELETE ON queues",
        "SELECT, INSERT, UPDATE, DELETE ON idempotency",
        "INSERT ON moves",
        "SELECT, INSERT ON repeated",
        "SELECT ON ended, finished, dead, migrations, epochs",
        "USAGE ON SEQUENCE job_seq",
    ]


async def test_a_role_that_may_not_change_the_schema_can_work(
    role: tuple[str, str], raw: Raw, record: MakeRecord
) -> None:
    name, url = role
    grant(raw, name, *worker_grants(raw.schema))

    async with PostgresDriver.from_url(url) as driver:
        for _ in range(2):
            await work(driver, record)
            # Its turn to fold.
            raw("UPDATE upkeep SET folded_at = '-infinity'")
    async with PostgresDriver.from_url(f"{url}&migrate=off") as driver:
        await work(driver, record)


async def test_a_role_that_only_enqueues_needs_less(
    role: tuple[str, str], raw: Raw, record: MakeRecord
) -> None:
    name, url = role
    grant(raw, name, *producer_grants(raw.schema))

    async with PostgresDriver.from_url(url) as driver:
        for _ in range(3):
            await driver.enqueue([record()], now=NOW, new_ids=True)
        await driver.enqueue([record(), record()], now=NOW)
        await driver.enqueue([record(key="k", queue="new")], now=NOW)
        (answer,) = await driver.enqueue([record(key="k", queue="new", idempotency_key="i")], now=NOW)
        assert answer.existed
        await driver.enqueue([record(idempotency_key="i")], now=NOW)
        with pytest.raises(BackendUnavailable, match="privilege"):
            await driver.reserve("q", limit=1, lease_for=SECOND, now=NOW, worker="w")


def test_a_role_without_any_rights_is_told_so(role: tuple[str, str]) -> None:
    _, url = role
    with pytest.raises(TaskHarborError, match=r"privilege|missing or old"):
        asyncio.run(PostgresDriver.from_url(url).open())


def test_a_role_that_may_not_create_the_schema_is_told_so(role: tuple[str, str]) -> None:
    _, url = role
    elsewhere = PostgresDriver.from_url(url.partition("schema=")[0] + "schema=th_nobodys")
    with pytest.raises(BackendUnavailable, match="taskharbor migrate"):
        asyncio.run(elsewhere.open())
