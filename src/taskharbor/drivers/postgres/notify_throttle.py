"""The notify throttle: NOTIFY for waiters, but not for every change.

All commits in a cluster that notify wait for each other, so only the first change after a quiet moment notifies in its own
transaction. Changes within the next few milliseconds are notified of together, once: by the first change after that, or by the
throttle itself. If this process dies in between, waiters find the jobs when they next look by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator

from taskharbor.errors import TaskHarborError

SILENT = 1
NOTIFYING = 2
"""How a move is written that may have made something runnable."""

_WINDOW = 0.01
_GRACE = 0.001
"""Seconds that the next change has to notify of the last ones as well: that saves a round trip."""


class NotifyThrottle:
    """One handle's notifications. `notify` sends one NOTIFY for each of the given queues."""

    def __init__(self, notify: Callable[[Iterable[str]], Awaitable[None]], *, is_on: bool) -> None:
        self._notify = notify
        self.mode = NOTIFYING if is_on else SILENT
        """For changes that seldom make anything runnable: they are not throttled."""
        self._last: dict[str, float] = {}
        self._due: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def change(self, queues: set[str]) -> Iterator[int]:
        """Around a change that makes something runnable in these queues. Gives the mode to write it with."""
        if self.mode == SILENT or len(queues) > 1:
            yield self.mode
            return
        (queue,) = queues
        instant = asyncio.get_running_loop().time()
        mode = SILENT if instant - self._last.get(queue, 0.0) < _WINDOW else NOTIFYING
        if mode == NOTIFYING:
            self._last[queue] = instant
            # Changes that are committed by now are notified of with this one.
            self._due.discard(queue)
        try:
            yield mode
        except BaseException:
            # Others may have counted on its notification, and it may have been committed after all.
            self._notify_soon(queue)
            raise
        if mode == SILENT:
            self._notify_soon(queue)

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _notify_soon(self, queue: str) -> None:
        self._due.add(queue)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._notify_later())

    async def _notify_later(self) -> None:
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
                    await self._notify(queues)
                except TaskHarborError:
                    # The server is away: waiters look for themselves, and the next notification includes these.
                    self._due |= queues
                    return
        finally:
            self._task = None
