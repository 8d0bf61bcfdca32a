"""What a URL may say, and how the driver says no."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import pytest
from psycopg import conninfo

from drivers.postgres.pg_harness import NOW
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres.options import Options, parse_url
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor_testkit.servers import PostgresAt, drop_schema, with_fresh_schema
from taskharbor_testkit.waits import waits_of

_PASSWORD = "s3cr3t"


def given(url: str) -> dict[str, Any]:
    """What the client library is told."""
    return conninfo.conninfo_to_dict(parse_url(url).conninfo)


def test_a_bare_url_has_the_defaults() -> None:
    options = parse_url("postgresql://host/database")
    assert (options.schema, options.pool_size, options.notify) == ("taskharbor", 4, True)
    assert (options.prepare, options.migrate, options.poll) == (True, True, 0.5)
    assert options.place == "host:5432/database"


def test_both_names_of_the_scheme_are_the_same() -> None:
    assert parse_url("postgres://u@h/d?schema=s") == parse_url("postgresql://u@h/d?schema=s")
    assert isinstance(connect("postgres://h/d"), PostgresDriver)


def test_own_options_are_understood() -> None:
    options = parse_url(
        "postgresql://h/d?schema=s&pool_size=9&pool_timeout=1.5&notify=off&poll=2&prepare=off&migrate=off"
    )
    assert (options.schema, options.pool_size, options.pool_timeout) == ("s", 9, 1.5)
    assert (options.notify, options.poll, options.prepare, options.migrate) == (False, 2.0, False, False)


def test_the_rest_goes_to_the_client_library_as_it_is() -> None:
    url = (
        f"postgresql://us%40er:{_PASSWORD}@one:1,two:2/data%20base?sslmode=require&application_name=a%20b%2Bc"
        "&target_session_attrs=read-write&options=-c%20statement_timeout%3D5s%20-c%20lock_timeout%3D1s"
    )
    told = given(url)
    assert (told["user"], told["password"], told["dbname"]) == ("us@er", _PASSWORD, "data base")
    assert (told["host"], told["port"]) == ("one,two", "1,2")
    assert (told["sslmode"], told["target_session_attrs"]) == ("require", "read-write")
    assert told["application_name"] == "a b+c"
    assert told["options"] == "-c statement_timeout=5s -c lock_timeout=1s"


def test_what_the_user_says_wins_over_our_defaults() -> None:
    assert given("postgresql://h/d")["application_name"] == "taskharbor"
    told = given("postgresql://h/d?application_name=mine&connect_timeout=3&keepalives_idle=7")
    assert (told["application_name"], told["connect_timeout"], told["keepalives_idle"]) == ("mine", "3", "7")


def test_a_socket_directory_and_a_service_need_no_host() -> None:
    assert given("postgresql:///d?host=/run/postgresql")["host"] == "/run/postgresql"
    assert given("postgresql://%2Frun%2Fpostgresql/d")["host"] == "/run/postgresql"
    assert given("postgresql://?service=jobs")["service"] == "jobs"


@pytest.mark.parametrize(
    "rest",
    [
        "h/d?bogus=1",
        "h/d?schema=",
        "h/d?schema=pg_mine",
        "h/d?schema=a%00b",
        f"h/d?schema={'x' * 53}",
        f"h/d?schema={quote('ä' * 27)}",
        "h/d?pool_size=0",
        "h/d?pool_size=1001",
        "h/d?pool_size=-1",
        "h/d?pool_size=four",
        "h/d?pool_size=",
        "h/d?pool_timeout=0",
        "h/d?pool_timeout=nan",
        "h/d?pool_timeout=inf",
        "h/d?pool_timeout=soon",
        "h/d?poll=-1",
        "h/d?notify=yes",
        "h/d?prepare=1",
        "h/d?migrate=",
        "[::1/d",
        "[::1]x/d",
        "h%zz/d",
        "h/d%zz",
    ],
)
@pytest.mark.parametrize(
    "before", ["postgresql://", f"postgresql://user:{_PASSWORD}@", f"postgres://:{_PASSWORD}@"]
)
def test_what_makes_no_sense_is_refused_before_any_work(before: str, rest: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PostgresDriver.from_url(before + rest)
    assert _PASSWORD not in str(refused.value)
    assert _PASSWORD not in repr(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{_PASSWORD}%zz@h/d",
        f"postgresql://u:{_PASSWORD}%zz@h/d?schema=s",
        f"postgresql://h/d?password={_PASSWORD}&bogus=1",
        f"postgresql://h/d?bogus={_PASSWORD}",
        f"postgresql://u:{_PASSWORD}@h/d?password={_PASSWORD}&pool_size=x",
        f"postgresql://u:x{_PASSWORD}@[::1/d",
        f"postgresql://u:a@b{_PASSWORD}@h:1:2/d?x",
        f"postgresql+psycopg://u:{_PASSWORD}@h/d",
        f"mysql://u:{_PASSWORD}@h/d",
        f"postgresql:u:{_PASSWORD}@h/d",
    ],
)
def test_a_refusal_does_not_show_the_password(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_url(url)
    assert _PASSWORD not in repr(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_options_can_be_printed() -> None:
    options = parse_url(f"postgresql://u:{_PASSWORD}@h/d?sslpassword={_PASSWORD}")
    assert isinstance(options, Options)
    assert _PASSWORD not in repr(options)
    assert _PASSWORD not in options.place


def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    driver = connect(f"postgresql://u:{_PASSWORD}@127.0.0.1:1/d")
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:1/d") as refused:
        asyncio.run(driver.open())
    assert _PASSWORD not in str(refused.value)


def test_a_database_that_is_not_there_is_named(postgres_server: PostgresAt) -> None:
    url = urlunsplit(urlsplit(postgres_server.url)._replace(path="/nowhere"))
    with pytest.raises(BackendUnavailable, match=r"nowhere.* does not exist"):
        asyncio.run(connect(url).open())


@pytest.mark.parametrize(
    "option", ["sslmode=perhaps", "connect_timeout=soon", "target_session_attrs=any-old"]
)
def test_a_value_that_the_client_library_refuses_is_an_error_of_ours(option: str) -> None:
    with pytest.raises(TaskHarborError):
        asyncio.run(connect(f"postgresql://127.0.0.1:1/d?{option}").open())


def test_a_driver_that_is_not_open_says_so() -> None:
    driver = PostgresDriver.from_url("postgresql://h/d")
    with pytest.raises(BackendUnavailable, match="open"):
        asyncio.run(driver.stats(now=0))
    with pytest.raises(BackendUnavailable, match="open"):
        asyncio.run(waits_of(driver)(["q"], now=0, timeout=0))


def test_options_for_the_server_arrive(postgres_url: str) -> None:
    async def use() -> str:
        url = f"{postgres_url}&options=-c%20statement_timeout%3D1234ms%20-c%20lock_timeout%3D77ms"
        async with PostgresDriver.from_url(url) as driver:
            setting: str = await driver._query(
                lambda session: session.value("SELECT current_setting('statement_timeout')")
            )
            return setting

    assert asyncio.run(use()) == "1234ms"


_SCHEMAS = [
    'say "hi"',
    "it's",
    "two words",
    "100%",
    "%s %(x)s %%",
    "UPPER",
    "späße 日本",
    "select",
    "a.b",
    "back\\slash",
    "$schema",
    "$1; DROP",
    "two $$ signs",
    "{x}",
    "x" * 52,
    "ä" * 26,
]


@pytest.mark.parametrize("schema", _SCHEMAS)
@pytest.mark.parametrize("options", ["", "&prepare=off&notify=off&poll=0.01"], ids=["", "plain"])
def test_any_name_of_a_schema_works(postgres_server: PostgresAt, schema: str, options: str) -> None:
    base = postgres_server.url
    url = f"{base}{'&' if '?' in base else '?'}schema={quote(schema, safe='')}"

    def job(name: str, **fields: Any) -> JobRecord:
        return JobRecord(id=name, type="t", queue="q %s", run_at_us=NOW, created_at_us=NOW, **fields)

    async def use() -> None:
        async with PostgresDriver.from_url(url + options) as driver, driver.clone() as other:
            await driver.enqueue([job("a"), job("b")], now=NOW)
            await driver.enqueue([job("c", key="k")], now=NOW)
            jobs = await driver.reserve("q %s", limit=9, lease_for=SECOND, now=NOW, worker="w")
            assert [found.id for found in jobs] == ["a", "b", "c"]
            assert await driver.reserve("q %s", limit=9, lease_for=SECOND, now=NOW, worker="w") == []
            await waits_of(driver)(["q %s"], now=NOW, timeout=0)
            assert await waits_of(driver)(["q %s"], now=NOW, timeout=0) is False
            waiter = asyncio.ensure_future(waits_of(driver)(["q %s"], now=NOW, timeout=100))
            await other.enqueue([job("d")], now=NOW)
            assert await waiter is True
            await driver.ack(jobs[0].id, jobs[0].token or "", now=NOW)
            await driver.release(jobs[1].id, jobs[1].token or "", now=NOW)
            assert await driver.reclaim(now=NOW + SECOND) == 1
            await driver.prune(now=NOW)
            assert [one and one.state for one in await driver.get(["a", "b", "x"], now=NOW)] == [
                JobState.DONE,
                JobState.READY,
                None,
            ]
            (stats,) = await driver.stats(now=NOW)
            assert (stats.queue, stats.counts[JobState.READY], stats.done_total) == ("q %s", 3, 1)
            assert len((await driver.read_attempts()).attempts) == 3
            assert await driver.time() > 0
            assert await driver.migrate() == []

    try:
        asyncio.run(use())
        found = postgres_server.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [schema])
        assert found == [(1,)]
    finally:
        drop_schema(url)


@pytest.mark.parametrize("option", ["client_encoding=latin1", "options=-c%20client_encoding%3Dlatin1"])
def test_texts_of_any_alphabet_whatever_the_environment_says(
    postgres_server: PostgresAt, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    url = with_fresh_schema(postgres_server.url)

    async def main() -> None:
        async with PostgresDriver.from_url(f"{url}&{option}") as driver:
            name = "\u65e5\u672c"
            await driver.enqueue(
                [JobRecord(id=name, type=name, queue=name, run_at_us=NOW, created_at_us=NOW)], now=NOW
            )
            (job,) = await driver.reserve(name, limit=1, lease_for=SECOND, now=NOW, worker=name)
            assert (job.id, job.worker) == (name, name)

    asyncio.run(main())
    drop_schema(url)
