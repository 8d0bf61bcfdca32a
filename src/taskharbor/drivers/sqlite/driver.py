"""A handle on an SQLite store, and the threads that its handles share: one that writes, with group commit, and one that reads.

Everything queued while a commit was on its way to the disk shares the next one, so a thousand single enqueues cost a
handful of syncs. An operation is a function of a transaction; its caller is answered only after the COMMIT. If one
of a group raises, the group is rolled back and each runs again in a transaction of its own, so a failing operation
takes nobody with it and the happy path pays for no savepoints. The rules are the engine's.
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
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from sqlite3 import Connection
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from msgspec.structs import astuple

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, Release, Woken
from taskharbor.drivers.engine import settle
from taskharbor.drivers.engine.dispatch import FUNCTIONS
from taskharbor.drivers.engine.repair import REPAIRED, set_aside, with_repair
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.sqlite.file import (
    SQLiteOptions,
    apply_pending,
    is_busy,
    migrate,
    open_connection,
    parse_url,
    translated,
)
from taskharbor.drivers.sqlite.notifications import PipeSource, notify_processes
from taskharbor.drivers.waiting import shared_notifications, wait
from taskharbor.errors import BackendUnavailable, SchemaMismatch, not_open
from taskharbor.jobs import JobRecord, Micros

A = TypeVar("A")
T = TypeVar("T")
Undo: TypeAlias = Callable[[Transaction, Any], Any]

_FIRST_PAUSE = 0.000_3
_LONGEST_PAUSE = 0.001

GROUP_LIMIT = 256
"""Operations per transaction: bounds how long the first of them waits for the last."""

_forked: list[object] = []
"""Connections that a forked child inherited. Closing them would release the parent's locks, so they are kept and not touched."""


class _Shared:
    """The database that a driver and its clones share. The first handle opens it, the last closes it."""

    def __init__(self, options: SQLiteOptions) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.database: Database | None = None

    def enter(self) -> Database:
        with self.lock:
            database = self.database
            if database is None or database.pid != os.getpid():
                if database is not None:
                    _forked.append(database)
                database = self.database = Database(self.options)
            database.handles += 1
            return database

    def leave(self, database: Database) -> bool:
        """Count one handle less. True if it was the last, so that the database is to be closed."""
        with self.lock:
            database.handles -= 1
            if database.handles == 0 and self.database is database:
                self.database = None
            return database.handles == 0


