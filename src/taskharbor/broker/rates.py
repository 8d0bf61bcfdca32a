"""How often somebody may call: a bucket that fills at a steady rate and holds a burst."""

from __future__ import annotations

import time
from collections.abc import Callable

KEPT_BUCKETS = 10_000


class Bucket:
    __slots__ = ("_at", "_left")

    def __init__(self, burst: float, at: float) -> None:
        self._left = burst
        self._at = at

    def take(self, now: float, rate: float, burst: float) -> float:
        """0 where there was one to take; else the seconds until there is."""
        self._left = min(burst, self._left + (now - self._at) * rate)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) / rate


class Rates:
    """A bucket for each name. Names that anybody can make up are bounded: the oldest are forgotten."""

    def __init__(self, rate: float, burst: float, time: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, burst)
        self._time = time
        self._buckets: dict[str, Bucket] = {}

    def take(self, name: str) -> float:
        now = self._time()
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= KEPT_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[name] = Bucket(self._burst, now)
        return bucket.take(now, self._rate, self._burst)
