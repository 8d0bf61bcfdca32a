"""Settings of a broker: limits and callers, decided once, before the first request. And the counters that hold callers to the
limits: how often they call, and how much of a resource they hold at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from taskharbor.broker.tokens import Token
from taskharbor.jobs import SECOND, Micros

MIB = 1_048_576
KEPT_BUCKETS = 10_000


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and tokens. The defaults suit a broker that serves its own machine.

    Attributes:
        tokens: The tokens of callers. Empty: everybody who can reach the port may call, so any other bind than loopback needs
            tokens.
        host_names: Names under which clients know this broker, besides loopback and the address they connect to.
        advertise: The URL that standbys and clients are told.
        max_depth: The deepest nesting of a payload, a result or a progress.
        max_batch: The most jobs, settlements or ids in one call.
        max_header_bytes: The most bytes of request line and headers together.
        max_answer_bytes: The bytes of payloads, results and errors after which an answer with jobs ends. Paging goes on behind
            it.
        max_requests: The most calls under way at once, long polls included. If there are tokens, each may use half of it.
        max_waiting: The most long polls at once. If there are tokens, each may use half of it.
        max_held_bytes: The most bytes of all bodies and answers that are on their way at once. If there are tokens, each may use
            half of it.
        max_connections: The most connections, those that are being opened included. Never more than the limit of open files
            allows.
        max_per_address: The most connections from one address, or from one /64 network of IPv6.
        body_seconds: Seconds that a client may be silent in the middle of a request.
        max_wait_seconds: The longest long poll, in seconds.
        rate: Requests per second for each token; None: no limit.
        burst: Requests that a token may make at once; None: as many as in two seconds.
        max_skew_us: The largest difference between a driver client's clock and the broker's.
        trust_client_time: Accept a driver client's time as it is. For tests and simulations: a client that sets the clock can end
            any lease.
        sweeps: End expired leases and apply retention now and then, as workers do.
    """

    tokens: tuple[Token, ...] = ()
    host_names: tuple[str, ...] = ()
    advertise: str | None = None

    max_body_bytes: int = 32 * MIB
    max_depth: int = 64
    max_batch: int = 10_000
    max_header_bytes: int = 32_768
    max_answer_bytes: int = 16 * MIB
    max_requests: int = 2000
    max_waiting: int = 1000
    max_held_bytes: int = 256 * MIB
    max_connections: int = 4096
    max_per_address: int = 512
    body_seconds: float = 30.0
    max_wait_seconds: float = 60.0

    rate: float | None = None
    burst: float | None = None

    max_skew_us: Micros = 60 * SECOND
    trust_client_time: bool = False
    sweeps: bool = True
    access_log: bool = False


class Rates:
    """A token bucket for each name, which fills at a steady rate and holds a burst. Anybody can invent names, so their number is
    bounded: the oldest are forgotten."""

    def __init__(self, rate: float, burst: float, time: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, burst)
        self._time = time
        # The tokens that are left in each bucket, and since when.
        self._buckets: dict[str, tuple[float, float]] = {}

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
