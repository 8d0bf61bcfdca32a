"""A job enqueued within the caller's transaction is there if and only if that transaction commits."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from drivers.postgres.transaction_callers import (
    CALLERS,
    VARIANTS,
    AsyncCaller,
    Caller,
    DjangoCaller,
    PsycopgAsyncCaller,
    PsycopgCaller,
    SQLAlchemyAsyncSessionCaller,
    SQLAlchemySessionCaller,
    sqlalchemy_url,
)
from taskharbor import AsyncClient, Client, Harbor, JobRequest, JobState
from taskharbor.clock import FakeClock
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.errors import InvalidRequest, SchemaMismatch
from taskharbor_testkit.servers import PostgresAt, ServerMissing

LONG = 60.0
"""A time-out that only a missed wake-up would let pass."""


class App:
    """An app on a fresh schema, and one job of it."""

    def __init__(self, url: str) -> None:
        self.harbor = Harbor(url)
        self.schema = parse_url(url).schema

        @self.harbor.job(max_attempts=3)
        async def double(number: int) -> int:
            return 2 * number

        self.double = double

    def jobs(self) -> list[str]:
        """What everybody else sees."""
        return [job.id for job in reversed(self.harbor.client.list_jobs().jobs)]


@pytest.fixture
def app(postgres_url: str) -> Iterator[App]:
    app = App(postgres_url)
    app.harbor.client.open()
    yield app
    app.harbor.close()


@pytest.fixture(params=CALLERS, ids=lambda caller: caller.name)
def caller(request: pytest.FixtureRequest, postgres_server: PostgresAt, app: App) -> Iterator[Caller]:
    yield from _calling(request.param, postgres_server, app)


@pytest.fixture
def connection(postgres_server: PostgresAt) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_server.url) as connection:
        yield connection


def _calling(kind: type[Caller], server: PostgresAt, app: App) -> Iterator[Any]:
    try:
        caller = kind(server.url)
    except ModuleNotFoundError as error:
        # As every other thing that CI has to have.
        raise ServerMissing(f"{kind.name} was not found ({error}): pip install 'taskharbor[dev]'") from None
    try:
        yield caller
    finally:
        if isinstance(caller, AsyncCaller):
            caller.run(app.harbor.close_async())
        caller.close()


def enqueue(app: App, caller: Caller, *args: Any, **options: Any) -> Any:
    return caller.within(lambda transaction: app.double.options(**options).within(transaction).enqueue(*args))


# -- the transaction decides ---------------------------------------------------------------------------------


def test_the_job_is_there_after_the_commit_and_not_before(app: App, caller: Caller) -> None:
    caller.begin()
    handle = enqueue(app, caller, 21)
    assert app.jobs() == []
    assert not handle.existed
    caller.commit()
    assert app.jobs() == [handle.id]
    app.harbor.worker(until_empty=True).run()
    assert handle.result() == 42


def test_a_rollback_leaves_nothing(app: App, caller: Caller) -> None:
    caller.begin()
    enqueue(app, caller, 1)
    enqueue(app, caller, 1, key="k", idempotency_key="i")
    caller.rollback()
    assert app.jobs() == []
    assert app.harbor.client.stats() == []
    # Nothing remembers the keys either.
    caller.begin()
    handle = enqueue(app, caller, 1, key="k", idempotency_key="i")
    caller.commit()
    assert not handle.existed


def test_a_rollback_to_a_savepoint_takes_back_what_came_after_it(app: App, caller: Caller) -> None:
    caller.begin()
    kept = enqueue(app, caller, 1)
    with caller.savepoint():
        enqueue(app, caller, 2)
        enqueue(app, caller, 3, key="k")
    also = enqueue(app, caller, 4, key="k")
    caller.commit()
    assert app.jobs() == [kept.id, also.id]
    (stats,) = app.harbor.client.stats("default")
    assert stats.counts[JobState.READY] == 2


def test_the_job_and_the_callers_own_rows_go_together(app: App, caller: Caller) -> None:
    table = f"{app.schema}.orders"
    with psycopg.connect(caller.server_url, autocommit=True) as other:
        other.execute(f"CREATE TABLE {table} (id integer PRIMARY KEY)")  # type: ignore[arg-type]

        def orders() -> list[tuple[int]]:
            return other.execute(f"TABLE {table}").fetchall()  # type: ignore[arg-type]

        caller.begin()
        caller.execute(f"INSERT INTO {table} VALUES (1)")  # noqa: S608
        enqueue(app, caller, 1)
        caller.rollback()
        assert (orders(), app.jobs()) == ([], [])
        caller.begin()
        caller.execute(f"INSERT INTO {table} VALUES (2)")  # noqa: S608
        handle = enqueue(app, caller, 2)
        caller.commit()
        assert (orders(), app.jobs()) == ([(2,)], [handle.id])


def test_a_batch_keeps_its_order_and_comes_at_once(app: App, caller: Caller) -> None:
    caller.begin()
    handles = caller.within(
        lambda transaction: app.double.within(transaction).enqueue_many([(n,) for n in range(1500)])
    )
    assert app.jobs() == []
    caller.commit()
    (stats,) = app.harbor.client.stats("default")
    assert stats.counts[JobState.READY] == len(handles) == 1500
    payloads = [job.payload for job in app.harbor.client.get_many([one.id for one in handles]) if job]
    assert payloads == [b'{"number":%d}' % n for n in range(1500)]


# -- those who wait ------------------------------------------------------------------------------------------


def test_the_announcement_comes_with_the_commit_and_not_without(app: App, caller: Caller) -> None:
    with psycopg.connect(caller.server_url, autocommit=True) as listener:
        listener.execute(f'LISTEN "taskharbor:{app.schema}"')  # type: ignore[arg-type]

        def heard() -> list[str]:
            # What was sent before this answer has arrived with it.
            listener.execute("SELECT 1")
            return [notify.payload for notify in listener.notifies(timeout=0)]

        caller.begin()
        enqueue(app, caller, 1)
        assert heard() == []
        caller.rollback()
        caller.begin()
        with caller.savepoint():
            enqueue(app, caller, 1)
        caller.commit()
        assert heard() == []
        caller.begin()
        enqueue(app, caller, 1)
        enqueue(app, caller, 2, key="k")
        assert heard() == []
        caller.commit()
        assert [notify.payload for notify in listener.notifies(timeout=LONG, stop_after=1)] == ["default"]


def test_a_worker_that_waits_is_woken(app: App, caller: Caller) -> None:
    worker = app.harbor.worker(max_jobs=2)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        # The first job shows that the worker is up; by the time of the second it has nothing to do but to wait.
        assert app.double.enqueue(1).result(timeout=LONG) == 2
        caller.begin()
        handle = enqueue(app, caller, 21)
        caller.commit()
        assert handle.result(timeout=LONG) == 42
    finally:
        worker.stop()
        thread.join()


def test_without_notify_nothing_is_announced(postgres_url: str, connection: psycopg.Connection[Any]) -> None:
    quiet = App(f"{postgres_url}&notify=off")
    try:
        connection.execute(f'LISTEN "taskharbor:{quiet.schema}"')  # type: ignore[arg-type]
        connection.commit()
        quiet.double.within(connection).enqueue(1)
        connection.commit()
        connection.execute("SELECT 1")
        assert list(connection.notifies(timeout=0)) == []
        assert len(quiet.jobs()) == 1
    finally:
        quiet.harbor.close()


# -- the rules of enqueue ------------------------------------------------------------------------------------


def test_an_idempotency_key_leads_to_the_first_job(app: App, caller: Caller) -> None:
    first = app.double.options(idempotency_key="order:7").enqueue(7)
    caller.begin()
    again = enqueue(app, caller, 7, idempotency_key="order:7")
    other = enqueue(app, caller, 8, idempotency_key="order:8")
    same = enqueue(app, caller, 8, idempotency_key="order:8")
    caller.commit()
    assert (again.id, again.existed) == (first.id, True)
    assert (other.existed, same.existed, same.id) == (False, True, other.id)
    assert app.jobs() == [first.id, other.id]


def test_a_key_that_waits_is_changed_at_commit(app: App, caller: Caller) -> None:
    waiting = app.double.options(key="customer:7").enqueue(1)
    caller.begin()
    changed = enqueue(app, caller, 2, key="customer:7")
    assert (changed.id, changed.existed) == (waiting.id, True)
    assert waiting.record().payload == b'{"number":1}'
    caller.rollback()
    assert waiting.record().payload == b'{"number":1}'
    caller.begin()
    enqueue(app, caller, 3, key="customer:7")
    caller.commit()
    assert waiting.record().payload == b'{"number":3}'


def test_a_key_that_is_inflight_blocks(app: App, caller: Caller) -> None:
    running = app.double.options(key="customer:7").enqueue(1)

    async def reserve_and_finish(finish: bool) -> None:
        async with AsyncClient(app.harbor.driver()) as client:
            now = await client.now()
            if finish:
                await client.driver.ack(running.id, token[0], now=now)
            else:
                (job,) = await client.driver.reserve(
                    "default", limit=1, lease_for=60_000_000, now=now, worker="w"
                )
                token.append(job.token or "")

    token: list[str] = []
    asyncio.run(reserve_and_finish(False))
    caller.begin()
    blocked = enqueue(app, caller, 2, key="customer:7")
    caller.commit()
    assert not blocked.existed
    assert blocked.state() is JobState.BLOCKED
    asyncio.run(reserve_and_finish(True))
    assert blocked.state() is JobState.READY


def test_options_defaults_and_codecs_are_those_of_every_enqueue(app: App, caller: Caller) -> None:
    options: dict[str, Any] = {
        "queue": "mail",
        "priority": 7,
        "delay": 3600,
        "timeout": 5,
        "max_attempts": 9,
        "max_stalls": 2,
        "backoff": (1.5, 20),
        "headers": {"traceparent": 'a"b\\c: %s %% :v1'},
        "codec": "msgpack",
    }
    caller.begin()
    within = enqueue(app, caller, 1, **options).id
    keyed = enqueue(app, caller, 1, **options, key='k:%"\\', idempotency_key="i").id
    caller.commit()
    ordinary = app.double.options(**options).enqueue(1).id

    def settings(job_id: str) -> dict[str, Any]:
        job = app.harbor.client.get(job_id)
        left_out = ("id", "run_at_us", "created_at_us", "key", "idempotency_key")
        return {name: getattr(job, name) for name in job.__struct_fields__ if name not in left_out} | {
            "delay": job.run_at_us - job.created_at_us
        }

    assert settings(within) == settings(keyed) == settings(ordinary)
    assert app.harbor.client.get(keyed).key == 'k:%"\\'


def test_what_does_not_fit_the_signature_is_refused_before_anything_is_sent(app: App, caller: Caller) -> None:
    caller.begin()
    with pytest.raises(InvalidRequest, match="does not fit"):
        enqueue(app, caller, "not a number")
    with pytest.raises(InvalidRequest, match="priority"):
        enqueue(app, caller, 1, priority=10**9)
    handle = enqueue(app, caller, 1)
    caller.commit()
    assert app.jobs() == [handle.id]


def test_clients_enqueue_requests_of_any_kind(app: App, caller: Caller) -> None:
    client: Any = (
        AsyncClient(app.harbor.driver(), clock=FakeClock())
        if isinstance(caller, AsyncCaller)
        else Client(app.harbor.driver(), clock=FakeClock())
    )
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
    if isinstance(caller, AsyncCaller):
        caller.run(client.close())
    else:
        client.close()
    assert [accepted.existed for accepted in (one, *many)] == [False] * 4
    assert none == []
    jobs = app.harbor.client.get_many([one.id, *(accepted.id for accepted in many)])
    assert [(job.type, job.queue) for job in jobs if job] == [
        ("a", "default"),
        ("a", "default"),
        ("b", "other"),
        ("c", "default"),
    ]
    assert {job.created_at_us for job in jobs if job} == {FakeClock().now()}


def test_a_key_is_held_until_the_transaction_ends(
    app: App, connection: psycopg.Connection[Any], postgres_server: PostgresAt
) -> None:
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
def test_a_snapshot_that_stands_still_takes_jobs_but_no_keys(
    app: App, connection: psycopg.Connection[Any], level: str
) -> None:
    app.double.enqueue(0)  # A queue that the snapshot does not show would be a conflict.
    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")  # type: ignore[arg-type]
    connection.execute("SELECT 1")
    app.double.options(key="k").enqueue(1)  # Not seen by the transaction.
    plain = app.double.within(connection).enqueue(2)
    once = app.double.options(idempotency_key="i").within(connection).enqueue(3)
    with pytest.raises(InvalidRequest, match="READ COMMITTED"):
        app.double.options(key="k").within(connection).enqueue(4)
    # The refusal cost nothing: the transaction goes on.
    connection.commit()
    assert app.jobs()[2:] == [plain.id, once.id]


def test_an_idempotency_key_that_a_snapshot_does_not_show_is_a_conflict_of_the_callers(
    app: App, connection: psycopg.Connection[Any]
) -> None:
    app.double.enqueue(0)
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute("SELECT 1")
    app.double.options(idempotency_key="i").enqueue(1)
    with pytest.raises(psycopg.errors.SerializationFailure):
        app.double.options(idempotency_key="i").within(connection).enqueue(1)


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["memory://", "sqlite:///jobs.db"])
def test_other_stores_cannot(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Client(url) as client, pytest.raises(InvalidRequest, match="postgresql://"):
        client.within(Anything())


class Anything:
    def commit(self) -> None: ...

    def rollback(self) -> None: ...


NOT_TRANSACTIONS = {
    "nothing": None,
    "url": "postgresql://localhost/db",
    "number": 7,
    "object": Anything(),
    "class": object,
}


@pytest.mark.parametrize("given", NOT_TRANSACTIONS.values(), ids=NOT_TRANSACTIONS.keys())
def test_what_is_no_transaction_is_refused(app: App, given: Any) -> None:
    with pytest.raises(InvalidRequest, match="SQLAlchemy Session") as refusal:
        app.double.within(given)
    assert type(given).__qualname__ in str(refusal.value)


def test_an_engine_is_no_transaction(app: App, postgres_server: PostgresAt) -> None:
    for caller in _calling(SQLAlchemySessionCaller, postgres_server, app):
        with pytest.raises(InvalidRequest, match=r"sqlalchemy.engine.base.Engine"):
            app.double.within(caller.engine)
    for caller in _calling(PsycopgCaller, postgres_server, app):
        with pytest.raises(InvalidRequest, match=r"psycopg.Cursor"):
            app.double.within(caller.connection.cursor())  # type: ignore[call-overload]


def test_synchronous_and_asynchronous_do_not_mix(app: App, postgres_server: PostgresAt) -> None:
    client: Any = app.harbor.client
    for caller in _calling(PsycopgAsyncCaller, postgres_server, app):
        with pytest.raises(InvalidRequest, match="AsyncClient"):
            client.within(caller.transaction)
    asynchronous: Any = AsyncClient(app.harbor.driver())
    for caller in _calling(PsycopgCaller, postgres_server, app):
        with pytest.raises(InvalidRequest, match="use Client"):
            asynchronous.within(caller.transaction)


def test_autocommit_of_psycopg(app: App, connection: psycopg.Connection[Any]) -> None:
    connection.autocommit = True
    with pytest.raises(InvalidRequest, match=r"connection\.transaction\(\)"):
        app.double.within(connection).enqueue(1)
    with connection.transaction():
        handle = app.double.within(connection).enqueue(2)
        assert app.jobs() == []
    assert app.jobs() == [handle.id]
    with connection.pipeline(), connection.transaction():
        piped = app.double.within(connection).enqueue(3)
    assert app.jobs() == [handle.id, piped.id]


def test_autocommit_of_psycopg_async(app: App, postgres_server: PostgresAt) -> None:
    for caller in _calling(PsycopgAsyncCaller, postgres_server, app):
        caller.run(caller.connection.set_autocommit(True))
        with pytest.raises(InvalidRequest, match=r"connection\.transaction\(\)"):
            enqueue(app, caller, 1)
    assert app.jobs() == []


@pytest.mark.parametrize("kind", [SQLAlchemySessionCaller, SQLAlchemyAsyncSessionCaller])
def test_autocommit_of_sqlalchemy(app: App, postgres_server: PostgresAt, kind: type[Caller]) -> None:
    for caller in _calling(kind, postgres_server, app):
        caller.session.bind = caller.engine.execution_options(isolation_level="AUTOCOMMIT")
        if isinstance(caller, AsyncCaller):
            caller.session.sync_session.bind = caller.session.bind.sync_engine
        with pytest.raises(InvalidRequest, match="AUTOCOMMIT"):
            enqueue(app, caller, 1)
    assert app.jobs() == []


def test_django_outside_of_atomic(app: App, postgres_server: PostgresAt) -> None:
    for caller in _calling(DjangoCaller, postgres_server, app):
        with pytest.raises(InvalidRequest, match=r"transaction\.atomic\(\)"):
            enqueue(app, caller, 1)
        caller.connection.set_autocommit(False)
        handle = enqueue(app, caller, 1)
        assert app.jobs() == []
        caller.connection.commit()
        caller.connection.set_autocommit(True)
        assert app.jobs() == [handle.id]


def test_other_databases_are_refused(app: App, postgres_server: PostgresAt) -> None:
    for _ in _calling(DjangoCaller, postgres_server, app):
        from django.db import connections

        with pytest.raises(InvalidRequest, match="on sqlite"):
            app.double.within(connections["elsewhere"])
    for _ in _calling(SQLAlchemySessionCaller, postgres_server, app):
        from sqlalchemy import create_engine

        elsewhere = create_engine("sqlite://")
        with elsewhere.connect() as connection, pytest.raises(InvalidRequest, match="on sqlite"):
            app.double.within(connection).enqueue(1)
        elsewhere.dispose()


# -- errors on the caller's connection -----------------------------------------------------------------------


def test_a_database_without_the_schema_says_what_to_do(app: App, caller: Caller) -> None:
    if isinstance(caller, AsyncCaller):
        caller.within(lambda _: app.harbor.async_client().now())
    with psycopg.connect(caller.server_url, autocommit=True) as other:
        other.execute(f"ALTER SCHEMA {app.schema} RENAME TO {app.schema}_away")  # type: ignore[arg-type]
        try:
            caller.begin()
            for options in ({}, {"key": "k"}):
                with caller.savepoint(), pytest.raises(SchemaMismatch, match="taskharbor migrate") as refusal:
                    enqueue(app, caller, 1, **options)
                assert refusal.value.__cause__ is not None
            caller.rollback()
        finally:
            other.execute(f"ALTER SCHEMA {app.schema}_away RENAME TO {app.schema}")  # type: ignore[arg-type]


def test_all_other_errors_are_those_of_the_callers_library(
    app: App, connection: psycopg.Connection[Any]
) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        connection.execute("SELECT 1/0")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        app.double.within(connection).enqueue(1)
    connection.close()
    with pytest.raises(psycopg.OperationalError):
        app.double.within(connection).enqueue(1)


def test_a_schema_of_any_name(postgres_server: PostgresAt, caller: Caller) -> None:
    odd = App(f"{postgres_server.url}?schema=a%3Ab%3A%3Ac%25d%20%22%5C%25s")
    try:
        caller.begin()
        plain = enqueue(odd, caller, 1)
        keyed = enqueue(odd, caller, 2, key="k")
        once = enqueue(odd, caller, 2, idempotency_key="i")
        caller.commit()
        assert odd.jobs() == [plain.id, keyed.id, once.id]
    finally:
        if isinstance(caller, AsyncCaller):
            caller.run(odd.harbor.close_async())
        odd.harbor.close()
        name = odd.schema.replace('"', '""')
        postgres_server.execute(f'DROP SCHEMA "{name}" CASCADE')


# -- other connections of the same libraries -----------------------------------------------------------------


@pytest.mark.parametrize("kind", VARIANTS, ids=lambda kind: kind.name)
def test_proxies_of_connections(app: App, postgres_server: PostgresAt, kind: type[Caller]) -> None:
    for caller in _calling(kind, postgres_server, app):
        caller.begin()
        enqueue(app, caller, 1, key="k")
        caller.rollback()
        caller.begin()
        handle = enqueue(app, caller, 2, key="k")
        assert app.jobs() == []
        caller.commit()
        assert app.jobs() == [handle.id]


def test_connections_of_the_callers_own_making(app: App, postgres_server: PostgresAt) -> None:
    class Mine(psycopg.Connection[Any]):
        pass

    from psycopg.rows import dict_row

    with Mine.connect(
        postgres_server.url, row_factory=dict_row, cursor_factory=psycopg.ClientCursor
    ) as connection:
        first = app.double.within(connection).enqueue(1)
        second = app.double.options(idempotency_key="i").within(connection).enqueue(1)
    assert app.jobs() == [first.id, second.id]


def test_a_pooled_connection(app: App, postgres_server: PostgresAt) -> None:
    from psycopg_pool import ConnectionPool

    with ConnectionPool(postgres_server.url, min_size=1, max_size=1, open=True) as pool:
        with contextlib.suppress(LookupError), pool.connection() as connection:
            app.double.within(connection).enqueue(1)
            raise LookupError
        with pool.connection() as connection:
            handle = app.double.within(connection).enqueue(1)
    assert app.jobs() == [handle.id]


def test_the_synchronous_session_inside_run_sync(app: App, postgres_server: PostgresAt) -> None:
    for caller in _calling(SQLAlchemyAsyncSessionCaller, postgres_server, app):
        handle = caller.run(caller.session.run_sync(lambda session: app.double.within(session).enqueue(1)))
        assert app.jobs() == []
        caller.commit()
        assert app.jobs() == [handle.id]


def test_the_guide_runs(app: App, postgres_server: PostgresAt, postgres_url: str) -> None:
    """Not where the other pages run: this one needs a server."""
    page = Path(__file__).parents[3] / "docs" / "transactions.md"
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    database = "postgresql://localhost/app"
    real = {
        f'Harbor("{database}")': f"Harbor({postgres_url!r})",
        f'"{database}"': repr(postgres_server.url),
        f'"{database.replace("://", "+psycopg://")}"': repr(sqlalchemy_url(postgres_server.url)),
    }
    for _ in _calling(DjangoCaller, postgres_server, app):
        try:
            for block in re.findall(
                r"^```python no-run\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
            ):
                for written, meant in real.items():
                    block = block.replace(written, meant)
                exec(compile(block, str(page), "exec", dont_inherit=True), namespace)
            asyncio.run(_place_order(namespace))
            namespace["engine"].dispose()
        finally:
            namespace["harbor"].close()
            postgres_server.execute("DROP TABLE IF EXISTS orders")
    kinds = [job.type for job in app.harbor.client.list_jobs().jobs]
    assert sorted(kinds) == ["invoice"] + ["send_receipt"] * 6


async def _place_order(namespace: dict[str, Any]) -> None:
    await namespace["place_order"]("Ada")
    await namespace["harbor"].close_async()


def test_types_tell_synchronous_from_asynchronous() -> None:
    sample = Path(__file__).parents[2] / "typing" / "within_transactions.py"
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(sample)],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
