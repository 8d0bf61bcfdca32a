"""The servers that other tests rely on, and the failures that can be had from them on purpose."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg import generators
from psycopg.rows import tuple_row

from needing import need
from taskharbor_testkit.servers import PostgresAt, PostgresServer, ServerMissing, postgres_versions, reaper
from taskharbor_testkit.servers.discovery import find_pgbouncer, find_postgres, find_redis, redis_versions
from taskharbor_testkit.servers.postgres import PgBouncer
from taskharbor_testkit.servers.process import ServerFailed
from taskharbor_testkit.servers.proxy import Fault, FaultProxy

LOST = (psycopg.OperationalError, psycopg.InterfaceError)
Session = psycopg.Connection[tuple[object, ...]]


def connect(url: str) -> Session:
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


def test_installed_servers_are_ignored_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_the_newest_starts_and_settings_win(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = postgres_versions()
    oldest = min(versions)
    monkeypatch.delenv("TASKHARBOR_POSTGRES_BIN", raising=False)
    assert find_postgres()[0] == max(versions)
    assert server.execute("SHOW timezone") == [("UTC",)]
    assert server.execute("SHOW fsync") == [("off",)]
    monkeypatch.setenv("PGPORT", "1")
    with PostgresServer.start(durable=True, settings={"search_path": "it's, public"}) as other:
        assert other.execute("SHOW fsync") == [("on",)]
        assert other.execute("SHOW search_path") == [("it's, public",)]
        url = other.create_database("two words")
        assert PostgresAt(url).execute("SELECT current_database()") == [("two words",)]
    assert not other.data.exists()
    with pytest.raises(ServerFailed, match="max_connections"):
        PostgresServer.start(settings={"max_connections": "many"})
    with pytest.raises(ServerMissing, match=r"PostgreSQL 7 was not found \(found: \[\d"):
        PostgresServer.start(version=7)
    monkeypatch.setenv("TASKHARBOR_POSTGRES_BIN", str(versions[oldest]))
    assert find_postgres() == (oldest, versions[oldest])


@pytest.mark.usefixtures("server")
def test_a_server_does_not_outlive_an_owner_that_is_killed() -> None:
    script = "from taskharbor_testkit.servers import PostgresServer; server = PostgresServer.start(); "
    script += "print(server.pid, server.data.parent, flush=True); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
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
    (emptied := tmp_path / "emptied").mkdir()
    (emptied / "file").touch()
    reaper.main([f"{emptied}\t0\n", f"{tmp_path}/gone\t0\n"])
    assert not emptied.exists()


@pytest.mark.usefixtures("server")
def test_a_server_nobody_closed_ends_with_the_interpreter() -> None:
    script = "from taskharbor_testkit.servers import shared_postgres as shared; "
    script += "assert shared() is shared(); print(shared().data.parent)"
    command = [sys.executable, "-W", "error", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert not os.path.exists(ended.stdout.strip())


def test_missing_servers_skip_here_and_fail_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for ci, outcome in (("true", pytest.fail.Exception), ("", pytest.skip.Exception)):
        monkeypatch.setenv("CI", ci)
        with pytest.raises(outcome, match="a submarine"):
            need("a submarine")


# The proxy


def test_a_proxy_carries_what_it_is_given(table: PostgresServer, proxy: FaultProxy) -> None:
    large = "x" * 5_000_000
    # Of a URL, everything but the address stays.
    moved = proxy.url_for("postgresql://me:p%40ss@db:1/jobs?schema=a")
    assert moved == f"postgresql://me:p%40ss@127.0.0.1:{proxy.port}/jobs?schema=a"
    with connect(proxy.url_for(table.url)) as connection:
        assert connection.execute("SELECT %s::text", [large]).fetchone() == (large,)
        with connection.cursor().copy("COPY notes FROM STDIN") as copy:
            copy.write_row(["copied"])
        with connection.pipeline():
            cursors = [connection.execute("SELECT %s::int", [number]) for number in range(100)]
        assert [cursor.fetchone() for cursor in cursors] == [(number,) for number in range(100)]
        assert proxy.connections == 1
    assert notes(table) == ["copied"]


def test_cut_and_refused_connections(table: PostgresServer, proxy: FaultProxy) -> None:
    url = proxy.url_for(table.url)
    with connect(url) as connection:
        proxy.cut()
        with pytest.raises(LOST):
            connection.execute("SELECT 1")
    with connect(url) as connection:
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError, match="refused"):
            connect(url)
        assert connection.execute("SELECT 1").fetchone() == (1,)
        proxy.accept()
        assert PostgresAt(url).execute("SELECT 1") == [(1,)]
    # A server that is down.
    proxy.reroute("127.0.0.1", 1)
    with pytest.raises(psycopg.OperationalError):
        connect(url)


def test_a_stalled_proxy_carries_not_even_a_farewell(table: PostgresServer, proxy: FaultProxy) -> None:
    answers: list[object] = []
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leaving'"
    with connect(f"{proxy.url_for(table.url)}?application_name=leaving") as connection:
        proxy.stall()
        insert = "INSERT INTO notes VALUES ('late') RETURNING note"
        asking = threading.Thread(target=lambda: answers.append(connection.execute(insert).fetchone()))
        asking.start()
        assert (answers, notes(table)) == ([], [])
        proxy.flow()
        asking.join()
        proxy.stall()
    assert (answers, notes(table)) == ([("late",)], ["late"])
    assert table.execute(sessions) == [(1,)]
    proxy.flow()
    deadline = time.monotonic() + 10
    while table.execute(sessions) != [(0,)]:
        assert time.monotonic() < deadline


def test_a_fault_is_for_the_nth_request_unless_disarmed(table: PostgresServer, proxy: FaultProxy) -> None:
    with connect(proxy.url_for(table.url)) as connection:
        proxy.cut_before_request()
        proxy.disarm()
        insert(connection, "disarmed")
        proxy.cut_before_request(n=2)
        insert(connection, "first")
        with pytest.raises(LOST):
            insert(connection, "second")
    assert proxy.triggered.wait(10)
    with connect(proxy.url_for(table.url)) as connection:
        proxy.cut_after_request()
        with pytest.raises(LOST):
            insert(connection, "unanswered")
        assert proxy.triggered.wait(10)
        assert proxy.connections == 0
    assert notes(table) == ["disarmed", "first", "unanswered"]


def insert(connection: Session, note: str = "note") -> None:
    connection.execute("INSERT INTO notes VALUES (%s)", [note])


PREPARED = b"INSERT INTO notes VALUES ('note')"


def run_prepared(connection: Session, name: bytes = b"early") -> None:
    connection.pgconn.exec_prepared(name, [])
    connection.execute("SELECT 1")


def prepare_and_run(connection: Session) -> None:
    """To prepare a statement is not to run it."""
    connection.pgconn.prepare(b"later", PREPARED)
    run_prepared(connection, b"later")


def insert_in_transaction(connection: Session) -> None:
    connection.autocommit = False
    insert(connection)
    connection.commit()


def copy(connection: Session, *, extended: bool = True) -> None:
    server, command = connection.pgconn, b"COPY notes FROM STDIN"
    server.send_query_params(command, []) if extended else server.send_query(command)
    connection.wait(generators.execute(server))
    connection.wait(generators.copy_to(server, b"note\n"))
    connection.wait(generators.copy_end(server, None))


COPIES = [
    (one, match) for one in (copy, partial(copy, extended=False)) for match in (b"COPY notes", b"note\n")
]
INSERTS = [(one, b"INTO notes") for one in (insert, run_prepared, prepare_and_run)]
Act = Callable[[Session], None]


@pytest.mark.parametrize(("act", "match"), [*INSERTS, (insert_in_transaction, b"COMMIT"), *COPIES])
def test_the_fate_of_a_request(table: PostgresServer, proxy: FaultProxy, act: Act, match: bytes) -> None:
    faults: list[Fault] = ["lose_answer"] if (act, match) in COPIES else ["drop", "lose_answer"]
    for fault in faults:
        with connect(proxy.url_for(table.url)) as connection:
            connection.pgconn.prepare(b"early", PREPARED)
            proxy.on_request(match, fault)
            with pytest.raises(LOST):
                act(connection)
        assert proxy.triggered.wait(10)
        assert notes(table) == ([] if fault == "drop" else ["note"])


def test_of_a_pipeline_only_what_came_before_arrives(table: PostgresServer, proxy: FaultProxy) -> None:
    def message(kind: bytes, body: bytes) -> bytes:
        return kind + (len(body) + 4).to_bytes(4, "big") + body

    def insert(note: bytes) -> bytes:
        return message(b"Q", b"INSERT INTO notes VALUES ('%s') RETURNING note\0" % note)

    address = ("127.0.0.1", proxy.port)
    with socket.create_connection(address, timeout=10) as client, client.makefile("rb") as answers:
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
