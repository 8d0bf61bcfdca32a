"""The servers that other tests rely on, and the failures that can be had from them on purpose."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import generators
from psycopg.rows import tuple_row

from needing import need
from taskharbor_testkit.servers import (
    FaultProxy,
    PgBouncer,
    PostgresAt,
    PostgresServer,
    ServerMissing,
    postgres_versions,
    reaper,
    shared_postgres,
)
from taskharbor_testkit.servers.discovery import find_pgbouncer, find_postgres, find_redis, redis_versions
from taskharbor_testkit.servers.process import ServerFailed
from taskharbor_testkit.servers.proxy import Fault

LOST = (psycopg.OperationalError, psycopg.InterfaceError)


def connect(url: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(url, autocommit=True, connect_timeout=10, row_factory=tuple_row)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer.start() as server:
        yield server


@pytest.fixture
def table(server: PostgresServer) -> Iterator[PostgresServer]:
    server.execute("CREATE TABLE notes (note text)")
    yield server
    server.execute("DROP TABLE notes")


@pytest.fixture
def proxy(table: PostgresServer) -> Iterator[FaultProxy]:
    with FaultProxy.to(table.url) as proxy:
        yield proxy


def notes(server: PostgresAt) -> list[object]:
    return [note for (note,) in server.execute("SELECT note FROM notes ORDER BY note")]


# Servers


def test_every_major_that_is_installed_starts(server: PostgresServer) -> None:
    assert server.version in postgres_versions()
    for version in postgres_versions():
        with PostgresServer.start(version=version) as server:
            assert server.version == PostgresAt(server.url).version == version
            assert server.execute("SHOW timezone") == [("UTC",)]
            assert server.execute("SHOW fsync") == [("off",)]
        assert not server.data.exists()


@pytest.mark.usefixtures("server")
def test_the_newest_major_is_the_default_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = postgres_versions()
    oldest = min(versions)
    monkeypatch.delenv("TASKHARBOR_POSTGRES_BIN", raising=False)
    assert find_postgres()[0] == max(versions)
    monkeypatch.setenv("TASKHARBOR_POSTGRES_BIN", str(versions[oldest]))
    assert find_postgres() == (oldest, versions[oldest])


def test_installed_servers_are_ignored_where_only_those_of_wheels_are_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("TASKHARBOR_POSTGRES_BIN", "TASKHARBOR_REDIS_SERVER", "TASKHARBOR_PGBOUNCER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for program, version in (("redis-server", "Redis server v=99.1.2"), ("pgbouncer", "PgBouncer 99.1.0")):
        (tmp_path / program).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.delenv("TASKHARBOR_TEST_SERVERS", raising=False)
    assert find_redis() == ("99.1.2", tmp_path / "redis-server")
    assert find_pgbouncer() == tmp_path / "pgbouncer"
    monkeypatch.setenv("TASKHARBOR_TEST_SERVERS", "pip")
    assert "99.1.2" not in redis_versions()
    assert all("site-packages" in str(directory) for directory in postgres_versions().values())
    with pytest.raises(ServerMissing, match="PgBouncer was not found"):
        find_pgbouncer()
    monkeypatch.setenv("TASKHARBOR_PGBOUNCER", str(tmp_path / "pgbouncer"))
    assert find_pgbouncer() == tmp_path / "pgbouncer"
    monkeypatch.setenv("TASKHARBOR_TEST_SERVERS", "apt")
    with pytest.raises(ValueError, match="TASKHARBOR_TEST_SERVERS=apt: write pip"):
        find_redis()


def test_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "1")
    with PostgresServer.start(durable=True, settings={"search_path": "it's, public"}) as server:
        assert server.execute("SHOW fsync") == [("on",)]
        assert server.execute("SHOW search_path") == [("it's, public",)]


def test_a_setting_that_postgres_refuses_is_in_the_message() -> None:
    with pytest.raises(ServerFailed, match="max_connections"):
        PostgresServer.start(settings={"max_connections": "many"})


@pytest.mark.usefixtures("server")
def test_a_major_that_nobody_has_is_missing() -> None:
    with pytest.raises(ServerMissing, match=r"PostgreSQL 7 was not found \(found: \[\d"):
        PostgresServer.start(version=7)


def test_a_port_that_was_taken_meanwhile_is_given_up(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskharbor_testkit.servers import process

    ports = iter([server.port, process.free_port()])
    monkeypatch.setattr(process, "free_port", lambda: next(ports))
    with PostgresServer.start() as other:
        assert other.port != server.port
        assert other.execute("SELECT 1") == [(1,)]


def test_databases_are_created(server: PostgresServer) -> None:
    assert PostgresAt(server.create_database("two words")).execute("SELECT current_database()") == [
        ("two words",)
    ]


def test_commits_survive_every_way_to_stop(table: PostgresServer) -> None:
    port = table.port
    table.execute("INSERT INTO notes VALUES ('kept')")
    table.restart()
    table.restart("immediate")
    table.kill()
    assert not table.running
    table.restart()
    assert (table.port, notes(table)) == (port, ["kept"])


def test_a_paused_server_answers_when_it_is_resumed(server: PostgresServer) -> None:
    answers: list[object] = []
    with connect(server.url) as connection:
        server.pause()
        asking = threading.Thread(target=lambda: answers.append(connection.execute("SELECT 1").fetchone()))
        asking.start()
        assert answers == []
        server.resume()
        asking.join()
    assert answers == [(1,)]


def test_a_standby_takes_over() -> None:
    with PostgresServer.start() as primary:
        primary.execute("CREATE TABLE notes (note text)")
        with primary.standby() as standby, FaultProxy.to(primary.url) as proxy:
            primary.execute("INSERT INTO notes VALUES ('replicated')")
            standby.catch_up()
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                standby.execute("INSERT INTO notes VALUES ('refused')")
            primary.kill()
            standby.promote()
            proxy.reroute("127.0.0.1", standby.port)
            PostgresAt(proxy.url_for(primary.url)).execute("INSERT INTO notes VALUES ('taken')")
            assert notes(standby) == ["replicated", "taken"]


@pytest.mark.usefixtures("server")
def test_a_server_does_not_outlive_an_owner_that_is_killed() -> None:
    script = """
