"""A handle on a Redis store: the contract's methods, and the subscriptions that wake waiters. Functions on the server do the
work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import msgspec
from redis.exceptions import ResponseError

from taskharbor.bulk.publish_staged import finish_left_behind
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, Woken
from taskharbor.drivers.redis import enqueue, leases, log, operate
from taskharbor.drivers.redis.connection import Server, SharedConnection, pack
from taskharbor.drivers.redis.errors import code_of
from taskharbor.drivers.redis.library import RedisCall
from taskharbor.drivers.redis.options import RedisOptions, parse_url
from taskharbor.drivers.redis.store import RedisStore, server_info
from taskharbor.drivers.validation import functions_of
from taskharbor.drivers.waiting import Look, Notifications, keep_connected, set_within, wait
from taskharbor.jobs import JobRecord, Micros

A = TypeVar("A")

Finding: TypeAlias = tuple[str, str, str]
"""Advice, which is empty if all is well; name of the check; what was found."""


# -- subscriptions: the source for `waiting.wait` --------------------------------------------------------

_log = logging.getLogger("taskharbor.redis")

_PROBE = 20.0
_PATIENCE = 5.0
"""Seconds between two probes, and for the answer to one."""


class ChannelListener:
    """One handle's source for `waiting.wait`.

    Every function that may have made something runnable raises the queue's `moves`, which is its version, and publishes on its
    channel. The message only says when to look. A handle has one subscribed connection; a cluster carries messages to all nodes.
    After an outage the handle subscribes again and wakes all waiters, because messages of that time were lost. The connection is
    probed from time to time: if a firewall forgot it, it is silent.
    """

    trusts_notifications = True

    def __init__(self, store: RedisStore) -> None:
        self.notifications = Notifications()
        self.emptied: dict[str, str] = {}
        """The number of each queue's moves, as seen by a claim that left no job. Older changes need not wake anybody."""
        self.confirmed: set[str] = set()
        """The queues whose messages all arrive now."""
        self._store = store
        self._queues: dict[str, str] = {}
        """Queues by channel."""
        self._connection: SharedConnection | None = None
        self._is_alive = False
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.confirmed.clear()

    def listen(self, queues: Sequence[str]) -> float | None:
        options = self._store.options
        if not options.notify:
            return options.poll
        added = {self._store.keys(queue).channel: queue for queue in queues}.items() - self._queues.items()
        if added:
            self._queues.update(added)
            self._send("SUBSCRIBE", dict(added))
        if self._task is None and self._store.is_open:
            self._task = asyncio.create_task(keep_connected(self._listen_once, self._on_lost))
        return None if self.confirmed.issuperset(queues) else options.poll

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        answers = (await self._store.ask_queues("look", since, dict.fromkeys(queues, ()))).values()
        moves = [str(moves) for moves, _ in answers]
        seen = (version or "").split(",")
        if len(seen) == len(moves):
            seen = [self.emptied.pop(queue, one) for queue, one in zip(queues, seen, strict=True)]
        next_due = min((due for _, due in answers if due >= 0), default=None)
        return Look(",".join(moves), moves != seen, next_due)

    def _send(self, command: str, channels: Iterable[str] = ()) -> None:
        if self._connection is not None:
            self._connection.tell(pack((command, *channels)))

    def _on_lost(self) -> None:
        self.confirmed.clear()
        self.notifications.notify(self._queues.values())

    async def _listen_once(self) -> None:
        """Listen until the connection breaks. In a cluster: to the node that holds the first queue."""
        server = self._store.server_for(next(iter(self._queues)))
        self._connection = connection = await server.another_connection()
        try:
            connection.on_message = self._receive
            self._send("SUBSCRIBE", self._queues)
            while not await set_within(connection.lost, _PROBE):
                self._is_alive = False
                self._send("PING")
                if await set_within(connection.lost, _PATIENCE) or not self._is_alive:
                    return
        finally:
            self._connection = None
            connection.abort("the listener lets go")

    def _receive(self, reply: Any) -> None:
        self._is_alive = True
        if isinstance(reply, ResponseError):
            if code_of(reply) == "NOPERM":
                _log.warning(
                    "%s: this user may not subscribe to the channels of its queues (ACL: &<prefix>*); idle workers look by "
                    "themselves instead",
                    self._store.options.place,
                )
            if self._connection is not None:
                self._connection.abort(str(reply))
        elif isinstance(reply, list) and (queue := self._queues.get(reply[1].decode())) is not None:
            if reply[0] == b"subscribe":
                # Messages from before the subscription were lost, so its confirmation notifies too.
                self.confirmed.add(queue)
            self.notifications.notify((queue,))


