"""An open store: the keys of its queues, the server that holds each, and calls whose answer was lost.

No background task keeps connections alive, and redis-py repeats nothing. During an outage the worker repeats calls with its own
backoff. Here a call fails at once, or is repeated once on a new connection if its own turned out to be dead.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError, ResponseError

from taskharbor.drivers.redis.connection import ConnectionLost, Server, connect, failed, pack
from taskharbor.drivers.redis.errors import REDISCOVER, code_of, translated
from taskharbor.drivers.redis.library import FAMILIES, LAYOUT, LIBRARY, Library, RedisCall, Word
from taskharbor.drivers.redis.options import Address, RedisOptions
from taskharbor.drivers.waiting import keep_connected
from taskharbor.errors import BackendUnavailable, InvalidRequest, not_open
from taskharbor.jobs import SECOND, Micros

log = logging.getLogger("taskharbor.redis")

_REDIRECTS = 5
"""The most redirections of a command in a cluster. A slot that has moved costs one."""


class Keys:
    """The keys of one queue, and the channel that wakes its waiters. All have the hash tag `{queue}`, so a cluster keeps a queue
    in one place, and a transition is one call. `lua/queue.lua` names the keys and describes their content."""

    def __init__(self, prefix: str, queue: str) -> None:
        self.prefix = f"{prefix}{{{tag(queue)}}}:"
        self.all = tuple(f"{self.prefix}{family}" for family in FAMILIES)
        self.channel = f"{self.prefix}wake"

    def __getitem__(self, family: str) -> str:
        return f"{self.prefix}{family}"


keys_of = lru_cache(maxsize=10_000)(Keys)


def tag(queue: str) -> str:
    """Return a name as it stands between the braces: never empty, and without a closing brace of its own."""
    return queue.replace("%", "%25").replace("}", "%7D") or "%"


# -- the server that holds a queue -----------------------------------------------------------------------


class Sentinels:
    """The sentinels of a store, which name its master.

    A former master learns of a failover last, and the writes that it accepts until then are lost. So connections to it are
    dropped as soon as a sentinel reports the change. redis-py's Sentinel class is not used: it believes a sentinel about the
    master without asking the server, and hears of no change.
    """

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._addresses = list(options.addresses)
        """The sentinel that answered last comes first."""
        self._master: Address | None = None

    async def master(self) -> Address:
        """Return the address of a server that itself says that it is the master. Right after a failover a sentinel may be
        behind."""
        troubles: list[str] = []
        for address in list(self._addresses):
            try:
                found = await self._named_by(address)
                role = await self._ask(found, "ROLE")
            except (BackendUnavailable, ConnectionLost) as error:
                troubles.append(str(error))
                continue
            if role[0] == b"master":
                self._addresses.remove(address)
                self._addresses.insert(0, address)
                self._master = found
                return found
            troubles.append(f"{address} names {found} as master, which is a {role[0].decode()}")
        place, why = self._options.place, "; ".join(troubles)
        raise BackendUnavailable(f"{place}: no sentinel knows a master that answers: {why}")

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` for every new master, until cancelled. If no sentinel can be reached, one is tried after the other. An
        interruption counts as a change."""

        async def watch_first() -> None:
            try:
                await self._watch(self._addresses[0], on_change)
            finally:
                self._addresses.append(self._addresses.pop(0))

        await keep_connected(watch_first, lambda: None)

    async def _watch(self, address: Address, on_change: Callable[[], None]) -> None:
        """Watch one sentinel until the connection breaks."""
        before = await self._named_by(address)
        connection = await connect(address, self._options, is_sentinel=True)

        def receive(message: Any) -> None:
            if not isinstance(message, list) or message[0] not in (b"message", b"subscribe"):
                connection.abort(str(message))
            elif message[0] == b"message" and message[2].split(b" ", 1)[0] == self._options.service.encode():
                on_change()

        try:
            connection.on_message = receive
            connection.tell(pack(("SUBSCRIBE", "+switch-master")))
            if self._master not in (None, before) or before != await self._named_by(address):
                on_change()
            await connection.lost.wait()
        finally:
            connection.abort("nobody listens any more")

    async def _named_by(self, sentinel: Address) -> Address:
        service = self._options.service
        found = await self._ask(sentinel, "SENTINEL", "get-master-addr-by-name", service)
        if found is None:
            advice = "check the name in the URL and `sentinel monitor`"
            raise BackendUnavailable(f"{sentinel} watches no service {service!r}: {advice}")
        return Address(found[0].decode(), int(found[1]))

    async def _ask(self, address: Address, *command: str) -> Any:
        connection = await connect(address, self._options, is_sentinel=command[0] == "SENTINEL")
        try:
            (answer,) = await connection.ask(pack(command), 1)
        finally:
            connection.abort("asked")
        if isinstance(answer, ResponseError):
            raise translated(answer, str(address))
        return answer