from taskharbor_testkit.servers import PostgresServer
server = PostgresServer.start()
print(server.pid, server.data.parent, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        family = [int(pid), *reaper.children(int(pid))]
        assert len(family) > 1
        owner.send_signal(signal.SIGKILL)
        # The reaper holds the other end of the owner's standard output until it is done.
        assert owner.stdout.read() == ""
    assert not any(reaper.alive(pid) for pid in family)
    assert not os.path.exists(directory)


def test_what_a_killed_owner_was_about_to_remove_is_removed(tmp_path: Path) -> None:
    emptied = tmp_path / "emptied"
    emptied.mkdir()
    (emptied / "file").touch()
    reaper.main([f"{emptied}\t0\n", f"{tmp_path}/gone\t0\n"])
    assert not emptied.exists()


@pytest.mark.usefixtures("server")
def test_a_server_nobody_closed_ends_with_the_interpreter() -> None:
    script = """
from taskharbor_testkit.servers import shared_postgres
assert shared_postgres() is shared_postgres()
print(shared_postgres().data.parent)
"""
    command = [sys.executable, "-W", "error", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert not os.path.exists(ended.stdout.strip())


def test_missing_servers_skip_here_and_fail_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="a submarine"):
        need("a submarine")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="a submarine"):
        need("a submarine")


# Fixtures


def test_each_test_has_a_schema_of_its_own(postgres_server: PostgresAt, postgres_url: str) -> None:
    url, _, schema = postgres_url.partition("?schema=")
    assert url == postgres_server.url
    assert schema.startswith("th_")
    assert postgres_server.execute("SELECT to_regnamespace(%s)", [schema]) == [(None,)]
    postgres_server.execute(f"CREATE SCHEMA {schema} CREATE TABLE left_behind ()")


def test_schemas_are_gone_afterwards(postgres_server: PostgresAt) -> None:
    assert postgres_server.execute("SELECT to_regclass('left_behind')") == [(None,)]


def test_the_oldest_server_is_shared_too(oldest_postgres_server: PostgresServer) -> None:
    assert oldest_postgres_server is shared_postgres(min(postgres_versions()))


# The proxy