class SQLiteDriver(Driver):
    """`sqlite:///relative.db`, `sqlite:////absolute/path.db`; options `?durability=full|normal` and `?busy_timeout=seconds`.

    With durability=full (the default) an answer means that the disk has it. With durability=normal the death of a
    process still loses nothing, but a power loss may take the last commits.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        durable=True, multi_process=True, publishes_at_once=True
    )

    def __init__(self, options: SQLiteOptions, shared: _Shared | None = None) -> None:
        self._options = options
        self._shared = _Shared(options) if shared is None else shared
        self._database: Database | None = None
        self._source: PipeSource | None = None

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(parse_url(url))

    def clone(self) -> Self:
        return type(self)(self._options, self._shared)

    async def open(self) -> None:
        if self._database is not None:
            if self._database.pid == os.getpid():
                return
            self._source = None
        database = self._shared.enter()
        try:
            await asyncio.shield(asyncio.wrap_future(database.opened))
        except BaseException:
            if self._shared.leave(database):
                await database.close()
            raise
        self._database = database

    async def close(self) -> None:
        database, self._database = self._database, None
        if database is None or database.pid != os.getpid():
            return
        if self._source is not None:
            self._source.close()
            self._source = None
        if self._shared.leave(database):
            await database.close()

    @property
    def _opened(self) -> Database:
        if self._database is None:
            raise not_open(self._options.path)
        return self._database

    async def time(self) -> Micros:
        # The file lives on this host, so the host's clock is the backend's.
        return time.time_ns() // 1000

    async def migrate(self, *, dry_run: bool = False) -> list[str]:
        return await asyncio.to_thread(migrate, self._options, dry_run=dry_run)

    # -- operations ---------------------------------------------------------------------------------------

    functions = FUNCTIONS

    async def _apply(self, function: Callable[..., A], call: op.Operation[A]) -> A:
        database = self._opened
        if not call.changes:
            return await database.read(lambda tx: function(tx, *astuple(call)))
        undo: Undo | None = partial(_release, now=call.now) if isinstance(call, op.Reserve) else None

        def step(transaction: Transaction) -> Any:
            return function(transaction, *astuple(call))

        if isinstance(call, REPAIRED):
            answer: A = await with_repair(
                lambda run: database.write(run, undo if run is step else None), step, call.now
            )
            return answer
        return await database.write(step)

    async def repair(self) -> list[str]:
        """Set aside stored jobs that no call can load. Returns what was found."""
        now = await self.time()
        return await self._opened.write(lambda tx: set_aside(tx, now, ended_too=True))

    # -- in bulk ------------------------------------------------------------------------------------------

    async def open_to_read(self) -> None:
        if not self._options.path.is_file():
            raise BackendUnavailable(f"{self._options.path}: there is no such store; check the path")
        if await self.migrate(dry_run=True):
            raise SchemaMismatch(
                f"{self._options.path}: not a TaskHarbor store, or an old one: run `taskharbor migrate`"
            )
        await self.open()

    # -- waiting ------------------------------------------------------------------------------------------

    async def _wait(self, call: op.Wait) -> Woken:
        database = self._opened
        if self._source is None:
            self._source = PipeSource(database.pipes, database.notifications, database.read)
        return await wait(self._source, call)


def _release(transaction: Transaction, jobs: Sequence[JobRecord], now: Micros) -> None:
    """Give back what a caller reserved who was cancelled: else the jobs would stall until their leases expire."""
    settle.settle(transaction, [Release(job.id, job.token or "") for job in jobs], now)


@dataclass(slots=True, eq=False)
class QueuedCall(Generic[T]):
    """A function, and who waits for what it returns."""

    run: Callable[[Transaction], T]
    future: asyncio.Future[T] | None = None
    undo: Undo | None = None
    result: T | None = None
    error: Exception | None = None

    @property
    def is_wanted(self) -> bool:
        return self.future is None or not self.future.cancelled()


Inbox = SimpleQueue[QueuedCall[Any] | None]


class Database:
    """The threads of one file. Handles share it and count themselves in `handles`."""

    def __init__(self, options: SQLiteOptions) -> None:
        self.options = options
        self.pid = os.getpid()
        real_path = os.path.realpath(options.path)
        self.notifications = shared_notifications(real_path)
        self.pipes = f"{real_path}-notifications"
        """The folder with the pipes of waiters."""
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

    async def write(self, run: Callable[[Transaction], T], undo: Undo | None = None) -> T:
        """Run in a write transaction. `undo` takes back a result that nobody received."""
        return await self._ask(self._writes, run, undo)

    async def read(self, run: Callable[[Transaction], T]) -> T:
        """Run on the reader's connection, which never waits for a writer."""
        return await self._ask(self._reads, run)

    async def _ask(self, inbox: Inbox, run: Callable[[Transaction], T], undo: Undo | None = None) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        operation = QueuedCall(run, future, undo)
        self._put(inbox, operation)
        try:
            return await future
        except asyncio.CancelledError:
            # Answered, but cancelled before the answer was taken.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._take_back(operation)
            raise

    def _put(self, inbox: Inbox, operation: QueuedCall[Any]) -> None:
        if os.getpid() != self.pid:
            raise BackendUnavailable(
                f"{self.options.path} was opened by process {self.pid}, and process {os.getpid()} was forked from it: "
                "open() the driver again (or a clone) after the fork"
            )
        if self._is_closed:
            raise BackendUnavailable(f"{self.options.path} is closed: open() the driver first")
        inbox.put(operation)

    def _take_back(self, operation: QueuedCall[Any]) -> None:
        undo, result = operation.undo, operation.result
        if undo is not None and result and operation.error is None:
            with contextlib.suppress(BackendUnavailable):
                self._put(self._writes, QueuedCall(lambda tx: undo(tx, result)))

    # -- the writer's thread ------------------------------------------------------------------------------

    def _write_all(self) -> None:
        connection: Connection | None = None
        try:
            connection = open_connection(self.options, writing=True)
            apply_pending(connection, self.options)
            # `begin` waits by itself: SQLite's own handler sleeps up to 100 ms between two looks.
            connection.execute("PRAGMA busy_timeout = 0")
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
            notifies = bool(group) and self._commit_group(connection, group)
            self._answer(group)
            if notifies and self.notifications.waiters:
                self.notifications.notify()
            if notifies and os.path.isdir(self.pipes):
                notify_processes(self.pipes)
        self._reader.join()
        with contextlib.suppress(sqlite3.Error):
            connection.close()
        self._closing.set_result(None)

    def _take_group(self) -> tuple[list[QueuedCall[Any]], bool]:
        """Take all queued calls. The flag is False when the sentinel came."""
        group: list[QueuedCall[Any]] = []
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

    def _commit_group(self, connection: Connection, group: list[QueuedCall[Any]]) -> bool:
        """Commit calls together, or each alone if that fails. True if the commit wakes waiters."""
        try:
            return self._commit(connection, group)
        except Exception as error:
            if len(group) == 1:
                group[0].error = translated(error, self.options.path)
                return False
        alone = [self._commit_group(connection, [operation]) for operation in group]
        return any(alone)

    def _commit(self, connection: Connection, group: list[QueuedCall[Any]]) -> bool:
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

    def _answer(self, group: list[QueuedCall[Any]]) -> None:
        """One wake-up per event loop, whatever the number of callers."""
        by_loop: dict[asyncio.AbstractEventLoop, list[QueuedCall[Any]]] = {}
        for operation in group:
            if operation.future is not None:
                by_loop.setdefault(operation.future.get_loop(), []).append(operation)
        for loop, operations in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._deliver, operations)
            except RuntimeError:
                # The loop was closed under its callers: nobody will ever take these.
                for operation in operations:
                    self._take_back(operation)

    def _deliver(self, operations: list[QueuedCall[Any]]) -> None:
        for operation in operations:
            future = operation.future
            assert future is not None
            if future.done():
                self._take_back(operation)
            elif operation.error is not None:
                future.set_exception(operation.error)
            else:
                future.set_result(operation.result)


def begin(connection: Connection, busy_timeout: float) -> None:
    """Start a write transaction, waiting for other processes' with short, random pauses."""
    pause = _FIRST_PAUSE
    deadline = time.monotonic() + busy_timeout
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
        time.sleep(pause * (0.5 + random.random()))
        pause = min(pause * 1.5, _LONGEST_PAUSE)
