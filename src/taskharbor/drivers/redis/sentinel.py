"""The master's address, asked of the sentinels each time a connection is made, and notification of a new master.

Sentinel tells a former master last, and what that one accepts until then is lost. So connections to it are dropped at the news.
redis-py's Sentinel class is not used: it takes a sentinel's word for who is master, and hears of no change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

from taskharbor.drivers.redis.connection import ConnectionLost, connect, pack
from taskharbor.drivers.redis.errors import translated
from taskharbor.drivers.redis.options import Address, Options
from taskharbor.drivers.waiting import keep_connected
from taskharbor.errors import BackendUnavailable, InvalidRequest


class Sentinels:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._addresses = list(options.addresses)
        """The one that answered last comes first."""
        self._master: Address | None = None

    async def master(self) -> Address:
        """The address of a server that says itself that it is the master: right after a failover a sentinel may be behind."""
        troubles: list[str] = []
        for address in list(self._addresses):
            try:
                found = await self._named_by(address)
                role = await self._ask(found, "ROLE")
            except InvalidRequest:
                raise
            except (BackendUnavailable, ConnectionLost) as error:
                troubles.append(str(error))
                continue
            if role[0] == b"master":
                self._addresses.remove(address)
                self._addresses.insert(0, address)
                self._master = found
                return found
            troubles.append(f"{address} names {found} as master, which is a {role[0].decode()}")
        raise BackendUnavailable(
            f"{self._options.place}: no sentinel knows a master that answers: {'; '.join(troubles)}"
        )

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Call back whenever there is another master, until cancelled. Where no sentinel can be heard, one is tried after the
        other; what was missed meanwhile counts as a change."""

        async def watch_first() -> None:
            try:
                await self._watch(self._addresses[0], on_change)
            finally:
                self._addresses.append(self._addresses.pop(0))

        await keep_connected(watch_first, lambda: None)

    async def _watch(self, address: Address, on_change: Callable[[], None]) -> None:
        """Until the connection breaks."""
        before = await self._named_by(address)
        connection = await connect(address, self._options, is_sentinel=True)
        is_lost = asyncio.Event()

        def receive(message: Any) -> None:
            if not isinstance(message, list) or message[0] not in (b"message", b"subscribe"):
                is_lost.set()
            elif message[0] == b"message" and message[2].split(b" ", 1)[0] == self._options.service.encode():
                on_change()

        try:
            connection.on_message, connection.on_lost = receive, is_lost.set
            connection.tell(pack(("SUBSCRIBE", "+switch-master")))
            if self._master not in (None, before) or before != await self._named_by(address):
                on_change()
            await is_lost.wait()
        finally:
            connection.on_lost = lambda: None
            connection.abort("nobody listens any more")

    async def _named_by(self, sentinel: Address) -> Address:
        service = self._options.service
        found = await self._ask(sentinel, "SENTINEL", "get-master-addr-by-name", service)
        if found is None:
            raise BackendUnavailable(
                f"{sentinel} watches no service {service!r}: check the name in the URL and `sentinel monitor`"
            )
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