def test_a_proxy_carries_what_it_is_given(table: PostgresServer, proxy: FaultProxy) -> None:
    large = "x" * 5_000_000
    with connect(proxy.url_for(table.url)) as connection:
        assert connection.execute("SELECT %s::text", [large]).fetchone() == (large,)
        with connection.cursor().copy("COPY notes FROM STDIN") as copy:
            copy.write_row(["copied"])
        with connection.pipeline():
            cursors = [connection.execute("SELECT %s::int", [number]) for number in range(100)]
        assert [cursor.fetchone() for cursor in cursors] == [(number,) for number in range(100)]
        assert proxy.connections == 1
    assert notes(table) == ["copied"]


def test_a_url_keeps_everything_but_the_address(proxy: FaultProxy) -> None:
    assert proxy.url_for("postgresql://me:p%40ss@db:1/jobs?schema=a") == (
        f"postgresql://me:p%40ss@127.0.0.1:{proxy.port}/jobs?schema=a"
    )


def test_a_cut_ends_connections_and_takes_new_ones(table: PostgresServer, proxy: FaultProxy) -> None:
    url = proxy.url_for(table.url)
    with connect(url) as connection:
        proxy.cut()
        with pytest.raises(LOST):
            connection.execute("SELECT 1")
    assert PostgresAt(url).execute("SELECT 1") == [(1,)]


def test_refused_connections_leave_open_ones_alone(table: PostgresServer, proxy: FaultProxy) -> None:
    url = proxy.url_for(table.url)
    with connect(url) as connection:
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError, match="refused"):
            connect(url)
        assert connection.execute("SELECT 1").fetchone() == (1,)
        proxy.accept()
        assert PostgresAt(url).execute("SELECT 1") == [(1,)]


def test_a_server_that_is_down_resets_its_clients(proxy: FaultProxy) -> None:
    proxy.reroute("127.0.0.1", 1)
    with pytest.raises(psycopg.OperationalError):
        connect(proxy.url_for("postgresql://postgres@db/postgres"))


def test_a_stalled_proxy_carries_nothing_until_it_flows(table: PostgresServer, proxy: FaultProxy) -> None:
    answers: list[object] = []
    with connect(proxy.url_for(table.url)) as connection:
        proxy.stall()
        insert = "INSERT INTO notes VALUES ('late') RETURNING note"
        asking = threading.Thread(target=lambda: answers.append(connection.execute(insert).fetchone()))
        asking.start()
        assert (answers, notes(table)) == ([], [])
        proxy.flow()
        asking.join()
    assert (answers, notes(table)) == ([("late",)], ["late"])


def test_a_stalled_proxy_does_not_tell_that_a_client_is_gone(
    table: PostgresServer, proxy: FaultProxy
) -> None:
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leaving'"
    with connect(f"{proxy.url_for(table.url)}?application_name=leaving"):
        proxy.stall()
    assert table.execute(sessions) == [(1,)]
    proxy.flow()
    deadline = time.monotonic() + 10
    while table.execute(sessions) != [(0,)]:
        assert time.monotonic() < deadline


def test_a_request_is_dropped_before_the_server_sees_it(table: PostgresServer, proxy: FaultProxy) -> None:
    with connect(proxy.url_for(table.url)) as connection:
        proxy.cut_before_request(n=2)
        connection.execute("INSERT INTO notes VALUES ('first')")
        with pytest.raises(LOST):
            connection.execute("INSERT INTO notes VALUES (%s)", ["second"])
    assert proxy.triggered.wait(10)
    assert notes(table) == ["first"]


def test_an_answer_is_lost_after_the_commit(table: PostgresServer, proxy: FaultProxy) -> None:
    with connect(proxy.url_for(table.url)) as connection:
        proxy.cut_after_request()
        with pytest.raises(LOST):
            connection.execute("INSERT INTO notes VALUES (%s)", ["ambiguous"])
        assert proxy.triggered.wait(10)
        assert notes(table) == ["ambiguous"]
        assert proxy.connections == 0


@pytest.mark.parametrize(("then", "kept"), [("drop", []), ("lose_answer", ["a", "b"])])
def test_the_fate_of_a_commit(table: PostgresServer, proxy: FaultProxy, then: Fault, kept: list[str]) -> None:
    with connect(proxy.url_for(table.url)) as connection:
        proxy.on_request(b"COMMIT", then)
        connection.autocommit = False
        connection.execute("INSERT INTO notes VALUES ('a')")
        connection.execute("INSERT INTO notes VALUES (%s)", ["b"])
        with pytest.raises(LOST):
            connection.commit()
    assert proxy.triggered.wait(10)
    assert notes(table) == kept


