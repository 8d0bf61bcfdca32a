"""A handle on a Redis store: the contract's methods. Functions on the server do the work."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import msgspec
from redis.exceptions import ResponseError

from taskharbor.bulk.publish_staged import finish_left_behind
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, Woken
from taskharbor.drivers.redis import enqueue, leases, log, operate
from taskharbor.drivers.redis.connection import Server
from taskharbor.drivers.redis.library import RedisCall
from taskharbor.drivers.redis.listener import ChannelListener
from taskharbor.drivers.redis.options import RedisOptions, parse_url
from taskharbor.drivers.redis.store import RedisStore, server_info
from taskharbor.drivers.validation import functions_of
from taskharbor.drivers.waiting import wait
from taskharbor.jobs import JobRecord, Micros

A = TypeVar("A")

Finding: TypeAlias = tuple[str, str, str]
"""Advice, which is empty if all is well; name of the check; what was found."""


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
