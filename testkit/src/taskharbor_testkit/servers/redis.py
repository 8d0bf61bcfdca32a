"""Redis for tests: servers by their address, servers of one's own, and one that all tests of a process share.

Tests of outages need a server that can be crashed, frozen and failed over without asking anybody, and benchmarks one
whose settings are known. It asks for no password, and listens on the loopback interface only. Tests that share a server
are kept apart by a prefix each.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

from taskharbor_testkit.servers.discovery import find_redis, reachable
from taskharbor_testkit.servers.process import HOST, ServerProcess, once, set_option

Fsync = Literal["always", "everysec", "no"]

PRIVATE = {"bind": HOST, "protected-mode": "no", "daemonize": "no", "dir": "."}
"""Settings of every kind of server."""

_SETTINGS = {
    **PRIVATE,
    # Nothing is saved while a test measures or counts; the append-only file is what survives.
    "save": '""',
    # A replica that is wanted now need not wait for others that may want the same copy.
    "repl-diskless-sync-delay": "0",
}


class RedisAt:
    """One server, by a `redis://` or `rediss://` URL, whoever runs it."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def version(self) -> str:
        """As in `redis_versions()`."""
        facts = self.info("server")
        name = "valkey-" if "valkey_version" in facts else ""
        return name + str(facts.get("valkey_version") or facts["redis_version"])

    def execute(self, *command: str | bytes | int | float) -> Any:
        """Run one command on a connection of its own. Answers are bytes where Redis sends bytes."""
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # Tests want to see that a server is gone, not to wait until the client has tried again.
        once = Retry(NoBackoff(), 0)
        with Redis.from_url(self.url, socket_connect_timeout=10, retry=once, protocol=2) as client:
            # Bare: the client would otherwise shape some answers by the command's name.
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def info(self, section: str = "default") -> dict[str, str]:
        return self.facts("INFO", section)

    def facts(self, *command: str) -> dict[str, str]:
        """The answer of a command that tells names and values by lines."""
        lines = self.execute(*command).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


class RedisServer(ServerProcess, RedisAt):
    """Made by `start()` and by `replica()`; a context manager that removes the server in the end."""

    version: str = ""

    def __init__(
        self, version: str, program: Path, settings: Mapping[str, str], *, mode: tuple[str, ...] = ()
    ) -> None:
        super().__init__("redis")
        self.url = ""
        self.version = version
        self.program = program
        self.data = self.directory
        self._settings = dict(settings)
        self._mode = mode

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
        return cls(found, reachable(program), {**_SETTINGS, **kept, **(config or {})}).start_on_free_port()

    def stop(self) -> None:
        """In order. Port and what is on the disk are kept for `restart()`."""
        if self.running:
            self.resume()
            # It would refuse while it writes the first append-only file, as replicas do, and never be asked again.
            self.wait(lambda: self.info().get("aof_rewrite_in_progress", "0") == "0", "write its file")
        self._terminate(signal.SIGTERM)

    def restart(self) -> None:
        """On the same port; also after `stop()` and `kill()`. Returns when what was kept is loaded."""
        self.stop()
        self._launch()

    def replica(self) -> RedisServer:
        """A server that follows this one; returns when it has a first copy. `promote()` makes it a master."""
        settings = {**self._settings, "replicaof": f"{HOST} {self.port}"}
        follower = RedisServer(self.version, self.program, settings).start_on_free_port()
        follower.wait(follower.follows, "copy its master")
        return follower

    def follows(self) -> bool:
        """True if it is a replica that is connected to its master and has a copy."""
        return self.info("replication").get("master_link_status") == "up"

    def is_master(self) -> bool:
        import redis

        try:
            return self.info("replication")["role"] == "master"
        except redis.ConnectionError:
            return False  # A promotion drops the server's clients, and this may have been one.

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

    def _launch(self) -> None:
        password = self._settings.get("requirepass")
        self.url = f"redis://{f':{quote(password)}@' if password else ''}{HOST}:{self.port}/0"
        file = self.directory / f"{self.port}.conf"
        # Written once: from then on it is the server's, which rewrites it when it gets another master.
        if not file.exists():
            lines = [f"{name} {value}" for name, value in self._settings.items()]
            self.write_file(file.name, [f"port {self.port}", *lines])
        self._run([self.program, file, *self._mode], self._is_ready)

    def _is_ready(self) -> bool:
        """This process must be the one that answers: somebody else may have taken the port that was free."""
        import redis

        try:
            facts = self.info()
        except redis.ConnectionError:
            return False
        return facts.get("process_id") == str(self.pid) and facts.get("loading", "0") == "0"


_shared: Callable[[str], RedisServer] = once(lambda version: RedisServer.start(version=version))


def shared_redis(version: str = "newest") -> RedisServer:
    """This process's server of that version. Ended at exit; do not stop it or flush it, others are on it."""
    return _shared(find_redis(version)[0])


def given_or_shared_redis() -> RedisAt:
    """The server that TASKHARBOR_TEST_REDIS names, or else the shared one."""
    given = os.environ.get("TASKHARBOR_TEST_REDIS")
    return RedisAt(given) if given else shared_redis()


def with_fresh_prefix(url: str) -> str:
    """The URL with a `prefix` option that nobody has used; `drop_prefix(url)` removes what was stored under it."""
    return set_option(url, "prefix", f"th_{secrets.token_hex(6)}:")


def drop_prefix(url: str) -> None:
    """Remove every key that begins with the URL's prefix, on every node that the URL names."""
    from redis import Redis

    parts = urlsplit(url)
    prefix = dict(parse_qsl(parts.query))["prefix"]
    user, at, hosts = parts.netloc.rpartition("@")
    database = "" if "cluster" in parts.scheme else parts.path
    for host in hosts.split(","):
        node = urlunsplit(("redis", f"{user}{at}{host}", database, "", ""))
        with Redis.from_url(node) as client, client.pipeline(transaction=False) as removal:
            for key in client.scan_iter(match=f"{prefix}*", count=1000):
                removal.unlink(key)
            removal.execute()
