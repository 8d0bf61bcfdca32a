"""What a `sqlite:///file.db?option=value` URL says. Parsing does no I/O, so a wrong option is found before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias, cast
from urllib.parse import parse_qsl, unquote

import msgspec

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
    durability, busy_timeout = "full", DEFAULT_BUSY_TIMEOUT
    for option, value in parse_qsl(query, keep_blank_values=True):
        if option == "durability" and value in ("full", "normal"):
            durability = value
        elif option == "busy_timeout":
            busy_timeout = _seconds(value)
        elif option == "durability":
            raise InvalidRequest(f"durability={value!r}: choose full (the default) or normal")
        else:
            raise InvalidRequest(f"{url!r}: unknown option {option!r}; known are durability and busy_timeout")
    return Options(path=Path(name), durability=cast(Durability, durability), busy_timeout=busy_timeout)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise InvalidRequest(f"busy_timeout={value!r}: give seconds between 0 and 3600, e.g. busy_timeout=10")
    return seconds
