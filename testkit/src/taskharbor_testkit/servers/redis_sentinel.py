"""A master, a replica and three Sentinels that put the replica in the master's place when that is gone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Self

from taskharbor_testkit.servers.ports import HOST
from taskharbor_testkit.servers.redis import PRIVATE, RedisServer

SERVICE = "harbor"

_SENTINELS = 3
_QUORUM = 2
_DOWN_AFTER_MS = 500
_FAILOVER_WITHIN_MS = 3000


class RedisSentinels:
    """Made by `start()`; a context manager that removes all of it in the end."""

    def __init__(self) -> None:
        self.servers: list[RedisServer] = []
        """The first master, then the first replica. Failovers do not reorder them."""
        self.sentinels: list[RedisServer] = []
        self.url = ""

    @classmethod
    def start(
        cls, *, version: str = "newest", appendonly: bool = False, config: Mapping[str, str] | None = None
    ) -> Self:
        """Returns when every Sentinel knows the other two and the replica."""
        group = cls()
        try:
            master = RedisServer.start(version=version, appendonly=appendonly, config=config)
            group.servers.append(master)
            group.servers.append(master.replica())
            for _ in range(_SENTINELS):
                group.sentinels.append(_start_sentinel(master))
            for sentinel in group.sentinels:
                sentinel.wait(partial(_knows_all, sentinel), "find the others")
        except BaseException:
            group.close()
            raise
        addresses = ",".join(f"{HOST}:{sentinel.port}" for sentinel in group.sentinels)
        group.url = f"redis+sentinel://{addresses}/{SERVICE}/0"
        return group

    @property
    def master(self) -> RedisServer:
        """As the first Sentinel sees it now."""
        return self._master_of(self.sentinels[0])

    @property
    def replica(self) -> RedisServer:
        return next(server for server in self.servers if server is not self.master)

    def fail_over(self) -> RedisServer:
        """In order. Returns the new master when it takes writes and every Sentinel knows."""
        old, new = self.master, self.replica
        new.catch_up(old)
        self.sentinels[0].execute("SENTINEL", "FAILOVER", SERVICE)
        self._wait_for(new)
        return new

    def kill_master(self) -> RedisServer:
        """SIGKILL. Returns the new master when it takes writes and every Sentinel knows."""
        old, new = self.master, self.replica
        old.kill()
        self._wait_for(new)
        return new

    def wait_for_master(self, server: RedisServer) -> None:
        """After an outage of one's own making, such as a pause."""
        self._wait_for(server)

    def close(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _master_of(self, sentinel: RedisServer) -> RedisServer:
        _, port = sentinel.execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def _is_master(self, server: RedisServer, seen_by: RedisServer) -> bool:
        return self._master_of(seen_by) is server

    def _wait_for(self, new: RedisServer) -> None:
        new.wait(partial(_is_promoted, new), "become the master")
        for sentinel in self.sentinels:
            sentinel.wait(partial(self._is_master, new, sentinel), "notice the new master")


def _start_sentinel(master: RedisServer) -> RedisServer:
    settings = {
        **PRIVATE,
        "sentinel monitor": f"{SERVICE} {HOST} {master.port} {_QUORUM}",
        "sentinel down-after-milliseconds": f"{SERVICE} {_DOWN_AFTER_MS}",
        "sentinel failover-timeout": f"{SERVICE} {_FAILOVER_WITHIN_MS}",
    }
    sentinel = RedisServer(master.version, master.program, settings, mode=("--sentinel",))
    try:
        sentinel.start_somewhere()
    except BaseException:
        sentinel.close()
        raise
    return sentinel


def _is_promoted(server: RedisServer) -> bool:
    import redis

    try:
        return server.info("replication")["role"] == "master"
    except redis.ConnectionError:
        return False  # Whoever promotes a server drops its clients, and this may have been one.


def _knows_all(sentinel: RedisServer) -> bool:
    pairs = sentinel.execute("SENTINEL", "MASTER", SERVICE)
    facts = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return int(facts[b"num-slaves"]) == 1 and int(facts[b"num-other-sentinels"]) == _SENTINELS - 1
