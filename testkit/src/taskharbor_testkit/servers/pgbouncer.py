"""A PgBouncer in front of a server, in transaction mode: what many a production client really talks to.

Behind it a session lasts one transaction, so prepared statements, advisory locks, LISTEN and SET are not what they seem.
Only the real program shows which of these a driver leans on, and which version of it forgives.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from taskharbor_testkit.servers.account import server_account
from taskharbor_testkit.servers.address import PostgresAt
from taskharbor_testkit.servers.binaries import find_pgbouncer
from taskharbor_testkit.servers.ports import HOST, free_port
from taskharbor_testkit.servers.process import ServerFailed, ServerProcess

_PORTS_TO_TRY = 5
_TAKEN = "Address already in use"

_SETTINGS = {
    "listen_addr": HOST,
    "unix_socket_dir": "",
    "auth_type": "any",
    "admin_users": "postgres",
    "pool_mode": "transaction",
    "default_pool_size": "20",
    "max_client_conn": "500",
    # A test that restarts its server would otherwise wait for PgBouncer to try again.
    "server_login_retry": "1",
}


class PgBouncer:
    """Made by `start()`; a context manager that removes it in the end."""

    def __init__(self, program: Path, server: PostgresAt) -> None:
        self.server = server
        self.version = _version(program)
        self.port = 0
        self.url = ""
        self._program = program
        self._process = ServerProcess("pgbouncer")

    @classmethod
    def start(cls, server: PostgresAt, *, settings: Mapping[str, str] | None = None) -> Self:
        """For every database of the server, as the user of its URL. `settings` go into the [pgbouncer] section."""
        bouncer = cls(find_pgbouncer(), server)
        try:
            bouncer._start_somewhere({**_SETTINGS, **(settings or {})})
        except BaseException:
            bouncer.stop()
            raise
        return bouncer

    @property
    def admin_url(self) -> str:
        """Of its console (SHOW POOLS, PAUSE, KILL ...), which takes plain queries only."""
        return urlunsplit(urlsplit(self.url)._replace(path="/pgbouncer"))

    @property
    def log(self) -> Path:
        return self._process.log

    def stop(self) -> None:
        """Drop every connection through it, and remove it."""
        # It keeps nothing, and which signal means "at once" depends on its version.
        self._process.kill()
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_somewhere(self, settings: Mapping[str, str]) -> None:
        for remaining in reversed(range(_PORTS_TO_TRY)):
            try:
                return self._start_at(free_port(), settings)
            except ServerFailed as failure:
                if not remaining or _TAKEN not in str(failure):
                    raise

    def _start_at(self, port: int, settings: Mapping[str, str]) -> None:
        target = urlsplit(self.server.url)
        password = f" password={target.password}" if target.password else ""
        every = f"* = host={target.hostname} port={target.port or 5432} user={target.username or 'postgres'}{password}"
        lines = [f"{name} = {value}" for name, value in {**settings, "listen_port": str(port)}.items()]
        file = self._process.directory / "pgbouncer.ini"
        file.touch()
        server_account().own(file)
        file.write_text("\n".join(["[databases]", every, "[pgbouncer]", *lines, ""]))
        self.port = port
        self.url = urlunsplit(target._replace(netloc=f"postgres@{HOST}:{port}"))
        self._process.start(
            [self._program, file], lambda: f"listening on {HOST}:{port}" in self._process.logged()
        )


def _version(program: Path) -> tuple[int, ...]:
    answer = subprocess.run([program, "--version"], capture_output=True, text=True)
    numbers = re.search(r"(\d+(?:\.\d+)+)", answer.stdout + answer.stderr)
    if numbers is None:
        raise ServerFailed(f"{program} --version does not tell a version: {answer.stdout}{answer.stderr}")
    return tuple(int(number) for number in numbers[1].split("."))