@pytest.mark.parametrize(("then", "kept"), [("drop", ["1"]), ("lose_answer", ["1", "2"])])
def test_a_prepared_statement_is_recognised_when_it_runs(
    table: PostgresServer, proxy: FaultProxy, then: Fault, kept: list[str]
) -> None:
    insert = "INSERT INTO notes VALUES (%s)"
    with connect(proxy.url_for(table.url)) as connection:
        connection.execute(insert, ["1"], prepare=True)
        proxy.on_request(b"INTO notes", then)
        connection.execute("SELECT 1", prepare=True)
        with pytest.raises(LOST):
            connection.execute(insert, ["2"], prepare=True)
    assert proxy.triggered.wait(10)
    assert notes(table) == kept


def test_to_prepare_a_statement_is_not_to_run_it(table: PostgresServer, proxy: FaultProxy) -> None:
    with connect(proxy.url_for(table.url)) as connection:
        proxy.on_request(b"INTO notes", "lose_answer")
        connection.pgconn.prepare(b"later", b"INSERT INTO notes VALUES ('later')")
        assert not proxy.triggered.is_set()
        connection.pgconn.exec_prepared(b"later", [])
        assert proxy.triggered.wait(10)
    assert notes(table) == ["later"]


def test_in_a_pipeline_earlier_answers_arrive_and_later_requests_do_not(
    table: PostgresServer, proxy: FaultProxy
) -> None:
    def message(kind: bytes, body: bytes) -> bytes:
        return kind + (len(body) + 4).to_bytes(4, "big") + body

    def insert(note: bytes) -> bytes:
        return message(b"Q", b"INSERT INTO notes VALUES ('%s') RETURNING note\0" % note)

    with (
        socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client,
        client.makefile("rb") as answers,
    ):
        client.sendall(message(b"", b"\0\3\0\0user\0postgres\0\0"))
        ready = message(b"Z", b"I")
        while not client.recv(65536).endswith(ready):
            pass
        proxy.on_request(b"lost", "lose_answer")
        client.sendall(insert(b"answered") + insert(b"lost") + insert(b"never"))
        received = answers.read(len(ready))
        while not received.endswith(ready):
            received += answers.read(1)
        assert b"answered" in received
        with pytest.raises(ConnectionResetError):
            answers.read(1)
    assert proxy.triggered.wait(10)
    assert notes(table) == ["answered", "lost"]


@pytest.mark.parametrize("match", [b"COPY notes", b"second"])
@pytest.mark.parametrize("extended", [True, False])
def test_copied_data_arrives_and_its_answer_is_lost(
    table: PostgresServer, proxy: FaultProxy, match: bytes, extended: bool
) -> None:
    def copy(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        server = connection.pgconn
        command = b"COPY notes FROM STDIN"
        server.send_query_params(command, []) if extended else server.send_query(command)
        connection.wait(generators.execute(server))
        connection.wait(generators.copy_to(server, b"first\nsecond\n"))
        connection.wait(generators.copy_end(server, None))

    with connect(proxy.url_for(table.url)) as connection:
        proxy.on_request(match, "lose_answer")
        with pytest.raises(LOST):
            copy(connection)
    assert proxy.triggered.wait(10)
    assert notes(table) == ["first", "second"]


def test_what_is_disarmed_does_not_happen(table: PostgresServer, proxy: FaultProxy) -> None:
    with connect(proxy.url_for(table.url)) as connection:
        proxy.cut_before_request()
        proxy.disarm()
        assert connection.execute("SELECT 1").fetchone() == (1,)


# PgBouncer


@pytest.mark.installed
def test_pgbouncer_shares_one_session_between_transactions(server: PostgresServer) -> None:
    with PgBouncer.start(server, settings={"default_pool_size": "1"}) as bouncer:
        assert bouncer.version >= (1, 0)
        with connect(bouncer.url) as one, connect(bouncer.url) as other:
            backend = "SELECT pg_backend_pid()"
            assert one.execute(backend).fetchone() == other.execute(backend).fetchone()
        with FaultProxy.to(bouncer.url) as proxy, connect(proxy.url_for(bouncer.url)) as connection:
            proxy.cut_after_request()
            with pytest.raises(LOST):
                connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        connect(bouncer.url)
