"""An open store: the keys of its queues, the way to the server that holds each, and the handling of lost answers.

No background task keeps connections alive, and redis-py repeats nothing. The worker sits out an outage with its own backoff; here
a call fails at once, or is repeated once on a fresh connection if the one it had turned out to be dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from redis.exceptions import AskError, MovedError, ResponseError

from taskharbor.drivers.redis.connection import ConnectionLost, Server, failed
from taskharbor.drivers.redis.errors import REDISCOVER, code_of, translated
from taskharbor.drivers.redis.library import FAMILIES, LIBRARY, Call, Library, Word
from taskharbor.drivers.redis.options import Address, Options
from taskharbor.drivers.redis.servers import Cluster, Sentinels
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import SECOND, Micros

log = logging.getLogger("taskharbor.redis")

OLDEST = (7, 0)
HAS_WAITAOF = (7, 2)
_REDIRECTS = 5
"""How often a command may be redirected in a cluster before it is given up: a slot that has moved costs one."""

Make: TypeAlias = Callable[[int], Sequence[Call]]
"""The calls of an operation. 1 says that an earlier try of the same calls may have taken effect without an answer; as many calls
come, for the same queues in the same order."""
_Send: TypeAlias = Callable[[Server, int, bool], Awaitable[list[Any]]]
"""Sends to a server. The number is as for `Make`, the flag is for a slot on its way there."""


class Keys:
    """One queue's keys, and the channel on which it wakes those who wait. All share the hash tag `{queue}`: a cluster keeps a
    queue in one place, and a transition is one call. `lua/queue.lua` names them and says what each holds."""

    def __init__(self, prefix: str, queue: str) -> None:
        self.prefix = f"{prefix}{{{tag(queue)}}}:"
        self.all = tuple(f"{self.prefix}{family}" for family in FAMILIES)
        self.channel = f"{self.prefix}wake"

    def __getitem__(self, family: str) -> str:
        return f"{self.prefix}{family}"


keys_of = lru_cache(maxsize=10_000)(Keys)


def tag(queue: str) -> str:
    """A name as it stands between the braces: never empty and never cut short by a brace of its own."""
    return queue.replace("%", "%25").replace("}", "%7D") or "%"


class Store:
    """A store as one open handle sees it: one server, a master behind sentinels, or a cluster."""

    def __init__(self, options: Options, library: Library = LIBRARY) -> None:
        self.options = options
        self.prefix = options.prefix
        self.queues_key = f"{options.prefix}taskharbor:queues"
        """The hash of all queues: name -> number."""
        self.numbers: dict[str, int] = {}
        """The queues known so far and their numbers. They are never taken back."""
        self.cluster: Cluster | None = None
        self._library = library
        self._server: Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._last_heard: Sequence[bytes] = ()

    async def open(self) -> None:
        """Connect, and refuse a server that cannot keep jobs."""
        options = self.options
        if options.kind == "cluster":
            await self._open_cluster()
            return
        sentinels = Sentinels(options) if options.kind == "sentinel" else None
        server = Server(sentinels.master if sentinels else options.addresses[0], options, self._library)
        try:
            info = await _info(server, options.place)
            check(info, options, options.place)
        except BaseException:
            server.close()
            raise
        if info.is_cluster and options.kind == "single":
            server.close()
            await self._open_cluster()
            return
        self._server = server
        if sentinels:
            watch = sentinels.watch(lambda: server.drop("another server is the master now"))
            self._watching = asyncio.create_task(watch, name="taskharbor sentinel")

    async def _open_cluster(self) -> None:
        cluster = Cluster(self.options, self._library)
        try:
            await cluster.refresh()
            for server in cluster.masters():
                check(await _info(server, str(server.address)), self.options, str(server.address))
        except BaseException:
            cluster.close()
            raise
        self.cluster = cluster

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        server, self._server = self._server, None
        cluster, self.cluster = self.cluster, None
        if server is not None:
            server.close()
        if cluster is not None:
            cluster.close()
        # The event loop ends readers and closes sockets in its next turns, and there may be none.
        for _ in range(3):
            await asyncio.sleep(0)

    def server_for(self, key: str | None) -> Server:
        """The server that holds a key; without one, any."""
        if self.cluster is not None:
            return self.cluster.server_for(key)
        if self._server is None:
            raise BackendUnavailable(f"{self.options.place}: this handle is not open")
        return self._server

    # -- calls and commands -------------------------------------------------------------------------------

    def keys(self, queue: str) -> Keys:
        return keys_of(self.prefix, queue)

    def call(self, name: str, queue: str, now: Micros, *args: Word) -> Call:
        """A function on the keys of a queue."""
        keys = keys_of(self.prefix, queue)
        return Call(name, keys.all, (keys.channel if self.options.notify else "", now, *args))

    async def run(self, make: Make) -> list[Any]:
        """The answers of the calls, in order. On one server several are one transaction; in a cluster each stands alone.

        `make(0)` says what to run. If the connection is lost before the answer comes, the same is run once more on a fresh one as
        `make(1)`, and the functions recognise what their first try did.
        """
        made = [make(0)]

        def calls(again: int) -> Sequence[Call]:
            if again == len(made):
                made.append(make(1))
            return made[again]

        def one(n: int) -> _Send:
            return lambda server, again, asking: server.call([calls(again)[n]], asking=asking)

        if not made[0]:
            return []
        if self.cluster is None:
            return await self._deliver(None, lambda server, again, _: server.call(calls(again)))
        return await self._gather([(call.keys[0], one(n)) for n, call in enumerate(made[0])])

    async def ask_all(self, calls: Sequence[Call]) -> list[Any]:
        """The answers of calls that may be repeated as they are."""
        return await self.run(lambda _: calls)

    async def ask(self, name: str, queue: str, now: Micros, *args: Word) -> Any:
        """The answer of a function that may be repeated as it is."""
        (answer,) = await self.ask_all((self.call(name, queue, now, *args),))
        return answer

    async def command(self, *words: Word) -> Any:
        """The answer to a command that may be repeated. Its key is its second word; without one, every server can answer."""
        (answer,) = await self.commands([words])
        return answer

    async def commands(self, many: Sequence[tuple[Word, ...]]) -> list[Any]:
        """The same for several, in one round trip per server."""

        def one(words: tuple[Word, ...]) -> _Send:
            return lambda server, _, asking: server.send([words], asking=asking)

        if not many:
            return []
        if self.cluster is None:
            return await self._deliver(None, lambda server, *_: server.send(many))
        return await self._gather([(str(words[1]) if words[1:] else None, one(words)) for words in many])

    async def _gather(self, sends: Sequence[tuple[str | None, _Send]]) -> list[Any]:
        """The answers of all; raises the first failure once the others are done."""
        answers = await asyncio.gather(*(self._deliver(*one) for one in sends), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer[0] for answer in answers if not isinstance(answer, BaseException)]

    async def _deliver(self, key: str | None, send: _Send) -> list[Any]:
        """Send to the server that holds a key until it is answered: once more where a connection or the master was lost, and on
        along the redirections of a cluster."""
        cluster, again, losses, redirects = self.cluster, 0, 0, 0
        target: Server | None = None
        asking = False
        while True:
            server = target or self.server_for(key)
            place = str(server.address) if cluster else self.options.place
            target = None
            try:
                if cluster:
                    await server.connect()
            except BackendUnavailable:
                # Nothing was sent, and perhaps another node has taken over.
                losses, asking = losses + 1, False
                if losses > 1:
                    raise
            else:
                try:
                    return await send(server, again, asking)
                except ConnectionLost as error:
                    losses, again, asking = losses + 1, 1, False
                    if losses > 1:
                        raise failed(error, place) from None
                except ResponseError as error:
                    redirects += 1
                    is_redirected = cluster is not None and isinstance(error, AskError)
                    is_known = is_redirected or code_of(error) in REDISCOVER
                    if not is_known or redirects > (_REDIRECTS if cluster else 1):
                        raise translated(error, place) from None
                    # MovedError is an AskError.
                    asking = is_redirected and not isinstance(error, MovedError)
                    if cluster and isinstance(error, AskError) and server.address:
                        target = cluster.server_at(Address(error.host or server.address.host, error.port))
            if cluster and not asking:
                await cluster.refresh()

    async def time(self) -> Micros:
        seconds, micros = await self.command("TIME")
        return int(seconds) * SECOND + int(micros)

    # -- queues -------------------------------------------------------------------------------------------

    async def register(self, queues: Iterable[str]) -> None:
        """Before a queue gets its first job or setting: what is not written down here is found by nobody."""
        (answer,) = await self.ask_all((Call("register", (self.queues_key,), tuple(queues)),))
        self._learn(answer)

    async def queues(self) -> dict[str, int]:
        """All there are now, with their numbers."""
        self._learn(await self.command("HGETALL", self.queues_key))
        return self.numbers

    def _learn(self, pairs: Sequence[bytes]) -> None:
        if pairs != self._last_heard:
            self._last_heard = pairs
            names = [name.decode() for name in pairs[::2]]
            self.numbers = dict(zip(names, map(int, pairs[1::2]), strict=True))

    async def located(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Job id -> the queue that has it, of those that any queue has."""
        wanted = list(dict.fromkeys(job_ids))
        names = list(await self.queues()) if wanted else []
        answers = await self.commands([("ZMSCORE", self.keys(name)["jobs"], *wanted) for name in names])
        return {
            job_id: name
            for name, scores in zip(names, answers, strict=True)
            for job_id, score in zip(wanted, scores, strict=True)
            if score is not None
        }


# -- servers that will do -----------------------------------------------------------------------------------


class ServerInfo(NamedTuple):
    version: tuple[int, int]
    is_cluster: bool
    maxmemory: int
    policy: str


async def _info(server: Server, place: str) -> ServerInfo:
    try:
        (info,) = await server.send([("INFO",)])
    except ConnectionLost as error:
        raise failed(error, place) from None
    except ResponseError as error:
        raise translated(error, place) from None
    return read_info(info)


def read_info(info: bytes) -> ServerInfo:
    """From the answer to INFO."""
    lines = info.decode(errors="replace").splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
    major, minor = (found.get("redis_version", "0.0").split(".") + ["0"])[:2]
    return ServerInfo(
        version=(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0),
        is_cluster=found.get("cluster_enabled") == "1" or found.get("redis_mode") == "cluster",
        maxmemory=int(found.get("maxmemory", "0")),
        policy=found.get("maxmemory_policy", "noeviction"),
    )


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
