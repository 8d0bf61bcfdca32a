"""Bounds of what callers use: how often they call, and how much of a resource they hold at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

KEPT_BUCKETS = 10_000


class Rates:
    """A token bucket for each name, which fills at a steady rate and holds a burst. Anybody can invent names, so their number is
    bounded: the oldest are forgotten."""

    def __init__(self, rate: float, burst: float, time: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, burst)
        self._time = time
        self._buckets: dict[str, tuple[float, float]] = {}
        """The tokens that are left in each bucket, and since when."""

    def take(self, name: str, amount: int = 1) -> float:
        """Take tokens. Returns 0 if there were enough, else the seconds until there are."""
        now = self._time()
        if name not in self._buckets and len(self._buckets) >= KEPT_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        left, at = self._buckets.get(name, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        is_there = left >= amount
        self._buckets[name] = (left - amount if is_there else left, now)
        return 0.0 if is_there else (amount - left) / self._rate


class Shares:
    """Shares of a resource by the names of callers. There is a bound for all together and one for each."""

    def __init__(self, total: int, each: int) -> None:
        self._total = total
        self._each = each
        self._by_name = Counter[str]()
        self.held = 0

    @classmethod
    def of_tokens(cls, total: int, has_tokens: bool) -> Shares:
        """One token holds at most half, so that another caller always gets something. Without tokens all callers are one."""
        return cls(total, max(1, total // 2) if has_tokens else total)

    def take(self, name: str, amount: int = 1) -> bool:
        """Hold more. Returns False, and holds nothing more, if that is beyond a bound."""
        if self.held + amount > self._total or self._by_name[name] + amount > self._each:
            return False
        self.held += amount
        self._by_name[name] += amount
        return True

    def give_back(self, name: str, amount: int = 1) -> None:
        """Hold less."""
        self.held -= amount
        self._by_name[name] -= amount
        if not self._by_name[name]:
            del self._by_name[name]
