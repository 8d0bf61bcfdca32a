"""A Redis of one's own: a private data directory, a free loopback port, gone afterwards.

Tests of outages need a server that can be crashed, frozen and failed over without asking anybody, and benchmarks one
whose settings are known. It asks for no password, and listens on the loopback interface only.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

from taskharbor_testkit.servers.account import server_account
from taskharbor_testkit.servers.cache import reachable_program
from taskharbor_testkit.servers.ports import HOST, free_port
from taskharbor_testkit.servers.process import ServerFailed, ServerProcess
from taskharbor_testkit.servers.redis_address import RedisAt
from taskharbor_testkit.servers.redis_binaries import find_redis, numbers

Fsync = Literal["always", "everysec", "no"]

_PORTS_TO_TRY = 5
_TAKEN = "Address already in use"

PRIVATE = {"bind": HOST, "protected-mode": "no", "daemonize": "no", "dir": "."}
"""What every kind of server gets."""

_SETTINGS = {
    **PRIVATE,
    # Nothing is saved behind the back of whoever measures or counts; the append-only file is what survives.
    "save": "",
    # A replica that is wanted now need not wait for others that may want the same copy.
    "repl-diskless-sync-delay": "0",
}
_NOTHING = '""'
_BUS = 10_000
_OUTGOING = 32_768


class RedisServer(RedisAt):
    """Made by `start()` and by `replica()`; a context manager that removes the server in the end."""

    def __init__(
        self, version: str, program: Path, settings: Mapping[str, str], *, mode: tuple[str, ...] = ()
    ) -> None:
        super().__init__("")
        self.program = program
        self.port = 0
        self._version = version
        self._settings = dict(settings)
        self._mode = mode
        self._process = ServerProcess("redis")
        self.data = self._process.directory
        self._file = self.data / "redis.conf"

    @classmethod
    def start(
        cls,
        *,
        version: str = "newest",
        appendonly: bool = False,
        fsync: Fsync = "everysec",
        config: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a server of a version as `find_redis` takes it.

        Without `appendonly` every stop loses everything. With it, `stop` loses nothing, and `kill` takes what the operating
        system had not been given yet, which is nothing that was answered; only a power cut tells `fsync`s apart.
        `config` are lines of redis.conf and win over the rest; a `requirepass` among them is in the URL.
        """
        found, program = find_redis(version)
        kept = {"appendonly": "yes" if appendonly else "no", "appendfsync": fsync}
        server = cls(found, reachable_program(program), {**_SETTINGS, **kept, **(config or {})})
        try:
            server.start_somewhere()
        except BaseException:
            server.close()
            raise
        return server

    @property
    def version(self) -> str:
        return self._version

    @property
    def major(self) -> int:
        """Of a Valkey, Valkey's own: it says 7 to those who ask it for Redis's."""
        return numbers(self._version)[0]

    @property
    def log(self) -> Path:
        return self._process.log

    @property
    def running(self) -> bool:
        return self._process.running

    def stop(self) -> None:
        """In order. Port and what is on the disk are kept for `restart()`."""
        if self.running:
            self.resume()
            # It would refuse while it writes the first append-only file, as replicas do, and never be asked again.
            self.wait(lambda: self.info().get("aof_rewrite_in_progress", "0") == "0", "write its file")
        self._process.stop(signal.SIGTERM)

    def restart(self) -> None:
        """On the same port; also after `stop()` and `kill()`. Returns when what was kept is loaded."""
        self.stop()
        self._start()

    def kill(self) -> None:
        """SIGKILL, to a child that rewrites a file as well."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, and new ones are accepted by the kernel, but nothing answers."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until it holds. `what` the server was to do is in the message if it never does, with what it logged."""
        self._process.wait(condition, what)

    def replica(self) -> RedisServer:
        """A server that follows this one; returns when it has a first copy. `promote()` makes it a master."""
        settings = {**self._settings, "replicaof": f"{HOST} {self.port}"}
        follower = RedisServer(self._version, self.program, settings)
        try:
            follower.start_somewhere()
            follower.wait(
                lambda: follower.info("replication").get("master_link_status") == "up", "copy its master"
            )
        except BaseException:
            follower.close()
            raise
        return follower

    def catch_up(self, master: RedisAt) -> None:
        """On a replica: return when it has everything that its master has done by now."""
        target = int(master.info("replication")["master_repl_offset"])
        self.wait(
            lambda: int(self.info("replication").get("slave_repl_offset", -1)) >= target,
            f"replicate up to {target}",
        )

    def promote(self) -> None:
        """Make a replica a master, for the next starts too."""
        self.execute("REPLICAOF", "NO", "ONE")
        self.execute("CONFIG", "REWRITE")

    def flush(self) -> None:
        """Forget every key, and every script."""
        self.execute("FLUSHALL", "SYNC")
        self.execute("SCRIPT", "FLUSH")

    def close(self) -> None:
        """End it and remove its data."""
        self._process.kill()  # Asked to stop, it would first write down what is removed a moment later.
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_somewhere(self) -> None:
        """For the first time, at a port that is free."""
        for remaining in reversed(range(_PORTS_TO_TRY)):
            self.port = self._choose_port()
            self._configure()
            try:
                return self._start()
            except ServerFailed as failure:
                if not remaining or _TAKEN not in str(failure):
                    raise

    def _choose_port(self) -> int:
        port = free_port()
        # Nodes of a cluster talk to each other at another port, which must be below those of outgoing connections too.
        while self._settings.get("cluster-enabled") == "yes" and port + _BUS >= _OUTGOING:
            port = free_port()
        return port

    def _configure(self) -> None:
        """Once: from then on the file is the server's, which rewrites it when it gets another master."""
        lines = [f"{name} {value or _NOTHING}" for name, value in self._settings.items()]
        self._file.touch()
        server_account().own(self._file)
        self._file.write_text("\n".join([f"port {self.port}", *lines, ""]))
        password = self._settings.get("requirepass")
        self.url = f"redis://{f':{quote(password)}@' if password else ''}{HOST}:{self.port}/0"

    def _start(self) -> None:
        self._process.start([self.program, self._file, *self._mode], self._is_ready)

    def _is_ready(self) -> bool:
        """It must be this process that answers: somebody else may have got the port that we thought was free."""
        import redis

        try:
            facts = self.info()
        except redis.ConnectionError:
            return False
        return facts.get("process_id") == str(self._process.pid) and facts.get("loading", "0") == "0"
