"""Options of a `redis://host:port/db?option=value` URL. Parsing does no I/O, so a wrong option is found before any work."""

from __future__ import annotations

from typing import Literal, NamedTuple
from urllib.parse import unquote

import msgspec

from taskharbor.drivers.urls import Reader, choice, read_options, seconds, some_text, switch, whole
from taskharbor.errors import InvalidRequest

Kind = Literal["single", "sentinel", "cluster", "unix"]
_KINDS: dict[str, Kind] = {"": "single", "sentinel": "sentinel", "cluster": "cluster", "unix": "unix"}
_HOW: dict[Kind, str] = {
    "single": "redis://user:password@host:6379/0",
    "sentinel": "redis+sentinel://host1:26379,host2:26379/service/0",
    "cluster": "redis+cluster://host1:6379,host2:6379",
    "unix": "redis+unix:///run/redis/redis.sock?db=0",
}


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RedisOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a store and the options of its connections."""

    kind: Kind
    addresses: tuple[Address, ...]
    """The server, the sentinels, or some nodes of the cluster. For a Unix socket: its path, and port 0."""
    place: str
    """The address for messages, without user and password."""
    service: str = ""
    """The name that the sentinels have for the servers that they watch."""
    db: int = 0
    user: str | None = None
    password: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = None
    tls: bool = False
    tls_ca: str | None = None
    """File with the certificates of the authorities that the client trusts; without it, the system's."""
    tls_cert: str | None = None
    tls_key: str | None = None
    """Files with this client's certificate and key, for a server that asks for one."""
    tls_verify: bool = True
    prefix: str = "taskharbor:"
    """Put in front of every key."""
    timeout: float = 10.0
    """Seconds of silence after which a connection with a call under way counts as dead."""
    connect_timeout: float = 5.0
    notify: bool = True
    """off: no subscription; waiters look by themselves."""
    poll: float = 0.5
    """Seconds between two looks of a waiter without notifications (notify=off, or the subscription is down)."""
    wait_replicas: int = 0
    """The number of replicas that must have a change before its call is answered (WAIT)."""
    wait_aof: int | None = None
    """The number of replicas that must have a change in their append-only file, after the master itself (WAITAOF; Redis 7.2)."""
    wait_timeout: float = 1.0
    """Seconds to wait for the replicas before the call fails with BackendUnavailable."""
    eviction: Literal["refuse", "accept"] = "refuse"
    """accept: also use a server that may remove keys when its memory is full."""

    @property
    def waits(self) -> bool:
        """True if calls wait for replicas or for the append-only file."""
        return bool(self.wait_replicas or self.wait_aof is not None)

    def __repr__(self) -> str:
        return f"RedisOptions({self.place!r}, prefix={self.prefix!r})"


def parse_url(url: str) -> RedisOptions:
    scheme, separator, rest = url.partition("://")
    base, _, variant = scheme.partition("+")
    kind = _KINDS.get(variant)
    if not separator or kind is None or base not in (("redis",) if kind == "unix" else ("redis", "rediss")):
        raise InvalidRequest(f"that is not a Redis URL: write it like {_HOW['single']}")
    if "#" in rest:
        raise InvalidRequest("a Redis URL has no part after #: write a # in a password as %23")
    address, _, query = rest.partition("?")
    account, _, place = address.rpartition("@")
    own = read_options(query, _OWN, "Redis")
    user, colon, password = account.partition(":")
    if user and not colon:
        advice = "write redis://user:password@host"
        raise InvalidRequest(f"the Redis URL names a user without a password: {advice}")
    own |= {"kind": kind, "tls": base == "rediss", "user": unquote(user) or None}
    own["password"] = unquote(password) if colon else None
    own.update(_unix_place(place, own) if kind == "unix" else _place(kind, place, own))
    options = msgspec.convert(own, RedisOptions)
    _check_together(options)
    return options


