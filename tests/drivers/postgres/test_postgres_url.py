"""What a URL may say, and how the driver says no."""

from __future__ import annotations

from urllib.parse import quote, urlsplit, urlunsplit

import pytest
from psycopg import conninfo

from drivers.postgres.harness import NOW, ack, claim, make_record, wait
from drivers.postgres.test_postgres_migrations import work
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError
from taskharbor_testkit.servers import PostgresAt, drop_schema

_PASSWORD = "s3cr3t"


def test_own_options_have_defaults_and_are_understood() -> None:
    options = parse_url("postgresql://host/database")
    assert (options.schema, options.pool_size, options.notify) == ("taskharbor", 4, True)
    assert (options.prepare, options.migrate, options.poll) == (True, True, 0.5)
    assert options.place == "host:5432/database"
    ours = "schema=s&pool_size=9&pool_timeout=1.5&notify=off&poll=2&prepare=off&migrate=off"
    options = parse_url(f"postgresql://h/d?{ours}")
    assert (options.schema, options.pool_size, options.pool_timeout) == ("s", 9, 1.5)
    assert (options.notify, options.poll, options.prepare, options.migrate) == (False, 2.0, False, False)
    assert parse_url("postgres://u@h/d?schema=s") == parse_url("postgresql://u@h/d?schema=s")
    assert isinstance(connect("postgres://h/d"), PostgresDriver)
    options = parse_url(f"postgresql://u:{_PASSWORD}@h/d?sslpassword={_PASSWORD}")
    assert _PASSWORD not in repr(options) + options.place


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://us%40er:s3cr3t@h/data%20base", {"user": "us@er", "password": _PASSWORD, "dbname": "data base"}),
        ("postgresql://one:1,two:2/d?sslmode=require", {"host": "one,two", "port": "1,2", "sslmode": "require"}),
        ("postgresql://h/d?target_session_attrs=read-write", {"target_session_attrs": "read-write"}),
        ("postgresql://h/d?options=-c%20a%3D5s%20-c%20b%3D1s", {"options": "-c a=5s -c b=1s"}),
        ("postgresql:///d?host=/run/postgresql", {"host": "/run/postgresql"}),
        ("postgresql://%2Frun%2Fpostgresql/d", {"host": "/run/postgresql"}),
        ("postgresql://?service=jobs", {"service": "jobs"}),
        ("postgresql://h/d", {"application_name": "taskharbor", "client_encoding": "utf8"}),
        # The user's values win over our defaults, but for the encoding.
        ("postgresql://h/d?application_name=a%20b%2Bc", {"application_name": "a b+c"}),
        ("postgresql://h/d?client_encoding=latin1", {"client_encoding": "utf8"}),
        ("postgresql://h/d?connect_timeout=3&keepalives_idle=7", {"connect_timeout": "3", "keepalives_idle": "7"}),
    ],
)  # fmt: skip
def test_the_rest_goes_to_the_client_library_as_it_is(url: str, told: dict[str, str]) -> None:
    assert told.items() <= conninfo.conninfo_to_dict(parse_url(url).conninfo).items()


@pytest.mark.parametrize(
    "rest",
    [
        *("h/d?bogus=1", f"h/d?bogus={_PASSWORD}", f"h/d?password={_PASSWORD}&bogus=1"),
        *("h/d?schema=", "h/d?schema=pg_mine", "h/d?schema=a%00b"),
        *(f"h/d?schema={'x' * 53}", f"h/d?schema={quote('ä' * 27)}"),
        *("h/d?pool_size=0", "h/d?pool_size=1001", "h/d?pool_timeout=0", "h/d?poll=-1"),
        *("h/d?notify=yes", "h/d?prepare=1", "h/d?migrate="),
        *("[::1/d", "[::1]x/d", "h%zz/d", "h/d%zz", "h:1:2/d?x"),
    ],
)
@pytest.mark.parametrize(
    "before",
    [
        *("postgresql://", f"postgresql://user:{_PASSWORD}@", f"postgresql://u:a@b{_PASSWORD}%zz@"),
        *(f"postgresql+psycopg://:{_PASSWORD}@", f"postgresql:u:{_PASSWORD}@"),
    ],
)
def test_what_makes_no_sense_is_refused_without_the_password(before: str, rest: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_url(before + rest)
    assert _PASSWORD not in repr(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


async def test_a_server_or_database_that_is_not_there_is_named(postgres_server: PostgresAt) -> None:
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:1/d") as refused:
        await connect(f"postgresql://u:{_PASSWORD}@127.0.0.1:1/d").open()
    assert _PASSWORD not in str(refused.value)
    nowhere = urlunsplit(urlsplit(postgres_server.url)._replace(path="/nowhere"))
    with pytest.raises(BackendUnavailable, match=r"nowhere.* does not exist"):
        await connect(nowhere).open()


@pytest.mark.parametrize("option", ["sslmode=perhaps", "connect_timeout=soon", "target_session_attrs=odd"])
async def test_a_value_that_the_client_library_refuses_is_an_error_of_ours(option: str) -> None:
    with pytest.raises(TaskHarborError):
        await connect(f"postgresql://127.0.0.1:1/d?{option}").open()


async def test_a_driver_that_is_not_open_says_so() -> None:
    driver = PostgresDriver.from_url("postgresql://h/d")
    for call in (driver.stats(now=0), wait(driver, "q", timeout=0)):
        with pytest.raises(BackendUnavailable, match="open"):
            await call


@pytest.mark.parametrize("option", ["client_encoding=latin1", "options=-c%20client_encoding%3Dlatin1"])
async def test_texts_of_any_alphabet(url: str, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    async with PostgresDriver.from_url(f"{url}&{option}") as driver:
        name = "\u65e5\u672c"
        await driver.enqueue([make_record(name, type=name, queue=name)], now=NOW)
        (job,) = await claim(driver, queue=name, worker=name)
        assert (job.id, job.worker) == (name, name)


_SCHEMAS = [
    'say "hi", it\'s 100% %s %(x)s {x} \\',
    "$schema $1; DROP two $$ signs",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("späße a.b UPPER", "select", "ä" * 26)),
]


@pytest.mark.parametrize("schema", _SCHEMAS)
async def test_any_name_of_a_schema_works(postgres_server: PostgresAt, schema: str) -> None:
    base = postgres_server.url
    url = f"{base}{'&' if '?' in base else '?'}schema={quote(schema, safe='')}"
    try:
        for options in ("", "&prepare=off&notify=off&poll=0.01"):
            async with PostgresDriver.from_url(url + options) as driver, driver.clone() as other:
                await work(driver)
                await wait(driver, "q", timeout=0)
                await other.enqueue([make_record()], now=NOW)
                assert await wait(driver, "q") is True
                await ack(other, await claim(other))
                await other.purge(JobFilter())
        found = postgres_server.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [schema])
        assert found == [(1,)]
    finally:
        drop_schema(url)
