"""One database file in one process: opening it, its schema, a thread that writes, a thread that reads, and group commit.

Everything queued while a commit was on its way to the disk shares the next one, so a thousand single enqueues cost a
handful of syncs. An operation is a function of a transaction; its caller is answered only after the COMMIT. If one
of a group raises, the group is rolled back and each runs again in a transaction of its own, so a failing operation
takes nobody with it and the happy path pays for no savepoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from sqlite3 import Connection
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from taskharbor.drivers.engine import schema
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.migrations import Migration
from taskharbor.drivers.sqlite.options import Options
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError

T = TypeVar("T")

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

GROUP_LIMIT = 256
"""Operations per transaction: bounds how long the first of them waits for the last."""


class Operation(Generic[T]):
    """A function, and who waits for what it returns."""

    __slots__ = ("error", "future", "loop", "result", "run", "undo")

    def __init__(
        self,
        run: Callable[[Transaction], T],
        loop: asyncio.AbstractEventLoop | None,
        future: asyncio.Future[T] | None,
        undo: Callable[[T], Callable[[Transaction], Any] | None] | None = None,
    ) -> None:
        self.run = run
        self.loop = loop
        self.future = future
        self.undo = undo
        self.result: T | None = None
        self.error: Exception | None = None

    @property
    def is_wanted(self) -> bool:
        return self.future is None or not self.future.cancelled()


Inbox = SimpleQueue[Operation[Any] | None]


class Database:
    """The threads of one file. Handles share it and count themselves in `handles`."""

    def __init__(self, options: Options, notify: Callable[[str], None]) -> None:
        self.options = options
        self._notify = notify
        self.pid = os.getpid()
        self.real_path = os.path.realpath(options.path)
        self.commits = 0
        """Transactions that wrote something: each of them is one sync with durability=full."""
        self.handles = 0
        self.opened: Future[None] = Future()
        self._writes: Inbox = SimpleQueue()
        self._reads: Inbox = SimpleQueue()
        self._is_closed = False
        self._closing: Future[None] = Future()
        name = f"taskharbor-sqlite-{options.path.name}"
        self._writer = threading.Thread(target=self._write_all, name=f"{name}-writer", daemon=True)
        self._reader = threading.Thread(target=self._read_all, name=f"{name}-reader", daemon=True)

    def start(self) -> None:
        self._writer.start()

    async def close(self) -> None:
        """Finish what is queued, then let go of the file."""
        if not self._is_closed:
            self._is_closed = True
            self._reads.put(None)
            self._writes.put(None)
        # Shielded: a cancelled close must not leave the threads' answer without a taker.
        await asyncio.shield(asyncio.wrap_future(self._closing))

    # -- asked from any event loop ------------------------------------------------------------------------

    async def write(
        self,
        run: Callable[[Transaction], T],
        undo: Callable[[T], Callable[[Transaction], Any] | None] | None = None,
    ) -> T:
        """Run in a write transaction. `undo` makes the operation that takes back a result nobody received."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._put(self._writes, Operation(run, loop, future, undo))
        try:
            return await future
        except asyncio.CancelledError:
            # Answered, but cancelled before the answer was taken.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._take_back(undo, future.result())
            raise

    async def read(self, run: Callable[[Transaction], T]) -> T:
        """Run on the reader's connection, which never waits for a writer."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._put(self._reads, Operation(run, loop, future))
        return await future

    def _put(self, inbox: Inbox, operation: Operation[Any]) -> None:
        if os.getpid() != self.pid:
            raise BackendUnavailable(
                f"{self.options.path} was opened by process {self.pid}, and process {os.getpid()} was forked from it: "
                "open() the driver again (or a clone) after the fork"
            )
        if self._is_closed:
            raise BackendUnavailable(f"{self.options.path} is closed: open() the driver first")
        inbox.put(operation)

    def _take_back(self, undo: Callable[[T], Callable[[Transaction], Any] | None] | None, result: T) -> None:
        operation = None if undo is None else undo(result)
        if operation is not None:
            with contextlib.suppress(BackendUnavailable):
                self._put(self._writes, Operation(operation, None, None))

    # -- the writer's thread ------------------------------------------------------------------------------

    def _write_all(self) -> None:
        connection: Connection | None = None
        try:
            connection = open_connection(self.options, writing=True)
            apply_pending(connection, self.options)
        except Exception as error:
            if connection is not None:
                connection.close()
            self._is_closed = True
            self._closing.set_result(None)
            self.opened.set_exception(translated(error, self.options.path))
            return
        self._reader.start()
        self.opened.set_result(None)
        is_running = True
        while is_running:
            group, is_running = self._take_group()
            if group:
                self._commit_group(connection, group)
        self._reader.join()
        with contextlib.suppress(sqlite3.Error):
            connection.close()
        self._closing.set_result(None)

    def _take_group(self) -> tuple[list[Operation[Any]], bool]:
        """Everything that is queued; False with it when the sentinel came."""
        group: list[Operation[Any]] = []
        operation = self._writes.get()
        try:
            while operation is not None:
                if operation.is_wanted:
                    group.append(operation)
                if len(group) >= GROUP_LIMIT:
                    return group, True
                operation = self._writes.get_nowait()
        except Empty:
            return group, True
        return group, False

    def _commit_group(self, connection: Connection, group: list[Operation[Any]]) -> None:
        notifies = False
        if len(group) > 1:
            try:
                notifies = self._commit(connection, group)
            except Exception:
                for operation in group:
                    notifies = self._commit_alone(connection, operation) or notifies
        else:
            notifies = self._commit_alone(connection, group[0])
        self._answer(group)
        if notifies:
            self._notify(self.real_path)

    def _commit_alone(self, connection: Connection, operation: Operation[Any]) -> bool:
        try:
            return self._commit(connection, [operation])
        except Exception as error:
            operation.error = translated(error, self.options.path)
            return False

    def _commit(self, connection: Connection, group: list[Operation[Any]]) -> bool:
        begin(connection, self.options.busy_timeout)
        transaction = Transaction(connection)
        before = connection.total_changes
        try:
            for operation in group:
                operation.result = operation.run(transaction)
            connection.execute("COMMIT")
        except BaseException:
            # SQLite may have rolled back by itself (disk full, I/O error).
            if connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            raise
        self.commits += connection.total_changes != before
        return transaction.notifies

    # -- the reader's thread ------------------------------------------------------------------------------

    def _read_all(self) -> None:
        connection: Connection | None = None
        while (operation := self._reads.get()) is not None:
            if not operation.is_wanted:
                continue
            try:
                if connection is None:
                    connection = open_connection(self.options, writing=False)
                connection.execute("BEGIN")
                try:
                    operation.result = operation.run(Transaction(connection))
                finally:
                    if connection.in_transaction:
                        connection.execute("COMMIT")
            except Exception as error:
                operation.error = translated(error, self.options.path)
            self._answer([operation])
        if connection is not None:
            connection.close()

    # -- answers ------------------------------------------------------------------------------------------

    def _answer(self, group: list[Operation[Any]]) -> None:
        """One wake-up per event loop, whatever the number of callers."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Operation[Any]]] = {}
        for operation in group:
            if operation.loop is not None:
                by_loop.setdefault(operation.loop, []).append(operation)
        for loop, operations in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._deliver, operations)
            except RuntimeError:
                # The loop was closed under its callers: nobody will ever take these.
                for operation in operations:
                    if operation.error is None:
                        self._take_back(operation.undo, operation.result)

    def _deliver(self, operations: list[Operation[Any]]) -> None:
        for operation in operations:
            future = operation.future
            assert future is not None
            if future.done():
                if operation.error is None:
                    self._take_back(operation.undo, operation.result)
            elif operation.error is not None:
                future.set_exception(operation.error)
            else:
                future.set_result(operation.result)


# -- the file -----------------------------------------------------------------------------------------------


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


def apply_pending(
    connection: Connection, options: Options, known: Sequence[Migration] | None = None
) -> list[str]:
    """Apply what is missing; the names of the steps taken. Safe when several processes start at once."""
    steps = schema.known() if known is None else known
    if not schema.pending(connection, options.path, steps):
        return []
    begin(connection, options.busy_timeout)
    try:
        # Again under the lock: another process may have done it meanwhile.
        missing = schema.pending(connection, options.path, steps)
        schema.apply(connection, missing)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return [migration.name for migration in missing]


def migrate(options: Options, *, dry_run: bool) -> list[str]:
    """For `taskharbor migrate`: on a connection of its own, so that a dry run touches nothing."""
    steps = schema.known()
    if dry_run and not options.path.exists():
        return [migration.name for migration in steps]
    connection = open_connection(options, writing=not dry_run)
    try:
        if dry_run:
            return [migration.name for migration in schema.pending(connection, options.path, steps)]
        return apply_pending(connection, options)
    except Exception as error:
        raise translated(error, options.path) from error
    finally:
        connection.close()
