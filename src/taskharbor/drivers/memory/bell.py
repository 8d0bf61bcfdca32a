"""Wakes whoever waits for a queue, on whatever event loop in whatever thread that is.

Every queue has a version that grows with each ring. A waiter that remembers the version it last saw can never miss
a ring, even one from before it began to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence


class Waiter:
    """One `wait` in progress, and the loop it belongs to. Made on that loop."""

    __slots__ = ("future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def wake(self) -> None:
        # A loop that was closed under its waiter has nobody left to wake.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Bell:
    """Call everything here under the store's lock."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._waiters: dict[str, dict[Waiter, None]] = {}

    def versions(self, queues: Iterable[str]) -> dict[str, int]:
        return {queue: self._versions.get(queue, 0) for queue in queues}

    def ring(self, queues: Iterable[str]) -> None:
        for queue in queues:
            self._versions[queue] = self._versions.get(queue, 0) + 1
            for waiter in self._waiters.pop(queue, ()):
                waiter.wake()

    def enter(self, waiter: Waiter, queues: Sequence[str]) -> None:
        for queue in queues:
            self._waiters.setdefault(queue, {})[waiter] = None

    def leave(self, waiter: Waiter, queues: Sequence[str]) -> None:
        for queue in queues:
            waiting = self._waiters.get(queue)
            if waiting is not None:
                waiting.pop(waiter, None)
                if not waiting:
                    del self._waiters[queue]
