"""The servers that other tests rely on, and the failures that can be had from them on purpose."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import generators
from psycopg.rows import tuple_row

from needing import need
from taskharbor_testkit.servers import (
    Cable,
    PgBouncer,
    PostgresAt,
    PostgresServer,
    ServerFailed,
    ServerMissing,
    guardian,
    postgres_versions,
    shared_postgres,
)
from taskharbor_testkit.servers.binaries import find_postgres

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
def cable(table: PostgresServer) -> Iterator[Cable]:
    with Cable.to(table.url) as cable:
        yield cable


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
    from taskharbor_testkit.servers import postgres

    ports = iter([server.port, postgres.free_port()])
    monkeypatch.setattr(postgres, "free_port", lambda: next(ports))
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
        with primary.standby() as standby, Cable.to(primary.url) as cable:
            primary.execute("INSERT INTO notes VALUES ('replicated')")
            standby.catch_up()
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                standby.execute("INSERT INTO notes VALUES ('refused')")
            primary.kill()
            standby.promote()
            cable.reroute("127.0.0.1", standby.port)
            PostgresAt(cable.url_for(primary.url)).execute("INSERT INTO notes VALUES ('taken')")
            assert notes(standby) == ["replicated", "taken"]


@pytest.mark.usefixtures("server")
def test_a_server_does_not_outlive_an_owner_that_is_killed() -> None:
    script = """
