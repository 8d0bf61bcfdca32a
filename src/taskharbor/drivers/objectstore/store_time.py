"""The store's time, without asking for it again and again: to ask is a write, which takes a while and costs money."""

from __future__ import annotations

import time
from collections.abc import Callable

from taskharbor.clock import Clock
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.jobs import SECOND, Micros

RESOLUTION: Micros = 2 * SECOND
"""Stores tell their time to a second, and after a round trip: a smaller difference says nothing."""
KEPT_FOR: Micros = 600 * SECOND
"""Two clocks that run at all stay together for that long."""
MOST_JUMP: Micros = SECOND
"""Where this machine's clock was set by more than this since, nothing is known any more."""


def _steady_us() -> Micros:
    return time.monotonic_ns() // 1000


class StoreTime:
    """This machine's time, corrected where it differs from the store's by more than can be told."""

    def __init__(self, blobs: Blobs, clock: Clock, monotonic: Callable[[], Micros] = _steady_us) -> None:
        self._blobs = blobs
        self._clock = clock
        self._monotonic = monotonic
        self._correction: Micros = 0
        self._asked_at: tuple[Micros, Micros] | None = None
        """When the store was asked last, by the steady clock and by the one that may be set."""

    async def now(self) -> Micros:
        if not self._is_known():
            theirs = await self._blobs.now()
            ours = self._clock.now()
            difference = 0 if theirs is None else theirs - ours
            self._correction = difference if abs(difference) > RESOLUTION else 0
            self._asked_at = self._monotonic(), ours
        return self._clock.now() + self._correction

    def _is_known(self) -> bool:
        if self._asked_at is None:
            return False
        steady, ours = self._asked_at
        passed = self._monotonic() - steady
        return passed < KEPT_FOR and abs(self._clock.now() - ours - passed) <= MOST_JUMP
