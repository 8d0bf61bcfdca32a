"""Settings of a broker: limits and callers. All are decided once, before the first request."""

from __future__ import annotations

import msgspec

from taskharbor.broker.tokens import Token
from taskharbor.jobs import SECOND, Micros

MIB = 1_048_576


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and tokens. The defaults suit a broker that serves its own machine."""

    tokens: tuple[Token, ...] = ()
    """The tokens of callers. Empty: everybody who can reach the port may call, so any other bind than loopback needs tokens."""
    host_names: tuple[str, ...] = ()
    """Names under which clients know this broker, besides loopback and the address they connect to."""
    advertise: str | None = None
    """The URL that standbys and clients are told."""

    max_body_bytes: int = 32 * MIB
    max_depth: int = 64
    """The deepest nesting of a payload, a result or a progress."""
    max_batch: int = 10_000
    """The most jobs, settlements or ids in one call."""
    max_header_bytes: int = 32_768
    """The most bytes of request line and headers together."""
    max_answer_bytes: int = 16 * MIB
    """The bytes of payloads, results and errors after which an answer with jobs ends. Paging goes on behind it."""
    max_requests: int = 2000
    """The most calls under way at once, long polls included. If there are tokens, each may use half of it."""
    max_waiting: int = 1000
    """The most long polls at once. If there are tokens, each may use half of it."""
    max_held_bytes: int = 256 * MIB
    """The most bytes of all bodies and answers that are on their way at once. If there are tokens, each may use half of it."""
    max_connections: int = 4096
    """The most connections, those that are being opened included. Never more than the limit of open files allows."""
    max_per_address: int = 512
    """The most connections from one address, or from one /64 network of IPv6."""
    body_seconds: float = 30.0
    """Seconds that a client may be silent in the middle of a request."""
    max_wait_seconds: float = 60.0
    """The longest long poll, in seconds."""

    rate: float | None = None
    """Requests per second for each token; None: no limit."""
    burst: float | None = None
    """Requests that a token may make at once; None: as many as in two seconds."""

    max_skew_us: Micros = 60 * SECOND
    """The largest difference between a driver client's clock and the broker's."""
    trust_client_time: bool = False
    """Accept a driver client's time as it is. For tests and simulations: a client that sets the clock can end any lease."""
    sweeps: bool = True
    """End expired leases and apply retention now and then, as workers do."""
    access_log: bool = False
