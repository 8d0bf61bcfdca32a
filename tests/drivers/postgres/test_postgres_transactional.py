"""A job enqueued within the caller's transaction is there if and only if that transaction commits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connections as django_connections
from psycopg.rows import dict_row
from sqlalchemy import create_engine

from drivers.postgres.harness import Heard, Raw
from drivers.postgres.transaction_callers import CALLERS, AsyncCaller, Caller, sqlalchemy_url
from taskharbor import AsyncClient, Client, Harbor, JobRequest, JobState
from taskharbor.clock import FakeClock
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.errors import InvalidRequest, SchemaMismatch
from taskharbor_testkit.servers import PostgresAt, drop_schema

Connection = psycopg.Connection[Any]


class App:
    """An app on a store, and one job of it."""

    def __init__(self, url: str) -> None:
        self.harbor = Harbor(url)
        self.schema = parse_url(url).schema

        @self.harbor.job(max_attempts=3)
        async def double(number: int) -> int:
            return 2 * number

        self.double = double

    def jobs(self) -> list[str]:
        """The jobs that everybody else sees."""
        return [job.id for job in reversed(self.harbor.client.list_jobs().jobs)]

    def enqueue(self, caller: Caller, *args: Any, **options: Any) -> Any:
        return caller.within(lambda joined: self.double.options(**options).within(joined).enqueue(*args))


@pytest.fixture
def app(url: str) -> Iterator[App]:
    app = App(url)
    app.harbor.client.open()
    yield app
    app.harbor.close()


LIBRARIES = ["psycopg", "psycopg-async", "sqlalchemy-session", "sqlalchemy-async-session", "django"]
# A connection and a session of SQLAlchemy are joined in the same way.
ALIKE = [pytest.param(name, marks=pytest.mark.slow) for name in CALLERS if name.endswith("connection")]


@pytest.fixture(params=[*LIBRARIES, *ALIKE])
def caller(request: pytest.FixtureRequest, postgres_server: PostgresAt, app: App) -> Iterator[Caller]:
    caller = CALLERS[request.param](postgres_server.url)
    yield caller
    if isinstance(caller, AsyncCaller):
        caller.run(app.harbor.close_async())
    caller.close()


def by(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("caller", names, indirect=True)


@pytest.fixture
def connection(postgres_server: PostgresAt) -> Iterator[Connection]:
    with psycopg.connect(postgres_server.url) as connection:
        yield connection


# -- the transaction decides ---------------------------------------------------------------------------------


@by(*CALLERS)
def test_jobs_and_rows_are_there_after_the_commit_and_not_before(app: App, caller: Caller, raw: Raw) -> None:
    """After a rollback, of all or to a savepoint, nothing remembers the keys either."""
    raw("CREATE TABLE orders (id integer PRIMARY KEY)")
    try:
        caller.begin()
        caller.execute(f"INSERT INTO {app.schema}.orders VALUES (1)")  # noqa: S608
        app.enqueue(caller, 1)
        app.enqueue(caller, 1, key="k", idempotency_key="i")
        caller.rollback()
        assert app.harbor.client.stats() == []
        caller.begin()
        caller.execute(f"INSERT INTO {app.schema}.orders VALUES (2)")  # noqa: S608
        kept = app.enqueue(caller, 21, idempotency_key="i")
        with caller.savepoint():
            app.enqueue(caller, 2)
            app.enqueue(caller, 3, key="k")
        also = app.enqueue(caller, 4, key="k")
        assert app.jobs() == []
        caller.commit()
        assert raw("TABLE orders") == [(2,)]
    finally:
        raw("DROP TABLE orders")
    assert [kept.existed, also.existed] == [False, False]
    assert app.jobs() == [kept.id, also.id]
    app.harbor.worker(until_empty=True).run()
    assert kept.result() == 42


def test_a_batch_keeps_its_order_and_comes_at_once(app: App, caller: Caller) -> None:
    caller.begin()
    numbers = [(n,) for n in range(1500)]
    handles = caller.within(lambda transaction: app.double.within(transaction).enqueue_many(numbers))
    assert app.jobs() == []
    caller.commit()
    (stats,) = app.harbor.client.stats("default")
    assert stats.counts[JobState.READY] == len(handles) == 1500
    payloads = [job.payload for job in app.harbor.client.get_many([one.id for one in handles]) if job]
    assert payloads == [b'{"number":%d}' % n for n in range(1500)]


# -- those who wait ------------------------------------------------------------------------------------------


def test_the_announcement_comes_with_the_commit_only(app: App, caller: Caller, heard: Heard) -> None:
    caller.begin()
    app.enqueue(caller, 1)
    caller.rollback()
    caller.begin()
    with caller.savepoint():
        app.enqueue(caller, 1)
    caller.commit()
    assert heard() == []
    caller.begin()
    app.enqueue(caller, 1)
    app.enqueue(caller, 2, key="k")
    assert heard() == []
    caller.commit()
    assert heard() == ["default"]


# -- the rules of enqueue ------------------------------------------------------------------------------------


def test_keys_follow_the_rules_of_every_enqueue(app: App, caller: Caller) -> None:
    first = app.double.options(idempotency_key="order:7").enqueue(7)
    waiting = app.double.options(key="customer:7").enqueue(1)
    caller.begin()
    again = app.enqueue(caller, 7, idempotency_key="order:7")
    other = app.enqueue(caller, 8, idempotency_key="order:8")
    same = app.enqueue(caller, 8, idempotency_key="order:8")
    changed = app.enqueue(caller, 2, key="customer:7")
    assert (changed.id, changed.existed) == (waiting.id, True)
    assert waiting.record().payload == b'{"number":1}'
    caller.commit()
    assert waiting.record().payload == b'{"number":2}'
    assert (again.id, again.existed) == (first.id, True)
    assert (other.existed, same.existed, same.id) == (False, True, other.id)
    assert app.jobs() == [first.id, waiting.id, other.id]


def test_options_defaults_and_codecs_are_those_of_every_enqueue(app: App, caller: Caller) -> None:
    options: dict[str, Any] = {"queue": "mail", "priority": 7, "delay": 3600, "timeout": 5, "max_attempts": 9}
    options |= {"max_stalls": 2, "backoff": (1.5, 20), "codec": "msgpack"}
    options |= {"headers": {"traceparent": 'a"b\\c: %s %% :v1'}}
    caller.begin()
    within = app.enqueue(caller, 1, **options).id
    keyed = app.enqueue(caller, 1, **options, key='k:%"\\', idempotency_key="i").id
    caller.commit()
    ordinary = app.double.options(**options).enqueue(1).id

    def settings(job_id: str) -> dict[str, Any]:
        job = app.harbor.client.get(job_id)
        left_out = ("id", "run_at_us", "created_at_us", "key", "idempotency_key")
        fields = {name: getattr(job, name) for name in job.__struct_fields__ if name not in left_out}
        return fields | {"delay": job.run_at_us - job.created_at_us}

    assert settings(within) == settings(keyed) == settings(ordinary)
    assert app.harbor.client.get(keyed).key == 'k:%"\\'
    assert app.jobs() == [within, keyed, ordinary]


def test_clients_enqueue_requests_of_any_kind(app: App, caller: Caller) -> None:
    kind: Any = AsyncClient if isinstance(caller, AsyncCaller) else Client
    client = kind(app.harbor.driver(), clock=FakeClock())
    requests = [
        JobRequest(type="a", payload={"n": 1}),
        JobRequest(type="b", queue="other", payload=None, idempotency_key="i"),
        JobRequest(type="c", payload=b"\x00\xff".hex(), key="k"),
    ]
    caller.begin()
    one = caller.within(lambda transaction: client.within(transaction).enqueue(requests[0]))
    many = caller.within(lambda transaction: client.within(transaction).enqueue_many(iter(requests)))
    none = caller.within(lambda transaction: client.within(transaction).enqueue_many([]))
    caller.commit()
    caller.run(client.close())
    assert [accepted.existed for accepted in (one, *many)] == [False] * 4
    assert none == []
    jobs = [app.harbor.client.get(accepted.id) for accepted in (one, *many)]
    assert [job.type + job.queue for job in jobs] == ["adefault", "adefault", "bother", "cdefault"]
    assert {job.created_at_us for job in jobs} == {FakeClock().now()}


def test_a_key_is_held_until_the_end(app: App, connection: Connection, postgres_server: PostgresAt) -> None:
    app.double.enqueue(0)  # A queue's first job would hold back everything for that queue.
    held = app.double.options(key="k").within(connection).enqueue(1)
    with psycopg.connect(postgres_server.url, options="-c lock_timeout=50") as other:
        with pytest.raises(psycopg.errors.LockNotAvailable):
            app.double.options(key="k").within(other).enqueue(2)
        other.rollback()
        app.double.options(key="another").within(other).enqueue(2)
        connection.commit()
        met = app.double.options(key="k").within(other).enqueue(2)
    assert (met.id, met.existed) == (held.id, True)


# -- isolation levels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_takes_jobs_but_no_keys(app: App, connection: Connection, level: str) -> None:
    app.double.enqueue(0)  # A queue that the snapshot does not show would be a conflict.
    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
    connection.execute("SELECT 1")
    app.double.options(key="k").enqueue(1)  # Not seen by the transaction.
    plain = app.double.within(connection).enqueue(2)
    once = app.double.options(idempotency_key="i").within(connection).enqueue(3)
    with pytest.raises(InvalidRequest, match="READ COMMITTED"):
        app.double.options(key="k").within(connection).enqueue(4)
    # The refusal cost nothing: the transaction goes on.
    app.double.options(idempotency_key="j").enqueue(1)
    with pytest.raises(psycopg.errors.SerializationFailure), connection.transaction():
        # An idempotency key that the snapshot does not show is a conflict of the caller's.
        app.double.options(idempotency_key="j").within(connection).enqueue(1)
    connection.commit()
    assert {plain.id, once.id} < set(app.jobs())


# -- what is refused -----------------------------------------------------------------------------------------


@by("sqlalchemy-session")
def test_what_is_no_transaction_is_refused(app: App, caller: Any, connection: Connection) -> None:
    given: Any
    for given in (None, "postgresql://localhost/db", 7, object(), object, caller.engine, connection.cursor()):
        with pytest.raises(InvalidRequest, match="SQLAlchemy Session") as refusal:
            app.double.within(given)
        assert type(given).__qualname__ in str(refusal.value)
    with Client("memory://") as client, pytest.raises(InvalidRequest, match="postgresql://"):
        client.within(connection)


@by("psycopg-async")
def test_synchronous_and_asynchronous_do_not_mix(app: App, caller: Caller, connection: Connection) -> None:
    with pytest.raises(InvalidRequest, match="AsyncClient"):
        app.harbor.client.within(caller.transaction)
    asynchronous: Any = AsyncClient(app.harbor.driver())
    with pytest.raises(InvalidRequest, match="use Client"):
        asynchronous.within(connection)


@by(*LIBRARIES)
def test_a_connection_in_autocommit_mode_is_refused(app: App, caller: Caller) -> None:
    caller.set_autocommit()
    with pytest.raises(InvalidRequest, match=caller.how_to_begin):
        app.enqueue(caller, 1)
    assert app.jobs() == []


def test_a_block_on_a_connection_in_autocommit_mode(app: App, connection: Connection) -> None:
    connection.autocommit = True
    with connection.transaction():
        handle = app.double.within(connection).enqueue(2)
        assert app.jobs() == []
    assert app.jobs() == [handle.id]
    with connection.pipeline(), connection.transaction():
        piped = app.double.within(connection).enqueue(3)
    assert app.jobs() == [handle.id, piped.id]


@by("django")
def test_django_without_autocommit(app: App, caller: Caller) -> None:
    connection = caller.transaction
    connection.set_autocommit(False)
    handle = app.enqueue(caller, 1)
    assert app.jobs() == []
    connection.commit()
    connection.set_autocommit(True)
    assert app.jobs() == [handle.id]


@by("django")
def test_other_databases_are_refused(app: App, caller: Caller) -> None:
    with pytest.raises(InvalidRequest, match="on sqlite"):
        app.double.within(django_connections["elsewhere"])
    elsewhere = create_engine("sqlite://")
    with elsewhere.connect() as connection, pytest.raises(InvalidRequest, match="on sqlite"):
        app.double.within(connection).enqueue(1)
    elsewhere.dispose()


# -- errors on the caller's connection -----------------------------------------------------------------------


def test_a_database_without_the_schema_says_what_to_do(app: App, caller: Caller, raw: Raw) -> None:
    if isinstance(caller, AsyncCaller):
        caller.within(lambda _: app.harbor.async_client().now())
    raw(f"ALTER SCHEMA {app.schema} RENAME TO {app.schema}_away")
    try:
        caller.begin()
        for options in ({}, {"key": "k"}):
            with caller.savepoint(), pytest.raises(SchemaMismatch, match="taskharbor migrate") as refusal:
                app.enqueue(caller, 1, **options)
            assert refusal.value.__cause__ is not None
        caller.rollback()
    finally:
        raw(f"ALTER SCHEMA {app.schema}_away RENAME TO {app.schema}")


def test_all_other_errors_are_those_of_the_callers_library(app: App, connection: Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        connection.execute("SELECT 1/0")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        app.double.within(connection).enqueue(1)
    connection.close()
    with pytest.raises(psycopg.OperationalError):
        app.double.within(connection).enqueue(1)


@pytest.fixture(scope="module")
def odd_url(postgres_server: PostgresAt) -> Iterator[str]:
    url = f"{postgres_server.url}?schema=a%3Ab%3A%3Ac%25d%20%22%5C%25s"
    yield url
    drop_schema(url)


def test_a_schema_of_any_name(odd_url: str, caller: Caller) -> None:
    odd = App(odd_url)
    before = odd.jobs()
    caller.begin()
    plain = odd.enqueue(caller, 1)
    keyed = odd.enqueue(caller, 2, key=type(caller).__name__)
    once = odd.enqueue(caller, 2, idempotency_key=type(caller).__name__)
    caller.commit()
    assert odd.jobs() == [*before, plain.id, keyed.id, once.id]
    if isinstance(caller, AsyncCaller):
        caller.run(odd.harbor.close_async())
    odd.harbor.close()


# -- other connections of the same libraries -----------------------------------------------------------------


def test_connections_of_the_callers_own_making(app: App, postgres_server: PostgresAt) -> None:
    class Mine(psycopg.Connection[Any]):
        pass

    factories: Any = {"row_factory": dict_row, "cursor_factory": psycopg.ClientCursor}
    with Mine.connect(postgres_server.url, **factories) as connection:
        first = app.double.within(connection).enqueue(1)
        second = app.double.options(idempotency_key="i").within(connection).enqueue(1)
    assert app.jobs() == [first.id, second.id]


@by("sqlalchemy-async-session")
def test_the_synchronous_session_inside_run_sync(app: App, caller: Any) -> None:
    handle = caller.run(caller.transaction.run_sync(lambda session: app.double.within(session).enqueue(1)))
    assert app.jobs() == []
    caller.commit()
    assert app.jobs() == [handle.id]


@by("django")
def test_the_guide_runs(app: App, caller: Caller, url: str, postgres_server: PostgresAt) -> None:
    """Not where the other pages run: this one needs a server."""
    page = Path(__file__).parents[3] / "docs" / "transactions.md"
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    database = "postgresql://localhost/app"
    real = {
        f'Harbor("{database}")': f"Harbor({url!r})",
        f'"{database}"': repr(postgres_server.url),
        f'"{database.replace("://", "+psycopg://")}"': repr(sqlalchemy_url(postgres_server.url)),
    }

    async def place_order() -> None:
        await namespace["place_order"]("Ada")
        await namespace["harbor"].close_async()

    try:
        for block in re.findall(r"^```python no-run\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for written, meant in real.items():
                block = block.replace(written, meant)
            exec(compile(block, str(page), "exec", dont_inherit=True), namespace)
        asyncio.run(place_order())
        namespace["engine"].dispose()
        kinds = [job.type for job in namespace["harbor"].client.list_jobs().jobs]
        assert sorted(kinds) == ["invoice"] + ["send_receipt"] * 6
    finally:
        namespace["harbor"].close()
        postgres_server.execute("DROP TABLE IF EXISTS orders")
