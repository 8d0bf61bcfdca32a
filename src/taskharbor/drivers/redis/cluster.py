"""The servers of a Redis Cluster, and the slots that each holds.

All keys of a queue are in one slot, so each call goes to one server and is atomic there. Calls for several queues go out at the
same time. One may fail while the others took effect, and all of them may be repeated.

redis-py's cluster client is not used: it sends ASKING on another connection than the command, and has no way to mark a repeated
call as one.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import AskError, MovedError, ResponseError

from taskharbor.drivers.redis.connection import REDISCOVER, ConnectionLost, Server, failed
from taskharbor.drivers.redis.failures import code_of, translated
from taskharbor.drivers.redis.library import Call, Library, Word
from taskharbor.drivers.redis.options import Address, Options
from taskharbor.errors import BackendUnavailable, TaskHarborError

SLOTS = 16384
_REDIRECTS = 5
"""How often a command may be redirected before it is given up: a slot that has moved costs one."""

_Send = Callable[[Server, int, bool], Awaitable[list[Any]]]
"""Sends to a server. The number is 1 where an earlier try may have taken effect, the flag is for a slot on its way there."""


def slot_of(key: str | bytes) -> int:
    """By what is between the first braces, if there is anything, else by the whole key."""
    raw = key.encode() if isinstance(key, str) else key
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

    def server_for(self, key: str | bytes) -> Server:
        return self._holder(slot_of(key))

    def _holder(self, slot: int | None) -> Server:
        if slot is None:
            masters = self.masters()
            return (
                next((one for one in masters if one.is_connected), masters[0]) if masters else self._holder(0)
            )
        server = self._by_slot[slot]
        if server is None:
            raise BackendUnavailable(
                f"{self._options.place}: no node of the cluster serves slot {slot}: look at CLUSTER INFO"
            )
        return server

    # -- slots --------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Ask any node that answers which servers hold which slots. Callers that come meanwhile share the answer."""
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
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
            by_slot[first : last + 1] = [self._server(Address(name, port))] * (last + 1 - first)
        is_changed = by_slot != self._by_slot
        self._by_slot = by_slot
        current = set(self.masters())
        for address, server in list(self._servers.items()):
            if server not in current:
                self._close(self._servers.pop(address))
        if is_changed:
            self.on_change()

    def _server(self, address: Address) -> Server:
        if address not in self._servers:
            self._servers[address] = Server(address, self._options, self._library)
        return self._servers[address]

    # -- calls --------------------------------------------------------------------------------------------

    async def run(self, make: Callable[[int], Sequence[Call]]) -> list[Any]:
        made: list[Sequence[Call]] = [make(0)]

        def call(place: int) -> _Send:
            def send(server: Server, again: int, asking: bool) -> Awaitable[list[Any]]:
                if again and len(made) == 1:
                    made.append(make(1))
                return server.call([made[again][place]], asking=asking)

            return send

        return await self._all([(slot_of(one.keys[0]), call(place)) for place, one in enumerate(made[0])])

    async def commands(self, many: Sequence[tuple[Word, ...]]) -> list[Any]:
        def command(words: tuple[Word, ...]) -> _Send:
            return lambda server, _, asking: server.send([words], asking=asking)

        def slot(words: tuple[Word, ...]) -> int | None:
            return (
                None
                if len(words) < 2
                else slot_of(words[1] if isinstance(words[1], bytes) else str(words[1]))
            )

        return await self._all([(slot(words), command(words)) for words in many])

    async def _all(self, sends: Sequence[tuple[int | None, _Send]]) -> list[Any]:
        """The answers of all; raises the first failure once the others are done."""
        if len(sends) == 1:
            return await self._deliver(*sends[0])
        answers = await asyncio.gather(*(self._deliver(*one) for one in sends), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer[0] for answer in answers if not isinstance(answer, BaseException)]

    async def _deliver(self, slot: int | None, send: _Send) -> list[Any]:
        """Send to the server that holds the slot, and follow redirections until it is answered."""
        again = losses = redirects = 0
        target: Server | None = None
        asking = False
        while True:
            server = target or self._holder(slot)
            target = None
            try:
                await server.connect()
            except BackendUnavailable as error:
                # Perhaps another node has taken over.
                losses, asking = losses + 1, False
                await self._try_elsewhere(losses, error)
                continue
            try:
                return await send(server, again, asking)
            except ConnectionLost as error:
                losses, again, asking = losses + 1, 1, False
                await self._try_elsewhere(losses, failed(error, str(server.address)))
            except (MovedError, AskError) as error:
                redirects += 1
                if redirects > _REDIRECTS:
                    raise translated(error, str(server.address)) from None
                assert server.address is not None
                target = self._server(Address(error.host or server.address.host, error.port))
                # MovedError is an AskError.
                asking = not isinstance(error, MovedError)
                if not asking:
                    await self.refresh()
            except ResponseError as error:
                redirects += 1
                asking = False
                if code_of(error) not in REDISCOVER or redirects > _REDIRECTS:
                    raise translated(error, str(server.address)) from None
                await self.refresh()

    async def _try_elsewhere(self, losses: int, error: TaskHarborError) -> None:
        if losses > 1:
            raise error
        await self.refresh()
