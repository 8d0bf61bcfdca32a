"""The file of a store: what a `sqlite:///file.db?option=value` URL says of it, connections, schema, and errors.

Parsing a URL does no I/O, so a wrong option is found before any work.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Literal
from urllib.parse import quote, unquote

import msgspec

from taskharbor.drivers.engine import schema_migrations
from taskharbor.drivers.urls import Reader, choice, read_options, seconds, shown_url
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobDamaged, TaskHarborError

MINIMUM_VERSION = (3, 38, 0)

_ADVICE = {
    sqlite3.SQLITE_BUSY: "another process held the database for longer than busy_timeout; look for a long transaction",
    sqlite3.SQLITE_LOCKED: "another process held the database for longer than busy_timeout; look for a long transaction",
    sqlite3.SQLITE_FULL: "the disk is full; free some space, nothing of this call was stored",
    sqlite3.SQLITE_IOERR: "the disk did not answer; check the file system",
    sqlite3.SQLITE_READONLY: "the file or its folder is not writable for this user",
    sqlite3.SQLITE_PERM: "this user may not open the file",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; check that it is no folder, and that its folder exists and is writable",
}
_DAMAGED = {
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a backup or run sqlite3's .recover on a copy",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database; check the path",
}

_HOW = "write it like sqlite:///relative.db or sqlite:////absolute/path.db"


class SQLiteOptions(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    durability: Literal["full", "normal"] = "full"
    """full: a commit is on the disk before it is answered. normal: the last commits before a power loss may be gone;
    the death of processes loses nothing either way."""
    busy_timeout: float = 10.0
    """Seconds to wait for another process's transaction before giving up."""


def parse_url(url: str) -> SQLiteOptions:
    scheme, separator, rest = url.partition("://")
    if scheme != "sqlite" or not separator:
        raise InvalidRequest(f"{shown_url(url)!r} is not an SQLite URL: {_HOW}")
    location, _, query = rest.partition("?")
    if not location.startswith("/"):
        raise InvalidRequest(f"{shown_url(url)!r} names a host; an SQLite store is a local file: {_HOW}")
    name = unquote(location[1:])
    if name in ("", ":memory:"):
        raise InvalidRequest(f"{shown_url(url)!r} names no file: {_HOW}; for a store in memory use memory://")
    if "\0" in name or name.endswith("/"):
        raise InvalidRequest(f"{shown_url(url)!r} does not name a file: {_HOW}")
    readers: dict[str, Reader] = {
        "durability": choice("full", "normal"),
        "busy_timeout": partial(seconds, least=0),
    }
    return msgspec.convert({"path": Path(name), **read_options(query, readers, "SQLite")}, SQLiteOptions)


def open_connection(options: SQLiteOptions, *, writing: bool) -> Connection:
    """A connection in WAL mode. Raises TaskHarborError, never sqlite3's own."""
    if sqlite3.sqlite_version_info < MINIMUM_VERSION:
        raise TaskHarborError(
            f"SQLite {sqlite3.sqlite_version} is too old: this driver needs 3.38 or newer (Python's own library)"
        )
    path = options.path
    if not path.parent.is_dir():
        raise BackendUnavailable(f"{path}: the folder {path.parent} does not exist; create it first")
    if writing and not path.exists():
        _make_private(path)
    connection: Connection | None = None
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode=rwc",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
            timeout=max(options.busy_timeout, 1.0),
        )
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise BackendUnavailable(f"{path}: this file system cannot hold a WAL database; use a local disk")
        connection.execute(f"PRAGMA synchronous = {options.durability.upper()}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cache_size = -65536")
        if writing:
            # Debian builds SQLite to overwrite what is deleted; a queue deletes index entries all day long.
            connection.execute("PRAGMA secure_delete = OFF")
            connection.execute("PRAGMA wal_autocheckpoint = 4000")
        else:
            connection.execute("PRAGMA query_only = ON")
    except Exception as error:
        if connection is not None:
            connection.close()
        raise translated(error, path) from None
    return connection


def _make_private(path: Path) -> None:
    """Make the file so that only its owner can read it; SQLite gives the files beside it the same mode. What fails here fails
    again in SQLite, which says why."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        # A link, because closing a descriptor of a database would drop the locks that this process holds on it.
        (file := Path(folder, "new")).touch(0o600)
        os.link(file, path)


def translated(error: Exception, path: Path) -> Exception:
    """Return the TaskHarbor error for an error in an operation. An error that is not SQLite's is returned unchanged."""
    if isinstance(error, TaskHarborError):
        return error
    if isinstance(
        error, (OverflowError, UnicodeEncodeError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
    ):
        return InvalidRequest(f"a value cannot be stored in SQLite: {error}")
    if not isinstance(error, sqlite3.Error):
        return error
    code = _code(error)
    if code in _DAMAGED:
        return TaskHarborError(f"{path}: {error} ({_DAMAGED[code]})")
    if code in (0, sqlite3.SQLITE_CONSTRAINT):
        return JobDamaged(f"{path}: {error} (a stored value is damaged: run `taskharbor doctor --repair`)")
    advice = _ADVICE.get(code)
    return BackendUnavailable(f"{path}: {error} ({advice})" if advice else f"{path}: {error}")


def _code(error: sqlite3.Error) -> int:
    """The primary result code: extended ones carry it in the low byte."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    """True if another process is writing."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def apply_pending(connection: Connection, options: SQLiteOptions) -> list[str]:
    """Apply what is missing; the names of the steps taken. Safe when several processes start at once."""
    steps = schema_migrations.known()
    if not schema_migrations.pending(connection, options.path, steps):
        return []
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Again under the lock: another process may have done it meanwhile.
        missing = schema_migrations.pending(connection, options.path, steps)
        schema_migrations.apply(connection, missing)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return [migration.name for migration in missing]


def migrate(options: SQLiteOptions, *, dry_run: bool) -> list[str]:
    """For `taskharbor migrate`: on a connection of its own, so that a dry run touches nothing."""
    steps = schema_migrations.known()
    if dry_run and not options.path.exists():
        return [migration.name for migration in steps]
    connection = open_connection(options, writing=not dry_run)
    try:
        if dry_run:
            return [one.name for one in schema_migrations.pending(connection, options.path, steps)]
        return apply_pending(connection, options)
    except Exception as error:
        raise translated(error, options.path) from error
    finally:
        connection.close()
