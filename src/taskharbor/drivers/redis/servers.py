"""Finds the server that holds a queue: the master that sentinels name, or the node of a cluster that has the queue's slot.

A former master learns of a failover last, and the writes that it accepts until then are lost. So connections to it are dropped as
soon as a sentinel reports the change. redis-py's Sentinel class is not used: it believes a sentinel about the master without
asking the server, and hears of no change.

In a cluster all keys of a queue are in one slot, so each call goes to one server and is atomic there. redis-py's cluster client
is not used: it sends ASKING on another connection than the command, and cannot mark a repeated call as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ResponseError

from taskharbor.drivers.redis.connection import ConnectionLost, Server, connect, pack
from taskharbor.drivers.redis.errors import translated
from taskharbor.drivers.redis.library import Library, RedisCall
from taskharbor.drivers.redis.options import Address, RedisOptions
from taskharbor.drivers.waiting import keep_connected
from taskharbor.errors import BackendUnavailable


class Sentinels:
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
