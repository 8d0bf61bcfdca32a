"""Telling those who wait, without telling them too often.

A NOTIFY makes every commit in the cluster that notifies stand in one line, so it is for the first change after a quiet
moment; what follows within a few milliseconds is announced together, once: by the first change after that, or by itself
where none comes. If this process dies in between, those who wait find the jobs when they next look by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from taskharbor.errors import TaskHarborError

QUIETLY = 1
ALOUD = 2

_WINDOW = 0.01
_GRACE = 0.001
"""Seconds that the next change has to announce the last ones as well: that saves a round trip."""


class Announcer:
    """One handle's announcements. `announce` sends one NOTIFY for each of the given queues."""

    def __init__(self, announce: Callable[[Iterable[str]], Awaitable[None]], *, is_on: bool) -> None:
        self._announce = announce
        self._is_on = is_on
        self._last: dict[str, float] = {}
        self._due: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def voice(self) -> int:
        """For changes that seldom make anything runnable."""
        return ALOUD if self._is_on else QUIETLY

    def voice_for(self, queue: str) -> int:
        """How to write down that a queue stirs. Say afterwards how it went: `done` or `failed`."""
        if not self._is_on:
            return QUIETLY
        instant = asyncio.get_running_loop().time()
        if instant - self._last.get(queue, 0.0) < _WINDOW:
            return QUIETLY
        self._last[queue] = instant
        # What is committed by now will be heard of with this one.
        self._due.discard(queue)
        return ALOUD

    def done(self, queue: str, voice: int) -> None:
        """The change is committed: see to it that those who wait hear of it."""
        if voice == QUIETLY:
            self._announce_soon(queue)

    def failed(self, queue: str) -> None:
        """Others may have counted on being announced with it, and it may have been committed after all."""
        self._announce_soon(queue)

    def _announce_soon(self, queue: str) -> None:
        if self._is_on:
            self._due.add(queue)
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._announce_later())

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _announce_later(self) -> None:
        try:
            while self._due:
                instant = asyncio.get_running_loop().time()
                due_at = {queue: self._last.get(queue, 0.0) + _WINDOW + _GRACE for queue in self._due}
                queues = {queue for queue, at in due_at.items() if at <= instant}
                if not queues:
                    await asyncio.sleep(min(due_at.values()) - instant)
                    continue
                self._due -= queues
                self._last |= dict.fromkeys(queues, instant)
                try:
                    await self._announce(queues)
                except TaskHarborError:
                    # The server is away: those who wait look for themselves, and the next announcement includes these.
                    self._due |= queues
                    return
        finally:
            self._task = None
