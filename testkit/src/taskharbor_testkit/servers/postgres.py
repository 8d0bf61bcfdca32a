"""A PostgreSQL of one's own: a private data directory, a free loopback port, gone afterwards.

Tests of outages need a server that can be crashed, frozen and failed over without asking anybody, and benchmarks one
whose settings are known. It trusts every connection, and listens on the loopback interface only.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from taskharbor_testkit.servers.account import server_account
from taskharbor_testkit.servers.address import PostgresAt
from taskharbor_testkit.servers.binaries import find_postgres
from taskharbor_testkit.servers.cache import initialised_data, reachable
from taskharbor_testkit.servers.ports import HOST, free_port
from taskharbor_testkit.servers.process import ServerFailed, ServerProcess

StopMode = Literal["fast", "immediate"]

_SIGNALS: Mapping[StopMode, signal.Signals] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_PORTS_TO_TRY = 5
_TAKEN = "Address already in use"

_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class PostgresServer(PostgresAt):
    """Made by `start()` and by `standby()`; a context manager that removes the server in the end."""

    def __init__(self, version: int, binaries: Path) -> None:
        super().__init__("")
        self._version = version
        self.bin = binaries
        self.port = 0
        self._process = ServerProcess("postgres", at_end=self._free_shared_memory)
        self._primary: PostgresServer | None = None
        self.data = self._process.directory / "data"

    @classmethod
    def start(
        cls,
        *,
        version: int | None = None,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a server of this major, or of the newest that is installed.

        Not durable, it never waits for a disk: a fast `stop` loses nothing, an immediate one, `kill` or a power cut may take
        the last commits. Durable, it runs with
        PostgreSQL's own defaults. `settings` go into postgresql.conf and win over both.
        """
        version, binaries = find_postgres(version)
        server = cls(version, reachable(binaries))
        try:
            template = initialised_data(server.bin)
            server_account().run("cp", "-Rp", template, server.data, cwd=server._process.directory)
            server._configure({**_SETTINGS, **({} if durable else _NOT_DURABLE), **(settings or {})})
            server._start_somewhere()
        except BaseException:
            server.close()
            raise
        return server

    @property
    def version(self) -> int:
        """The major."""
        return self._version

    @property
    def log(self) -> Path:
        return self._process.log

    @property
    def running(self) -> bool:
        return self._process.running

    def stop(self, mode: StopMode = "fast") -> None:
        """Data and port are kept for `restart()`. Immediate is a crash that the next start recovers from."""
        self._process.stop(_SIGNALS[mode])

    def restart(self, mode: StopMode = "fast") -> None:
        """On the same port; also after `stop()` and `kill()`."""
        self.stop(mode)
        self._start_at(self.port)

    def kill(self) -> None:
        """SIGKILL to the postmaster and to every process of its."""
        self._process.kill()

    def pause(self) -> None:
        """Freeze it: connections stay open, and new ones are accepted by the kernel, but nothing answers."""
        self._process.pause()

    def resume(self) -> None:
        self._process.resume()

    def standby(self) -> PostgresServer:
        """A streaming replica, which keeps following until it is promoted or this server is gone."""
        replica = PostgresServer(self.version, self.bin)
        source = f"host={HOST} port={self.port} user=postgres application_name=standby"
        choices = ("-R", "-X", "stream", "-c", "fast", "--no-sync")
        try:
            server_account().run(
                self.bin / "pg_basebackup",
                "-D",
                replica.data,
                "-d",
                source,
                *choices,
                cwd=replica._process.directory,
            )
            replica._primary = self
            replica._start_somewhere()
        except BaseException:
            replica.close()
            raise
        return replica

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
        self._process.wait(lambda: self.execute(replayed, [target]) == [(True,)], f"replay up to {target}")

    def promote(self) -> None:
        """Make a standby a primary; returns when it takes writes."""
        server_account().run(
            self.bin / "pg_ctl", "promote", "-D", self.data, "-w", cwd=self._process.directory
        )
        self._primary = None

    def close(self) -> None:
        """Stop it and remove its data."""
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _configure(self, settings: Mapping[str, str]) -> None:
        with (self.data / "postgresql.conf").open("a") as file:
            for name, value in settings.items():
                file.write("{} = '{}'\n".format(name, value.replace("'", "''")))

    def _start_somewhere(self) -> None:
        for remaining in reversed(range(_PORTS_TO_TRY)):
            try:
                return self._start_at(free_port())
            except ServerFailed as failure:
                if not remaining or _TAKEN not in str(failure):
                    raise

    def _start_at(self, port: int) -> None:
        self.port = port
        self.url = f"postgresql://postgres@{HOST}:{port}/postgres"
        self._process.start([self.bin / "postgres", "-D", self.data, "-p", str(port)], self._is_ready)

    def _is_ready(self) -> bool:
        """What pg_ctl looks at. A file of a server that was killed names another process."""
        lines = self._lock_file()
        return (
            len(lines) > 7 and lines[0] == str(self._process.pid) and lines[7].strip() in ("ready", "standby")
        )

    def _lock_file(self) -> list[str]:
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _free_shared_memory(self) -> None:
        """A killed server leaves a segment that its next start would free; there is no next start."""
        lines = self._lock_file()
        if len(lines) > 6 and lines[6].split():
            ctypes.CDLL(None).shmctl(int(lines[6].split()[-1]), 0, None)
