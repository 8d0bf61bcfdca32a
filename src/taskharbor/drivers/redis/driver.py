"""A handle on a Redis store: the contract's methods. Functions on the server do the work."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from taskharbor.bulk.publish_staged import finish_left_behind
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, Woken
from taskharbor.drivers.redis import advice, enqueue, leases, log, operate, repair
from taskharbor.drivers.redis.listener import ChannelListener
from taskharbor.drivers.redis.options import RedisOptions, parse_url
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.drivers.waiting import wait
from taskharbor.jobs import JobRecord, Micros

A = TypeVar("A")


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

    async def server_findings(self) -> list[advice.Finding]:
        """Return what the servers' settings mean for the safety of jobs."""
        return await advice.findings(self._store)

    functions: ClassVar[dict[type[op.Operation[Any]], Callable[..., Any]]] = {
        call: getattr(module, name)
        for name, call in op.OPERATIONS.items()
        for module in (enqueue, leases, operate, log)
        if hasattr(module, name)
    }
    """The functions of these modules that have the name of a call."""

    def _apply(
        self, function: Callable[..., Coroutine[Any, Any, A]], call: op.Operation[A]
    ) -> Coroutine[Any, Any, A]:
        return function(self._store, *msgspec.structs.astuple(call))

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        return await self._claims.reserve(call)

    async def repair(self) -> list[str]:
        """Remove stored jobs that no call can load. Returns what was found."""
        now, queues = await self.time(), list(await self._store.queues())
        return [one for queue in queues for one in await repair.set_aside(self._store, queue, now)]

    async def _reserve_next(self, call: op.Reserve, timeout: float) -> list[JobRecord] | None:
        return await self._claims.reserve_next(call, timeout)

    async def _prune(self, call: op.Prune) -> int:
        removed = await operate.prune_queues(self._store, call.now, call.limit)
        # No other process may ever open this store: a bulk write whose publisher died must not stay half done.
        await finish_left_behind(self, call.now)
        return removed

    async def _wait(self, call: op.Wait) -> Woken:
        return await wait(self._listener, call)
