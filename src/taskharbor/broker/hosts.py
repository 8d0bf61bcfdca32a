"""Whether a request means this broker, and whether a foreign page sent it.

A browser on the broker's machine can reach loopback. A page that made its own name resolve to 127.0.0.1 shows itself by the
Host header, one that posts across sites by the Origin header.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def split_host(text: str) -> tuple[str, str]:
    """`name:port`, `[::1]:port` or either without the port; the name in lower case, without brackets or a final dot."""
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        return name.lower(), rest.removeprefix(":")
    name, _, port = text.partition(":")
    return name.lower().removesuffix("."), port


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class KnownHosts:
    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = LOOPBACK_NAMES | {name.lower().strip("[]").removesuffix(".") for name in names if name}
        self._right: set[bytes] = set()
        """Headers that were found right, as they came."""

    def knows(self, header: bytes | None, local_address: str | None) -> bool:
        """`local_address`: the one the client connected to. A page cannot make a name of its own out of a plain address."""
        if header is None:
            return False
        if header in self._right:
            return True
        name, _ = split_host(header.decode("latin-1"))
        if name in self._names:
            if len(self._right) < 1000:
                self._right.add(header)
            return True
        return local_address is not None and name == local_address

    def same_origin(self, origin: bytes, host: bytes) -> bool:
        """Whether a page of this very broker sent it. `null` and what cannot be read are strangers."""
        parts = urlsplit(origin.decode("latin-1"))
        port = _DEFAULT_PORTS.get(parts.scheme)
        if port is None:
            return False
        name, given = split_host(parts.netloc)
        host_name, host_port = split_host(host.decode("latin-1"))
        return name == host_name and (given or port) == (host_port or port)
