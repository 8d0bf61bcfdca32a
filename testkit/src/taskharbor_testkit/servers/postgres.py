"""PostgreSQL for tests: servers by their address, servers of one's own, one that all tests of a process share; PgBouncer.

Tests of outages need a server that can be crashed, frozen and failed over without asking anybody, and benchmarks one
whose settings are known. It trusts every connection, and listens on the loopback interface only. Tests that share a
server are kept apart by a schema each.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from taskharbor_testkit.servers.discovery import find_pgbouncer, find_postgres, initialised_data, reachable
from taskharbor_testkit.servers.process import HOST, ServerFailed, ServerProcess, once, run, set_option

StopMode = Literal["fast", "immediate"]

_SIGNALS: Mapping[StopMode, signal.Signals] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

_SETTINGS = {"listen_addresses": HOST, "unix_socket_directories": "", "shared_buffers": "64MB"}
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}

_POOLER_SETTINGS = {
    "listen_addr": HOST,
    "unix_socket_dir": "",
    "auth_type": "any",
    "pool_mode": "transaction",
    "max_client_conn": "500",
    # A test that restarts its server would otherwise wait for PgBouncer to try again.
    "server_login_retry": "1",
}


class PostgresAt:
    """A superuser's view of the server at a URL, whoever runs it."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def version(self) -> int:
        """The major."""
        ((number,),) = self.execute("SELECT current_setting('server_version_num')::int / 10000")
        return int(number)

    def create_database(self, name: str) -> str:
        """Returns its URL."""
        from psycopg import sql

        self.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{quote(name, safe='')}"))

    def execute(self, statement: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own; its rows, where it has any."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []


class PostgresServer(ServerProcess, PostgresAt):
    """Made by `start()` and by `standby()`; a context manager that removes the server in the end."""

    version: int = 0

    def __init__(self, version: int, binaries: Path) -> None:
        super().__init__("postgres")
        self.url = ""
        self.version = version
        self.data = self.directory / "data"
        self._bin = binaries
        self._primary: PostgresServer | None = None

    @classmethod
    def start(
        cls, *, version: int | None = None, durable: bool = False, settings: Mapping[str, str] | None = None
    ) -> Self:
        """Start a server of this major, or of the newest that there is.

        Not durable, it never waits for a disk: a fast `stop` loses nothing, an immediate one, `kill` or a power cut may
        take the last commits. Durable, it runs with PostgreSQL's own defaults. `settings` go into postgresql.conf and win
        over both.
        """
        version, binaries = find_postgres(version)
        # Wheels keep the libraries they bring next to the package, and programs find them by the relative path.
        package = binaries.parent.parent
        program = reachable(binaries / "postgres", binaries.parent, package.with_name(f"{package.name}.libs"))
        server = cls(version, program.parent)
        run("cp", "-Rp", initialised_data(server._bin), server.data, cwd=server.directory)
        server._configure({**_SETTINGS, **({} if durable else _NOT_DURABLE), **(settings or {})})
        return server.start_on_free_port()

    def stop(self, mode: StopMode = "fast") -> None:
        """Data and port are kept for `restart()`. Immediate is a crash that the next start recovers from."""
        self._terminate(_SIGNALS[mode])

    def restart(self, mode: StopMode = "fast") -> None:
        """On the same port; also after `stop()` and `kill()`."""
        self.stop(mode)
        self._launch()

    def standby(self) -> PostgresServer:
        """A streaming replica, which keeps following until it is promoted or this server is gone."""
        replica = PostgresServer(self.version, self._bin)
        source = f"host={HOST} port={self.port} user=postgres application_name=standby"
        choices = ("-d", source, "-R", "-X", "stream", "-c", "fast", "--no-sync")
        run(self._bin / "pg_basebackup", "-D", replica.data, *choices, cwd=replica.directory)
        replica._primary = self
        return replica.start_on_free_port()

    def catch_up(self) -> None:
        """On a standby: return when it has replayed everything that its primary has committed by now."""
        if self._primary is None:
            raise ServerFailed("only a standby can catch up with its primary, and this server is none")
        # Commits that did not wait for the disk are sent once something after them has.
        self._primary.execute(
            "SELECT set_config('synchronous_commit', 'local', false), pg_logical_emit_message(true, '', '')"
        )
        ((target,),) = self._primary.execute("SELECT pg_current_wal_flush_lsn()::text")
        replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
        self.wait(lambda: self.execute(replayed, [target]) == [(True,)], f"replay up to {target}")

    def promote(self) -> None:
        """Make a standby a primary; returns when it takes writes."""
        run(self._bin / "pg_ctl", "promote", "-D", self.data, "-w", cwd=self.directory)
        self._primary = None

    def _configure(self, settings: Mapping[str, str]) -> None:
        with (self.data / "postgresql.conf").open("a") as file:
            for name, value in settings.items():
                file.write("{} = '{}'\n".format(name, value.replace("'", "''")))

    def _launch(self) -> None:
        self.url = f"postgresql://postgres@{HOST}:{self.port}/postgres"
        self._run([self._bin / "postgres", "-D", self.data, "-p", str(self.port)], self._is_ready)

    def _is_ready(self) -> bool:
        """As pg_ctl finds out. A file of a server that was killed names another process."""
        lines = self._lock_file()
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() in ("ready", "standby")

    def _lock_file(self) -> list[str]:
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _end(self) -> None:
        """It gives back its shared memory. A killed one leaves a segment that a next start would free: there is none."""
        with suppress(ServerFailed):
            self._terminate(signal.SIGQUIT)
        lines = self._lock_file()
        if len(lines) > 6 and lines[6].split():
            ctypes.CDLL(None).shmctl(int(lines[6].split()[-1]), 0, None)


class PgBouncer(ServerProcess):
    """A pooler in front of a server, in transaction mode. Made by `start()`; a context manager that removes it in the end.

    Behind it a session lasts one transaction, so prepared statements, advisory locks, LISTEN and SET are not what they
    seem. Only the real program shows which of these a driver leans on, and which version of it forgives.
    """

    def __init__(self, program: Path, server: PostgresAt, settings: Mapping[str, str]) -> None:
        super().__init__("pgbouncer")
        printed = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        self.version = tuple(int(number) for number in re.findall(r"\d+", printed)[:3])
        self.url = ""
        self._program = program
        self._server = server
        self._settings = settings

    @classmethod
    def start(cls, server: PostgresAt, *, settings: Mapping[str, str] | None = None) -> Self:
        """For every database of the server, as the user of its URL. `settings` go into the [pgbouncer] section."""
        return cls(find_pgbouncer(), server, {**_POOLER_SETTINGS, **(settings or {})}).start_on_free_port()

    def _launch(self) -> None:
        target = urlsplit(self._server.url)
        password = f" password={target.password}" if target.password else ""
        every = f"* = host={target.hostname} port={target.port or 5432} user={target.username or 'postgres'}{password}"
        lines = [f"{name} = {value}" for name, value in self._settings.items()]
        lines = ["[databases]", every, "[pgbouncer]", *lines, f"listen_port = {self.port}"]
        file = self.write_file("pgbouncer.ini", lines)
        self.url = urlunsplit(target._replace(netloc=f"postgres@{HOST}:{self.port}"))
        self._run([self._program, file], lambda: f"listening on {HOST}:{self.port}" in self.logged())


_shared: Callable[[int], PostgresServer] = once(lambda version: PostgresServer.start(version=version))


def shared_postgres(version: int | None = None) -> PostgresServer:
    """This process's server of that major, or of the newest. Stopped at exit; do not stop it, others are on it."""
    return _shared(find_postgres(version)[0])


def given_or_shared_postgres() -> PostgresAt:
    """The server that TASKHARBOR_TEST_POSTGRES names, or else the shared one."""
    given = os.environ.get("TASKHARBOR_TEST_POSTGRES")
    return PostgresAt(given) if given else shared_postgres()


def with_fresh_schema(url: str) -> str:
    """The URL with a `schema` option that nobody has used. The driver makes the schema; `drop_schema(url)` ends it."""
    return set_option(url, "schema", f"th_{secrets.token_hex(6)}")


def drop_schema(url: str) -> None:
    """Drop the schema that the URL names, with everything in it."""
    from psycopg import sql

    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    schema = options.pop("schema")
    server = PostgresAt(urlunsplit(parts._replace(query=urlencode(options))))
    server.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
