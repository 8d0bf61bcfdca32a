"""The servers of a Redis Cluster, and the slots that each holds.

All keys of a queue are in one slot, so each call goes to one server and is atomic there. Calls for several queues go out at the
same time. One may fail while the others took effect, and all of them may be repeated.

redis-py's cluster client is not used: it sends ASKING on another connection than the command, and has no way to mark a repeated
call as one.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

from taskharbor.drivers.redis.connection import ConnectionLost, Server
from taskharbor.drivers.redis.errors import translated
from taskharbor.drivers.redis.library import Library
from taskharbor.drivers.redis.options import Address, Options
from taskharbor.errors import BackendUnavailable

SLOTS = 16384


def slot_of(key: str) -> int:
    """By what is between the first braces, if there is anything, else by the whole key."""
    raw = key.encode()
    start = raw.find(b"{")
    if start >= 0:
        end = raw.find(b"}", start + 1)
        if end > start + 1:
            raw = raw[start + 1 : end]
    return binascii.crc_hqx(raw, 0) % SLOTS


class Cluster:
    def __init__(self, options: Options, library: Library) -> None:
        self._options = options
        self._library = library
        self._servers: dict[Address, Server] = {}
        self._by_slot: list[Server | None] = [None] * SLOTS
        self._refreshing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[], None] = lambda: None
        """Called when slots may have moved."""

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        for server in self._servers.values():
            self._close(server)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _close(self, server: Server) -> None:
        closing = asyncio.ensure_future(server.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def masters(self) -> list[Server]:
        return list(dict.fromkeys(server for server in self._by_slot if server is not None))

    def server_at(self, address: Address) -> Server:
        if address not in self._servers:
            self._servers[address] = Server(address, self._options, self._library)
        return self._servers[address]

    def server_for(self, key: str | None) -> Server:
        """The server that holds a key; without one, any, preferably one that is connected."""
        if key is None:
            masters = sorted(self.masters(), key=lambda one: not one.is_connected)
            slot, server = 0, masters[0] if masters else None
        else:
            slot = slot_of(key)
            server = self._by_slot[slot]
        if server is None:
            raise BackendUnavailable(
                f"{self._options.place}: no node of the cluster serves slot {slot}: look at CLUSTER INFO"
            )
        return server

    async def refresh(self) -> None:
        """Ask any node that answers which servers hold which slots. Callers that come meanwhile share the answer."""
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
                (ranges,) = await server.send([("CLUSTER", "SLOTS")])
            except (BackendUnavailable, ConnectionLost) as error:
                troubles.append(str(error))
                continue
            except ResponseError as error:
                raise translated(error, str(address)) from None
            finally:
                if address not in self._servers:
                    self._close(server)
            if ranges:
                self._assign(ranges, address)
                return
            troubles.append(f"{address} serves no slots")
        raise BackendUnavailable(
            f"{self._options.place}: no node of the cluster answers: {'; '.join(troubles)}"
        )

    def _assign(self, ranges: list[Any], asked: Address) -> None:
        by_slot: list[Server | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_replicas in ranges:
            # A node that does not know its own name is at the address it was asked at.
            name = host.decode() if host and host != b"?" else asked.host
            by_slot[first : last + 1] = [self.server_at(Address(name, port))] * (last + 1 - first)
        is_changed = by_slot != self._by_slot
        self._by_slot = by_slot
        current = set(self.masters())
        for address, server in list(self._servers.items()):
            if server not in current:
                self._close(self._servers.pop(address))
        if is_changed:
            self.on_change()
