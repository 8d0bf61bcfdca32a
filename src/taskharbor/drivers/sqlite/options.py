"""What a `sqlite:///file.db?option=value` URL says. Parsing does no I/O, so a wrong option is found before any work."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote

import msgspec

from taskharbor.drivers.urls import Reader, choice, read_options, seconds
from taskharbor.errors import InvalidRequest

Durability: TypeAlias = Literal["full", "normal"]

DEFAULT_BUSY_TIMEOUT = 10.0

_HOW = "write it like sqlite:///relative.db or sqlite:////absolute/path.db"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    durability: Durability = "full"
    """full: a commit is on the disk before it is answered. normal: the last commits before a power loss may be gone;
    the death of processes loses nothing either way."""
    busy_timeout: float = DEFAULT_BUSY_TIMEOUT
    """Seconds to wait for another process's transaction before giving up."""


def parse_url(url: str) -> Options:
    scheme, separator, rest = url.partition("://")
    if scheme != "sqlite" or not separator:
        raise InvalidRequest(f"{url!r} is not an SQLite URL: {_HOW}")
    location, _, query = rest.partition("?")
    if not location.startswith("/"):
        raise InvalidRequest(f"{url!r} names a host; an SQLite store is a local file: {_HOW}")
    name = unquote(location[1:])
    if name in ("", ":memory:"):
        raise InvalidRequest(f"{url!r} names no file: {_HOW}; for a store in memory use memory://")
    if "\0" in name or name.endswith("/"):
        raise InvalidRequest(f"{url!r} does not name a file: {_HOW}")
    return msgspec.convert({"path": Path(name), **read_options(query, _OWN, "SQLite")}, Options)


_OWN: dict[str, Reader] = {
    "durability": choice("full", "normal"),
    "busy_timeout": partial(seconds, least=0),
}
