"""Waiting for work: asleep until a doorbell rings, a scheduled job or lease known at the start comes due, or time is up.

What may have become runnable is told by each queue's version in the database; the bell only says when to look. A
version that differs from the one this handle saw when its last wait returned is a wake-up it cannot miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from taskharbor.drivers.sqlite import inspect
from taskharbor.drivers.sqlite.database import Database
from taskharbor.drivers.sqlite.doorbell import Bell
from taskharbor.jobs import SECOND, Micros

_LOOK_AGAIN = 1.0
"""Seconds after which a waiter looks even if no bell rang: a ringer may be unable to reach its pipe."""
_FIRST_LOOK = 0.001
_LAST_LOOK = 0.05
"""Without pipes a waiter looks after 1 ms, then ever later, up to 50 ms."""

_BEFORE_ALL: Micros = -(2**62)


class Watcher:
    """One handle's waits, and what it has seen."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._bell: Bell | None = None
        self._seen: dict[str, int] = {}
        self._since: dict[str, Micros] = {}
        """Per queue, the time of the last wait that returned. What was due by then its caller has tried to claim; so a
        due job that cannot run (paused, no room) does not keep the waiter spinning."""

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    async def wait(self, queues: Sequence[str], now: Micros, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        start = loop.time()
        bell = self._hung_bell(loop)
        # Before the first look: a ring after it must not be lost.
        bell.rung.clear()
        since = min((self._since.get(queue, _BEFORE_ALL) for queue in queues), default=now)
        versions, due = await self._database.read(lambda tx: inspect.watch(tx, queues, since))
        is_due = due is not None and due <= now
        delay = timeout
        if due is not None and due - now <= timeout * SECOND:
            delay = (due - now) / SECOND
            is_due = True
        is_stirred = self._is_new(queues, versions)
        pause = _LOOK_AGAIN if bell.is_shared else _FIRST_LOOK
        while not is_stirred and (left := start + delay - loop.time()) > 0:
            await self._sleep(bell, min(left, pause))
            versions = await self._database.read(lambda tx: inspect.versions(tx, queues))
            is_stirred = self._is_new(queues, versions)
            if not bell.is_shared:
                pause = min(pause * 2, _LAST_LOOK)
        # Only a wait that returns has seen anything.
        self._seen.update(versions)
        self._since.update(dict.fromkeys(queues, now))
        return is_stirred or is_due

    def _hung_bell(self, loop: asyncio.AbstractEventLoop) -> Bell:
        if self._bell is not None and self._bell.loop is not loop:
            self.close()
        if self._bell is None:
            self._bell = Bell(self._database.doorbells, loop)
            self._bell.hang()
        return self._bell

    def _is_new(self, queues: Sequence[str], versions: dict[str, int]) -> bool:
        return any(versions.get(queue, 0) != self._seen.get(queue, 0) for queue in queues)

    async def _sleep(self, bell: Bell, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await bell.rung.wait()
        except TimeoutError:
            return
        bell.rung.clear()
