"""Wakes whoever waits for a queue in this process, on whatever handle and event loop.

A state counts how often something in it may have become runnable, and that number is the same for all who read the state. Who
remembers the number it saw misses nothing and is not woken twice for one event.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias
from weakref import WeakValueDictionary

from taskharbor.drivers.memory.bell import Waiter

Place: TypeAlias = tuple[str, int]
"""A queue and the number of a shard."""

_bells: WeakValueDictionary[str, Doorbell] = WeakValueDictionary()
_bells_lock = threading.Lock()


def doorbell_of(identity: str) -> Doorbell:
    """The one of that store. It lives as long as a handle has it."""
    with _bells_lock:
        bell = _bells.get(identity)
        if bell is None:
            bell = _bells[identity] = Doorbell()
        return bell


class Doorbell:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stirs: dict[Place, int] = {}
        self._waiters: dict[str, dict[Waiter, None]] = {}

    def ring(self, queue: str, shard: int, stirs: int) -> None:
        """The state of that shard has this number now."""
        with self._lock:
            place = (queue, shard)
            if stirs > self._stirs.get(place, 0):
                self._stirs[place] = stirs
                for waiter in self._waiters.pop(queue, ()):
                    waiter.wake()

    def stirs(self, places: Iterable[Place]) -> dict[Place, int]:
        with self._lock:
            return {place: self._stirs.get(place, 0) for place in places}

    def enter(self, waiter: Waiter, queues: Sequence[str]) -> None:
        with self._lock:
            for queue in queues:
                self._waiters.setdefault(queue, {})[waiter] = None

    def leave(self, waiter: Waiter, queues: Sequence[str]) -> None:
        with self._lock:
            for queue in queues:
                waiting = self._waiters.get(queue)
                if waiting is not None:
                    waiting.pop(waiter, None)
                    if not waiting:
                        del self._waiters[queue]
