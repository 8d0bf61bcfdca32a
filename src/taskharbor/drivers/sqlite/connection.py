"""Opening the database file, and what SQLite's errors mean to somebody who wants their queue back."""

from __future__ import annotations

import random
import sqlite3
import time
from pathlib import Path
from sqlite3 import Connection
from urllib.parse import quote

from taskharbor.drivers.sqlite.options import Options
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError

MINIMUM_VERSION = (3, 38, 0)

_FIRST_PAUSE = 0.000_3
_LONGEST_PAUSE = 0.001

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

_ADVICE = {
    sqlite3.SQLITE_BUSY: "another process held the database for longer than busy_timeout; look for a long transaction",
    sqlite3.SQLITE_LOCKED: "another process held the database for longer than busy_timeout; look for a long transaction",
    sqlite3.SQLITE_FULL: "the disk is full; free some space, nothing of this call was stored",
    sqlite3.SQLITE_IOERR: "the disk did not answer; check the file system",
    sqlite3.SQLITE_READONLY: "the file or its folder is not writable for this user",
    sqlite3.SQLITE_PERM: "this user may not open the file",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; check that its folder exists and is writable",
}
_DAMAGED = {
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a backup or run sqlite3's .recover on a copy",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database; check the path",
}


def open_connection(options: Options, *, writing: bool) -> Connection:
    """A connection in WAL mode. Raises TaskHarborError, never sqlite3's own."""
    if sqlite3.sqlite_version_info < MINIMUM_VERSION:
        raise TaskHarborError(
            f"SQLite {sqlite3.sqlite_version} is too old: this driver needs 3.38 or newer (Python's own library)"
        )
    path = options.path
    if not path.parent.is_dir():
        raise BackendUnavailable(f"{path}: the folder {path.parent} does not exist; create it first")
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode=rwc",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
            timeout=max(options.busy_timeout, 1.0),
        )
    except sqlite3.Error as error:
        raise translated(error, path) from error
    try:
        _prepare(connection, options, writing)
    except sqlite3.Error as error:
        connection.close()
        raise translated(error, path) from error
    return connection


def _prepare(connection: Connection, options: Options, writing: bool) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        connection.close()
        raise BackendUnavailable(
            f"{options.path}: this file system cannot hold a WAL database; use a local disk"
        )
    connection.execute(f"PRAGMA synchronous = {options.durability.upper()}")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA cache_size = -65536")
    if writing:
        # Debian builds SQLite to overwrite what is deleted; a queue deletes index entries all day long.
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        # `begin` waits by itself: SQLite's own handler sleeps up to 100 ms between two looks.
        connection.execute("PRAGMA busy_timeout = 0")
    else:
        connection.execute("PRAGMA query_only = ON")


def begin(connection: Connection, busy_timeout: float) -> None:
    """Start a write transaction, waiting for other processes' with short, random pauses."""
    pause = _FIRST_PAUSE
    deadline: float | None = None
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if _code(error) not in _BUSY:
                raise
            instant = time.monotonic()
            deadline = instant + busy_timeout if deadline is None else deadline
            if instant >= deadline:
                raise
        time.sleep(pause * (0.5 + random.random()))
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def translated(error: Exception, path: Path) -> Exception:
    """The TaskHarbor error for what went wrong in an operation; whatever is not ours stays what it is."""
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
    advice = _ADVICE.get(code)
    return BackendUnavailable(f"{path}: {error} ({advice})" if advice else f"{path}: {error}")


def _code(error: sqlite3.Error) -> int:
    """The primary result code: extended ones carry it in the low byte."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


__all__ = ["Connection", "begin", "open_connection", "translated"]