from taskharbor_testkit.servers import PostgresServer
server = PostgresServer.start()
print(server._process.pid, server.data.parent, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        family = [int(pid), *guardian.children(int(pid))]
        assert len(family) > 1
        owner.send_signal(signal.SIGKILL)
        # The guardian holds the other end of the owner's standard output until it is done.
        assert owner.stdout.read() == ""
    assert not any(guardian.alive(pid) for pid in family)
    assert not os.path.exists(directory)


def test_what_a_killed_owner_was_about_to_remove_is_removed(tmp_path: Path) -> None:
    emptied, left = tmp_path / "emptied", tmp_path / "left"
    for directory in (emptied, left):
        directory.mkdir()
        (directory / "file").touch()
    guardian.main([f"guard\t{emptied}\t0\n", f"guard\t{left}\t0\n", f"leave\t{left}\t0\n"])
    assert (emptied.exists(), left.exists()) == (False, True)


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


# Cables


def test_a_cable_carries_what_it_is_given(table: PostgresServer, cable: Cable) -> None:
    large = "x" * 5_000_000
    with connect(cable.url_for(table.url)) as connection:
        assert connection.execute("SELECT %s::text", [large]).fetchone() == (large,)
        with connection.cursor().copy("COPY notes FROM STDIN") as copy:
            copy.write_row(["copied"])
        with connection.pipeline():
            cursors = [connection.execute("SELECT %s::int", [number]) for number in range(100)]
        assert [cursor.fetchone() for cursor in cursors] == [(number,) for number in range(100)]
        assert cable.connections == 1
    assert notes(table) == ["copied"]


def test_a_url_keeps_everything_but_the_address(cable: Cable) -> None:
    assert cable.url_for("postgresql://me:p%40ss@db:1/jobs?schema=a") == (
        f"postgresql://me:p%40ss@127.0.0.1:{cable.port}/jobs?schema=a"
    )


def test_a_cut_ends_connections_and_takes_new_ones(table: PostgresServer, cable: Cable) -> None:
    url = cable.url_for(table.url)
    with connect(url) as connection:
        cable.cut()
        with pytest.raises(LOST):
            connection.execute("SELECT 1")
    assert PostgresAt(url).execute("SELECT 1") == [(1,)]


def test_refused_connections_leave_open_ones_alone(table: PostgresServer, cable: Cable) -> None:
    url = cable.url_for(table.url)
    with connect(url) as connection:
        cable.refuse()
        with pytest.raises(psycopg.OperationalError, match="refused"):
            connect(url)
        assert connection.execute("SELECT 1").fetchone() == (1,)
        cable.accept()
        assert PostgresAt(url).execute("SELECT 1") == [(1,)]


def test_a_server_that_is_down_resets_its_clients(cable: Cable) -> None:
    cable.reroute("127.0.0.1", 1)
    with pytest.raises(psycopg.OperationalError):
        connect(cable.url_for("postgresql://postgres@db/postgres"))


def test_a_stalled_cable_carries_nothing_until_it_flows(table: PostgresServer, cable: Cable) -> None:
    answers: list[object] = []
    with connect(cable.url_for(table.url)) as connection:
        cable.stall()
        insert = "INSERT INTO notes VALUES ('late') RETURNING note"
        asking = threading.Thread(target=lambda: answers.append(connection.execute(insert).fetchone()))
        asking.start()
        assert (answers, notes(table)) == ([], [])
        cable.flow()
        asking.join()
    assert (answers, notes(table)) == ([("late",)], ["late"])


def test_a_request_is_dropped_before_the_server_sees_it(table: PostgresServer, cable: Cable) -> None:
    with connect(cable.url_for(table.url)) as connection:
        cable.cut_before_request(n=2)
        connection.execute("INSERT INTO notes VALUES ('first')")
        with pytest.raises(LOST):
            connection.execute("INSERT INTO notes VALUES (%s)", ["second"])
    assert cable.triggered.wait(10)
    assert notes(table) == ["first"]


def test_an_answer_is_lost_after_the_commit(table: PostgresServer, cable: Cable) -> None:
    with connect(cable.url_for(table.url)) as connection:
        cable.cut_after_request()
        with pytest.raises(LOST):
            connection.execute("INSERT INTO notes VALUES (%s)", ["ambiguous"])
        assert cable.triggered.wait(10)
        assert notes(table) == ["ambiguous"]
        assert cable.connections == 0


@pytest.mark.parametrize(("then", "kept"), [("drop", []), ("lose_answer", ["a", "b"])])
def test_the_fate_of_a_commit(table: PostgresServer, cable: Cable, then: str, kept: list[str]) -> None:
    with connect(cable.url_for(table.url)) as connection:
        cable.on_request(b"COMMIT", then)
        connection.autocommit = False
        connection.execute("INSERT INTO notes VALUES ('a')")
        connection.execute("INSERT INTO notes VALUES (%s)", ["b"])
        with pytest.raises(LOST):
            connection.commit()
    assert cable.triggered.wait(10)
    assert notes(table) == kept


@pytest.mark.parametrize(("then", "kept"), [("drop", ["1"]), ("lose_answer", ["1", "2"])])
def test_a_prepared_statement_is_recognised_when_it_runs(
    table: PostgresServer, cable: Cable, then: str, kept: list[str]
) -> None:
    insert = "INSERT INTO notes VALUES (%s)"
    with connect(cable.url_for(table.url)) as connection:
        connection.execute(insert, ["1"], prepare=True)
        cable.on_request(b"INTO notes", then)
        connection.execute("SELECT 1", prepare=True)
        with pytest.raises(LOST):
            connection.execute(insert, ["2"], prepare=True)
    assert cable.triggered.wait(10)
    assert notes(table) == kept


def test_to_prepare_a_statement_is_not_to_run_it(table: PostgresServer, cable: Cable) -> None:
    with connect(cable.url_for(table.url)) as connection:
        cable.on_request(b"INTO notes", "lose_answer")
        connection.pgconn.prepare(b"later", b"INSERT INTO notes VALUES ('later')")
        assert not cable.triggered.is_set()
        connection.pgconn.exec_prepared(b"later", [])
        assert cable.triggered.wait(10)
    assert notes(table) == ["later"]


def test_in_a_pipeline_earlier_answers_arrive_and_later_requests_do_not(
    table: PostgresServer, cable: Cable
) -> None:
    def message(kind: bytes, body: bytes) -> bytes:
        return kind + (len(body) + 4).to_bytes(4, "big") + body

    def insert(note: bytes) -> bytes:
        return message(b"Q", b"INSERT INTO notes VALUES ('%s') RETURNING note\0" % note)

    with (
        socket.create_connection(("127.0.0.1", cable.port), timeout=10) as client,
        client.makefile("rb") as answers,
    ):
        client.sendall(message(b"", b"\0\3\0\0user\0postgres\0\0"))
        ready = message(b"Z", b"I")
        while not client.recv(65536).endswith(ready):
            pass
        cable.on_request(b"lost", "lose_answer")
        client.sendall(insert(b"answered") + insert(b"lost") + insert(b"never"))
        received = answers.read(len(ready))
        while not received.endswith(ready):
            received += answers.read(1)
        assert b"answered" in received
        with pytest.raises(ConnectionResetError):
            answers.read(1)
    assert cable.triggered.wait(10)
    assert notes(table) == ["answered", "lost"]


@pytest.mark.parametrize("match", [b"COPY notes", b"second"])
@pytest.mark.parametrize("extended", [True, False])
def test_copied_data_arrives_and_its_answer_is_lost(
    table: PostgresServer, cable: Cable, match: bytes, extended: bool
) -> None:
    def copy(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        server = connection.pgconn
        send = server.send_query_params if extended else server.send_query
        send(b"COPY notes FROM STDIN", *([[]] if extended else []))
        connection.wait(generators.execute(server))
        connection.wait(generators.copy_to(server, b"first\nsecond\n"))
        connection.wait(generators.copy_end(server, None))

    with connect(cable.url_for(table.url)) as connection:
        cable.on_request(match, "lose_answer")
        with pytest.raises(LOST):
            copy(connection)
    assert cable.triggered.wait(10)
    assert notes(table) == ["first", "second"]


def test_what_is_disarmed_does_not_happen(table: PostgresServer, cable: Cable) -> None:
    with connect(cable.url_for(table.url)) as connection:
        cable.cut_before_request()
        cable.disarm()
        assert connection.execute("SELECT 1").fetchone() == (1,)


# PgBouncer


def test_pgbouncer_shares_one_session_between_transactions(server: PostgresServer) -> None:
    with PgBouncer.start(server, settings={"default_pool_size": "1"}) as bouncer:
        assert bouncer.version >= (1, 0)
        with connect(bouncer.url) as one, connect(bouncer.url) as other:
            backend = "SELECT pg_backend_pid()"
            assert one.execute(backend).fetchone() == other.execute(backend).fetchone()
        with Cable.to(bouncer.url) as cable, connect(cable.url_for(bouncer.url)) as connection:
            cable.cut_after_request()
            with pytest.raises(LOST):
                connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        connect(bouncer.url)
