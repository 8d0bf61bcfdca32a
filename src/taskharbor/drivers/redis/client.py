"""A handle's way to the store: one server, a master behind sentinels, or a cluster. Lost answers are resolved here.

No background task keeps connections alive, and redis-py repeats nothing. The worker sits out an outage with its own backoff; here
a call fails at once, or is repeated once on a fresh connection if the one it had turned out to be dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from redis.exceptions import ResponseError

from taskharbor.drivers.redis.cluster import Cluster
from taskharbor.drivers.redis.connection import REDISCOVER, ConnectionLost, Server, failed
from taskharbor.drivers.redis.failures import code_of, translated
from taskharbor.drivers.redis.library import LIBRARY, Call, Library, Word
from taskharbor.drivers.redis.options import Options
from taskharbor.drivers.redis.sentinel import Sentinels
from taskharbor.errors import BackendUnavailable, InvalidRequest

log = logging.getLogger("taskharbor.redis")

OLDEST = (7, 0)
HAS_WAITAOF = (7, 2)


class ServerInfo(NamedTuple):
    version: tuple[int, int]
    is_cluster: bool
    maxmemory: int
    policy: str


def read_info(info: bytes) -> ServerInfo:
    """From the answer to INFO."""
    lines = info.decode(errors="replace").splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
    return ServerInfo(
        version=_version(found.get("redis_version", "0.0")),
        is_cluster=found.get("cluster_enabled") == "1" or found.get("redis_mode") == "cluster",
        maxmemory=int(found.get("maxmemory", "0")),
        policy=found.get("maxmemory_policy", "noeviction"),
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = (text.split(".") + ["0"])[:2]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def check(info: ServerInfo, options: Options, place: str) -> None:
    """Refuse a server that cannot keep jobs, or lacks what the URL asks for."""
    version = f"{info.version[0]}.{info.version[1]}"
    if info.version < OLDEST:
        raise InvalidRequest(f"{place}: Redis {version} is too old: 7.0 or newer is needed")
    if options.wait_aof is not None and info.version < HAS_WAITAOF:
        raise InvalidRequest(f"{place}: wait_aof needs Redis 7.2, this is {version}: use wait_replicas")
    # Policies that only touch keys with a time to live cannot hurt: ours have none.
    if not info.policy.startswith("allkeys") or options.eviction == "accept":
        return
    if info.maxmemory:
        raise InvalidRequest(
            f"{place}: the server throws away keys of its choice when its memory is full (maxmemory-policy "
            f"{info.policy}), and with them whole queues: set maxmemory-policy noeviction, or write eviction=accept "
            "if losing jobs is all right"
        )
    log.warning(
        "%s: maxmemory-policy is %s; as soon as somebody sets maxmemory, queues may be thrown away: set noeviction",
        place,
        info.policy,
    )


Make: TypeAlias = Callable[[int], Sequence[Call]]
"""The calls of an operation. 1 says that an earlier try of the same calls may have taken effect without an answer; as many calls
come, for the same queues in the same order."""


class Client:
    def __init__(self, options: Options, library: Library = LIBRARY) -> None:
        self.options = options
        self._library = library
        self._server: Server | None = None
        self._cluster: Cluster | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_cluster(self) -> bool:
        return self._cluster is not None

    async def open(self) -> None:
        """Connect, and refuse a server that cannot keep jobs. Opening twice is harmless."""
        if self._server is not None or self._cluster is not None:
            return
        options = self.options
        if options.kind == "cluster":
            await self._open_cluster()
            return
        sentinels = Sentinels(options)
        is_watched = options.kind == "sentinel"
        server = Server(sentinels.master if is_watched else options.addresses[0], options, self._library)
        try:
            info = await _info(server, options.place)
            check(info, options, options.place)
        except BaseException:
            await server.close()
            raise
        if info.is_cluster and options.kind == "single":
            await server.close()
            await self._open_cluster()
            return
        self._server = server
        if is_watched:
            self._watching = asyncio.get_running_loop().create_task(
                sentinels.watch(lambda: server.drop("another server is the master now")),
                name="taskharbor sentinel",
            )

    async def _open_cluster(self) -> None:
        cluster = Cluster(self.options, self._library)
        try:
            await cluster.refresh()
            for server in cluster.masters():
                check(await _info(server, str(server.address)), self.options, str(server.address))
        except BaseException:
            await cluster.close()
            raise
        self._cluster = cluster

    async def close(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        server, self._server = self._server, None
        cluster, self._cluster = self._cluster, None
        if server is not None:
            await server.close()
        if cluster is not None:
            await cluster.close()
        # The event loop closes sockets in its next turn, and there may be none.
        await asyncio.sleep(0)

    def server_for(self, key: str | bytes) -> Server:
        """The server that holds a key."""
        if self._cluster is not None:
            return self._cluster.server_for(key)
        if self._server is None:
            raise BackendUnavailable(
                f"{self.options.place} is not open: await open() first, or use `async with`"
            )
        return self._server

    def when_slots_move(self, callback: Callable[[], None]) -> None:
        """In a cluster, call back when queues may have moved to other servers."""
        if self._cluster is not None:
            self._cluster.on_change = callback

    async def run(self, make: Make) -> list[Any]:
        """The answers of the calls, in order. On one server several are one transaction; in a cluster each stands alone.

        `make(0)` says what to run. If the connection is lost before the answer comes, the same is run once more on a fresh one as
        `make(1)`, and the functions recognise what their first try did.
        """
        if self._cluster is not None:
            return await self._cluster.run(make)
        server = self.server_for("")
        return await self._twice(lambda again: server.call(make(again)))

    async def command(self, *words: Word) -> Any:
        """The answer to a command that may be repeated. Its key is its second word; without one, every server can answer."""
        (answer,) = await self.commands([words])
        return answer

    async def commands(self, many: Sequence[tuple[Word, ...]]) -> list[Any]:
        """The same for several, in one round trip per server."""
        if not many:
            return []
        if self._cluster is not None:
            return await self._cluster.commands(many)
        server = self.server_for("")
        return await self._twice(lambda _: server.send(many))

    async def _twice(self, send: Callable[[int], Awaitable[list[Any]]]) -> list[Any]:
        again = 0
        is_rediscovered = False
        while True:
            try:
                return await send(again)
            except ConnectionLost as error:
                if again:
                    raise failed(error, self.options.place) from None
                again = 1
            except ResponseError as error:
                # The server is no master any more: the next try asks where the master is.
                if code_of(error) not in REDISCOVER or is_rediscovered:
                    raise translated(error, self.options.place) from None
                is_rediscovered = True


async def _info(server: Server, place: str) -> ServerInfo:
    try:
        (info,) = await server.send([("INFO",)])
    except ConnectionLost as error:
        raise failed(error, place) from None
    except ResponseError as error:
        raise translated(error, place) from None
    return read_info(info)