class Cluster:
    """The nodes of a cluster, by slot.

    All keys of a queue are in one slot, so each call goes to one server and is atomic there. redis-py's cluster client is not
    used: it sends ASKING on another connection than the command, and cannot mark a repeated call as one.
    """

    def __init__(self, options: RedisOptions, library: Library) -> None:
        self._options = options
        self._library = library
        self._servers: dict[Address, Server] = {}
        self._by_slot: list[Server | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._refreshing: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        for server in self._servers.values():
            server.close()

    def masters(self) -> list[Server]:
        return list(dict.fromkeys(server for server in self._by_slot if server is not None))

    def server_at(self, address: Address) -> Server:
        if address not in self._servers:
            self._servers[address] = Server(address, self._options, self._library)
        return self._servers[address]

    def server_for(self, key: str | None) -> Server:
        """Return the server that holds a key; without a key, any server, preferably one that is connected."""
        if key is None:
            masters = sorted(self.masters(), key=lambda one: not one.is_connected)
            slot, server = 0, masters[0] if masters else None
        else:
            slot = key_slot(key.encode())
            server = self._by_slot[slot]
        if server is None:
            unserved = f"no node of the cluster serves slot {slot}: look at CLUSTER INFO"
            raise BackendUnavailable(f"{self._options.place}: {unserved}")
        return server

    async def refresh(self) -> None:
        """Ask any node that answers which servers hold which slots. Concurrent callers share the answer."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
            self._refreshing.add_done_callback(self._refreshed)
        await asyncio.shield(self._refreshing)

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not task.cancelled():
            task.exception()

    async def _refresh(self) -> None:
        troubles: list[str] = []
        for address in dict.fromkeys((*self._servers, *self._options.addresses)):
            server = self._servers.get(address) or Server(address, self._options, self._library)
            try:
                (ranges,) = await server.call([RedisCall("CLUSTER", (), ("SLOTS",))])
            except (BackendUnavailable, ConnectionLost) as error:
                troubles.append(str(error))
                continue
            except ResponseError as error:
                raise translated(error, str(address)) from None
            finally:
                if address not in self._servers:
                    server.close()
            if ranges:
                self._assign(ranges, address)
                return
            troubles.append(f"{address} serves no slots")
        place, why = self._options.place, "; ".join(troubles)
        raise BackendUnavailable(f"{place}: no node of the cluster answers: {why}")

    def _assign(self, ranges: list[Any], asked: Address) -> None:
        by_slot: list[Server | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, (host, port, *_), *_replicas in ranges:
            # A node that does not know its own name is at the address at which it was asked.
            name = host.decode() if host and host != b"?" else asked.host
            by_slot[first : last + 1] = [self.server_at(Address(name, port))] * (last + 1 - first)
        self._by_slot = by_slot
        current = set(self.masters())
        for address, server in list(self._servers.items()):
            if server not in current:
                self._servers.pop(address).close()


class RedisStore:
    """A store, as one open handle sees it: one server, a master behind sentinels, or a cluster."""

    def __init__(self, options: RedisOptions, library: Library = LIBRARY) -> None:
        self.options = options
        self.prefix = options.prefix
        self.queues_key = f"{options.prefix}queues"
        """The hash of all queues: name -> number; no name -> version of the layout."""
        self.numbers: dict[str, int] = {}
        """The known queues and their numbers. A number is never taken back."""
        self.cluster: Cluster | None = None
        self._library = library
        self._server: Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._last_heard: Sequence[bytes] = ()

    @property
    def is_open(self) -> bool:
        return self._server is not None or self.cluster is not None

    async def open(self) -> None:
        """Connect. Refuses a server that cannot keep jobs, and a store with another layout. Opening twice is harmless."""
        if self.is_open:
            return
        try:
            await self._connect()
            await self.queues()
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> None:
        options = self.options
        if options.kind != "cluster":
            sentinels = Sentinels(options) if options.kind == "sentinel" else None
            locate = sentinels.master if sentinels else options.addresses[0]
            self._server = server = Server(locate, options, self._library)
            info = await server_info(server, options.place)
            check(info, options, options.place)
            if sentinels:
                watch = sentinels.watch(lambda: server.drop("another server is the master now"))
                self._watching = asyncio.create_task(watch, name="taskharbor sentinel")
            if options.kind != "single" or info.get("cluster_enabled") != "1":
                return
            server.close()
        self.cluster = cluster = Cluster(options, self._library)
        await cluster.refresh()
        for server in cluster.masters():
            check(await server_info(server, str(server.address)), options, str(server.address))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for one in (self._server, self.cluster):
            if one is not None:
                one.close()
        self._server = self.cluster = None
        # The event loop ends readers and closes sockets in its next turns, and without these there may be none.
        for _ in range(3):
            await asyncio.sleep(0)

    def server_for(self, key: str | None) -> Server:
        """Return the server that holds a key; without a key, any server."""
        if self.cluster is not None:
            return self.cluster.server_for(key)
        if self._server is None:
            raise not_open(self.options.place)
        return self._server

    def servers(self) -> list[Server]:
        """Return every server that takes changes."""
        return self.cluster.masters() if self.cluster else [self.server_for(None)]

    # -- calls and commands -------------------------------------------------------------------------------

    def keys(self, queue: str) -> Keys:
        return keys_of(self.prefix, queue)

    def call(self, name: str, queue: str, now: Micros, *args: Word) -> RedisCall:
        """Make the call of a function on the keys of a queue."""
        keys = keys_of(self.prefix, queue)
        return RedisCall(name, keys.all, (keys.channel if self.options.notify else "", now, *args))

    async def run(self, calls: Sequence[RedisCall], *, is_again: bool = False) -> list[Any]:
        """Run calls and return their answers, in order. On one server several calls are one transaction; in a cluster each call
        is separate.

        If the connection is lost before the answer comes, the calls are sent again on a new connection, with a word that says so.
        The functions then recognise the effects of the first try. `is_again` says it for the first try here too.
        """
        if not calls:
            return []
        if self.cluster is None:
            return await self._deliver(calls, is_again)
        tasks = [asyncio.ensure_future(self._deliver([call], is_again)) for call in calls]
        # An error is raised after the other calls are done.
        await asyncio.gather(*tasks, return_exceptions=True)
        return [answer for task in tasks for answer in task.result()]

    async def ask_queues(self, name: str, now: Micros, words: Mapping[str, Iterable[Word]]) -> dict[str, Any]:
        """Run a function on several queues, and return the answers by queue. `words` are its arguments for each of them."""
        answers = await self.run([self.call(name, queue, now, *args) for queue, args in words.items()])
        return dict(zip(words, answers, strict=True))

    async def ask(self, name: str, queue: str, now: Micros, *args: Word) -> Any:
        return (await self.ask_queues(name, now, {queue: args}))[queue]

    async def command(self, *words: Word) -> Any:
        """Return the answer to a command that may be repeated. Its key is its second word; without one, every server can
        answer."""
        (answer,) = await self.commands([words])
        return answer

    async def commands(self, many: Sequence[tuple[Word, ...]]) -> list[Any]:
        """Do the same for several commands, in one round trip per server."""
        calls = [RedisCall(str(words[0]), tuple(map(str, words[1:2])), words[2:]) for words in many]
        return await self.run(calls)

    async def _deliver(self, calls: Sequence[RedisCall], is_again: bool) -> list[Any]:
        """Send calls to the server that holds the first call's key until they are answered: once more if a connection or the
        master was lost, and along the redirections of a cluster."""
        cluster, losses, redirects = self.cluster, 0, 0
        key = calls[0].keys[0] if calls[0].keys else None
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
                # Nothing was sent, and another node may have taken over.
                losses, asking = losses + 1, False
                if losses > 1:
                    raise
            else:
                try:
                    return await server.call(calls, is_again=is_again, asking=asking)
                except ConnectionLost as error:
                    losses, is_again, asking = losses + 1, True, False
                    if losses > 1:
                        raise failed(error, place) from None
                except ResponseError as error:
                    redirects += 1
                    is_redirected = cluster is not None and isinstance(error, AskError)
                    is_known = is_redirected or code_of(error) in REDISCOVER
                    if not is_known or redirects > (_REDIRECTS if cluster else 1):
                        raise translated(error, place) from None
                    # MovedError is a subclass of AskError.
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
        """Write down the names of queues, before they get their first job or setting. A queue that is not written down cannot be
        found."""
        (answer,) = await self.run([RedisCall("register", (self.queues_key,), tuple(queues))])
        self._learn(answer)

    async def queues(self) -> dict[str, int]:
        """Return all queues and their numbers."""
        self._learn(await self.command("HGETALL", self.queues_key))
        return self.numbers

    def _learn(self, pairs: Sequence[bytes]) -> None:
        if pairs != self._last_heard:
            numbers = {name.decode(): int(n) for name, n in zip(pairs[::2], pairs[1::2], strict=True)}
            if numbers and numbers.pop("", 0) != LAYOUT["LAYOUT_VERSION"]:
                raise InvalidRequest(
                    f"{self.options.place}: a release with another layout of stored jobs made this store: finish its jobs "
                    "with that release, or choose another prefix"
                )
            self._last_heard, self.numbers = pairs, numbers

    async def located(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Return the queue of each job id that any queue has."""
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


async def server_info(server: Server, place: str) -> dict[str, str]:
    try:
        (info,) = await server.call([RedisCall("INFO", (), ())])
    except ConnectionLost as error:
        raise failed(error, place) from None
    except ResponseError as error:
        raise translated(error, place) from None
    return read_info(info)


def read_info(info: bytes) -> dict[str, str]:
    """Parse the answer to INFO."""
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def check(info: dict[str, str], options: RedisOptions, place: str) -> None:
    """Refuse a server that cannot keep jobs, or that lacks a feature that the URL asks for."""
    numbers = re.findall(r"\d+", info.get("redis_version", ""))[:2]
    version, said = tuple(map(int, numbers)), ".".join(numbers)
    if version < (7, 0):
        raise InvalidRequest(f"{place}: Redis {said} is too old: 7.0 or newer is needed")
    if options.wait_aof is not None and version < (7, 2):
        raise InvalidRequest(f"{place}: wait_aof needs Redis 7.2, this is {said}: use wait_replicas")
    policy = info.get("maxmemory_policy", "noeviction")
    # Policies that only remove keys with a time to live do no harm: the keys of jobs have none.
    if not policy.startswith("allkeys") or options.eviction == "accept":
        return
    if info.get("maxmemory", "0") != "0":
        raise InvalidRequest(
            f"{place}: the server throws away keys of its choice when its memory is full (maxmemory-policy "
            f"{policy}), and with them whole queues: set maxmemory-policy noeviction, or write eviction=accept "
            "if losing jobs is all right"
        )
    log.warning(
        "%s: maxmemory-policy is %s; as soon as somebody sets maxmemory, queues may be thrown away: set noeviction",
        place,
        policy,
    )
