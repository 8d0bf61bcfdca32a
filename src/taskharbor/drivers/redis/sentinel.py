"""Where the master is, asked of the sentinels each time a connection is made; and news of another one, as soon as they know.

A former master is told last, and takes changes until then, which are lost. So connections to it are dropped at the news.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import hiredis

from taskharbor.drivers.redis.failures import translated
from taskharbor.drivers.redis.node import introduced
from taskharbor.drivers.redis.options import Address, Options
from taskharbor.drivers.redis.packing import Word, pack
from taskharbor.drivers.redis.wire import ConnectionLost, Wire
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0


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
                found = await self._ask_sentinel(address)
                role = await self._ask(found, ("ROLE",), is_sentinel=False)
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

    async def tell_of_changes(self, on_change: Callable[[], None]) -> None:
        """Call back whenever there is another master, until cancelled. Where no sentinel can be heard, one is tried after the
        other; what was missed meanwhile counts as a change."""
        pause = _FIRST_PAUSE
        while True:
            for address in list(self._addresses):
                try:
                    await self._hear(address, on_change)
                    pause = _FIRST_PAUSE
                except (TaskHarborError, ConnectionLost):
                    pass
                await asyncio.sleep(pause * (0.5 + random.random()))
                pause = min(pause * 2, _LONGEST_PAUSE)

    async def _hear(self, address: Address, on_change: Callable[[], None]) -> None:
        """Until the connection breaks."""
        before = await self._ask_sentinel(address)
        wire = await self._introduced_to_sentinel(address)
        is_lost = asyncio.Event()

        def hear(message: Any) -> None:
            if not isinstance(message, list) or message[0] not in (b"message", b"subscribe"):
                is_lost.set()
            elif message[0] == b"message" and message[2].split(b" ", 1)[0] == self._options.service.encode():
                on_change()

        try:
            wire.on_message, wire.on_lost = hear, is_lost.set
            wire.tell(pack(("SUBSCRIBE", "+switch-master")))
            if self._master not in (None, before) or before != await self._ask_sentinel(address):
                on_change()
            await is_lost.wait()
        finally:
            wire.on_lost = lambda: None
            wire.abort("nobody listens any more")

    async def _ask_sentinel(self, address: Address) -> Address:
        service = self._options.service
        found = await self._ask(address, ("SENTINEL", "get-master-addr-by-name", service), is_sentinel=True)
        if found is None:
            raise BackendUnavailable(
                f"{address} watches no service {service!r}: check the name in the URL and `sentinel monitor`"
            )
        return Address(found[0].decode(), int(found[1]))

    async def _ask(self, address: Address, command: tuple[Word, ...], *, is_sentinel: bool) -> list[bytes]:
        if is_sentinel:
            wire = await self._introduced_to_sentinel(address)
        else:
            wire = await introduced(address, self._options)
        try:
            (answer,) = await wire.ask(pack(command), 1)
        finally:
            wire.abort("asked")
        if isinstance(answer, hiredis.ReplyError):
            raise translated(answer, str(address))
        found: list[bytes] = answer
        return found

    async def _introduced_to_sentinel(self, address: Address) -> Wire:
        options = self._options
        return await introduced(
            address, options, user=options.sentinel_user, password=options.sentinel_password, db=0
        )