class RedisDriver(Driver):
    """`redis://host:6379/0`; `RedisOptions` lists the options of the URL.

    Durability depends on the server: after a crash of the machine, its append-only file decides.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, multi_process=True)

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self._store = RedisStore(options)
        self._listener = ChannelListener(self._store)
        self._claims = leases.Claims(self._store, self._listener.emptied)

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(parse_url(url))

    def clone(self) -> Self:
        return type(self)(self.options)

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        await self._listener.close()
        await self._claims.close()
        await self._store.close()

    async def time(self) -> Micros:
        return await self._store.time()

    async def server_findings(self) -> list[Finding]:
        """Return what the settings of every server that takes changes mean for the safety of jobs."""
        return [
            (advice, name, f"{server.address}: {found}")
            for server in self._store.servers()
            for advice, name, found in await _examined(server)
        ]

    functions = functions_of(enqueue, leases, operate, log)

    def _apply(
        self, function: Callable[..., Coroutine[Any, Any, A]], call: op.Operation[A]
    ) -> Coroutine[Any, Any, A]:
        return function(self._store, *msgspec.structs.astuple(call))

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        return await self._claims.reserve(call)

    async def repair(self) -> list[str]:
        """Remove stored jobs that no call can load. Returns what was found."""
        now, queues = await self.time(), list(await self._store.queues())
        return [one for queue in queues for one in await leases.set_aside(self._store, queue, now)]

    async def _reserve_next(self, call: op.Reserve, timeout: float) -> list[JobRecord] | None:
        return await self._claims.reserve_next(call, timeout)

    async def _prune(self, call: op.Prune) -> int:
        removed = await operate.prune_queues(self._store, call.now, call.limit)
        # No other process may ever open this store: a bulk write whose publisher died must not stay half done.
        await finish_left_behind(self, call.now)
        return removed

    async def _wait(self, call: op.Wait) -> Woken:
        return await wait(self._listener, call)


# -- the servers' settings that decide whether jobs stay: persistence and eviction ---------------------------


async def _examined(server: Server) -> tuple[Finding, Finding]:
    info = await server_info(server, str(server.address))
    try:
        (pairs,) = await server.call([RedisCall("CONFIG", (), ("GET", "save", "appendfsync"))])
    except ResponseError:
        # Managed servers and users with few rights have no CONFIG.
        pairs = []
    config = {name.decode(): value.decode() for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
    kept = _persistence(info.get("aof_enabled"), config.get("appendfsync"), config.get("save"))
    return kept, _eviction(info.get("maxmemory_policy"), info.get("maxmemory", "0"))


def _persistence(aof: str | None, fsync: str | None, save: str | None) -> Finding:
    advice = "set appendonly yes on the server"
    if aof == "1" and fsync is None:
        found = "append-only file; could not tell its appendfsync, because CONFIG is refused"
        advice = "make sure that appendfsync is everysec or always"
    elif aof == "1":
        found, advice = f"append-only file, appendfsync {fsync}", ""
        if fsync == "no":
            lost = "all that the operating system has yet to write, often half a minute"
            found += f": a power loss takes {lost}"
            advice = "set appendfsync everysec on the server"
    elif aof is None or save is None:
        found = "could not tell if the server writes to disk: it refuses CONFIG or hides values of INFO"
        advice = "make sure that it does: appendonly yes"
    elif save:
        found = f"snapshots only (save {save}): a crash of the server takes all changes since the last one"
    else:
        found = "no append-only file and no snapshots: every job dies with the server's process"
    return advice, "persistence", found


def _eviction(policy: str | None, maxmemory: str) -> Finding:
    advice = "set maxmemory-policy noeviction on the server"
    if policy is None:
        found = "could not tell the maxmemory-policy: INFO hides it"
        advice = "make sure that it is noeviction"
    elif policy == "noeviction":
        found, advice = "maxmemory-policy noeviction", ""
    else:
        lost = "whole queues" if policy.startswith("allkeys") else "staged jobs of bulk writes"
        when = "is" if maxmemory != "0" else "gets a limit (maxmemory) and is"
        found = f"maxmemory-policy {policy}: the server deletes {lost} when its memory {when} full"
    return advice, "eviction", found