def _unix_place(place: str, own: dict[str, object]) -> dict[str, object]:
    path = unquote(place)
    if not path.startswith("/") or path == "/":
        raise _misplaced("unix")
    return {"addresses": (Address(path, 0),), "place": f"{path}/{own.get('db', 0)}"}


def _place(kind: Kind, place: str, own: dict[str, object]) -> dict[str, object]:
    """Return the addresses of the servers, from the part of the URL between account and options."""
    hosts, _, path = place.partition("/")
    addresses = tuple(_address(one, kind) for one in hosts.split(","))
    if kind == "single" and len(addresses) > 1:
        raise InvalidRequest(
            "several hosts: is that a cluster (redis+cluster://host1,host2) or are they sentinels "
            "(redis+sentinel://host1,host2/service)?"
        )
    parts = [unquote(part) for part in path.split("/")] if path else []
    service = parts.pop(0) if kind == "sentinel" and parts else ""
    if len(parts) > 1 or (kind == "sentinel" and not service):
        raise _misplaced(kind)
    db = _DATABASE("db", parts[0]) if parts and parts[0] else own.get("db", 0)
    names = ",".join(map(str, addresses))
    shown = {"sentinel": f"{names}/{service}/{db}", "cluster": names}.get(kind, f"{names}/{db}")
    return {"addresses": addresses, "service": service, "db": db, "place": shown}


def _address(text: str, kind: Kind) -> Address:
    host, bracket, port = text.rpartition("]")
    if bracket:
        host, port = host.removeprefix("["), port.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise _misplaced(kind)
    return Address(unquote(host) or "localhost", int(port or (26379 if kind == "sentinel" else 6379)))


def _misplaced(kind: Kind) -> InvalidRequest:
    # The URL may hold a password that was not escaped, so it is not quoted.
    advice = f"write it like {_HOW[kind]}, special characters as %xx"
    return InvalidRequest(f"the Redis URL cannot be understood: {advice}")


def _check_together(options: RedisOptions) -> None:
    if options.kind == "cluster" and options.db:
        raise InvalidRequest("a Redis Cluster has database 0 only: leave the number out of the URL")
    if options.wait_replicas and options.wait_aof is not None:
        reason = "wait_aof already waits for the replicas it names"
        raise InvalidRequest(f"give wait_replicas or wait_aof, not both: {reason}")
    if options.waits and options.wait_timeout >= options.timeout:
        raise InvalidRequest(
            f"wait_timeout={options.wait_timeout:g} must be less than timeout={options.timeout:g}: "
            "the connection would count as dead while it waits for replicas"
        )
    if (options.tls_cert is None) != (options.tls_key is None):
        raise InvalidRequest("give tls_cert and tls_key together, or neither")
    if not options.tls and (options.tls_ca or options.tls_cert or not options.tls_verify):
        raise InvalidRequest("tls_ca, tls_cert, tls_key and tls_verify need rediss://, which uses TLS")


def _prefix(name: str, value: str) -> str:
    if "{" in value or "}" in value:
        reason = "what is in braces decides a key's place in a cluster"
        raise InvalidRequest(f"{name}={value!r}: no braces; {reason}")
    if len(value) > 200:
        raise InvalidRequest(f"{name}: at most 200 characters; it is part of every key")
    return value


_DATABASE = whole(0, 1_000_000)
_OWN: dict[str, Reader] = {
    "prefix": _prefix,
    "db": _DATABASE,
    **dict.fromkeys(("timeout", "connect_timeout", "poll", "wait_timeout"), seconds),
    **dict.fromkeys(("notify", "tls_verify"), switch),
    **dict.fromkeys(("wait_replicas", "wait_aof"), whole(0, 100)),
    **dict.fromkeys(("tls_ca", "tls_cert", "tls_key", "sentinel_user", "sentinel_password"), some_text),
    "eviction": choice("refuse", "accept"),
}
