"""A handle on an SQLite store: the contract's calls, and waiting. The rules are the engine's.

Notifications go within the process by the shared registry, and between processes by named pipes. A handle that waits owns one
pipe in the folder `<file>-notifications`; a commit that may have made something runnable writes one byte into every pipe. The
byte says no more than "look again": the queues' versions are in the database, so a lost, doubled or late byte never loses a
wake-up for longer than the waiter's next look.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import (
    Capabilities,
    Driver,
    Woken,
)
from taskharbor.drivers.engine import inspect, settle
from taskharbor.drivers.engine.calls import FUNCTIONS
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.sqlite.database import Database, migrate
from taskharbor.drivers.sqlite.options import Options, parse_url
from taskharbor.drivers.waiting import Look, shared_notifications, wait
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import JobRecord, Micros

A = TypeVar("A")

SUFFIX = "-notifications"
POLL = 0.05
"""Seconds between two looks of a waiter that has no pipe,"""
POLL_WITH_PIPE = 1.0
"""and of one that has: a writer may be unable to reach it."""

_HIDDEN = "."
"""A pipe is made under a hidden name and renamed once it is open: one without a reader is taken for a dead process's."""

_forked: list[object] = []
"""What a forked child inherited. Closing it there would let go of the parent's locks, so it is kept and not touched."""


class _Shared:
    """What a driver and its clones have in common: the database, opened by the first and closed by the last."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.database: Database | None = None

    def enter(self) -> Database:
        with self.lock:
            database = self.database
            if database is None or database.pid != os.getpid():
                if database is not None:
                    _forked.append(database)
                database = self.database = Database(self.options, notify)
                database.start()
            database.handles += 1
            return database

    def leave(self, database: Database) -> bool:
        """Whether that was the last handle, so that the database is to be closed."""
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

    def __init__(self, options: Options, shared: _Shared | None = None) -> None:
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
            raise BackendUnavailable(
                f"{self._options.path} is not open: await open() first, or use `async with`"
            )
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
            return await database.read(lambda tx: function(tx, call))
        undo: Callable[[Any], Any] | None = (
            partial(_release, now=call.now) if isinstance(call, op.Reserve) else None
        )
        return await database.write(lambda tx: function(tx, call), undo)

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
            self._source = PipeSource(database)
        return await wait(self._source, call)


def _release(jobs: Sequence[JobRecord], now: Micros) -> Callable[[Transaction], None] | None:
    """Gives back what a caller reserved who was cancelled: else the jobs would stall until their leases expire."""
    leases = [lease for job in jobs if (lease := job.lease) is not None]
    return (lambda tx: settle.release_all(tx, leases, now)) if leases else None


class PipeSource:
    """One handle's queues and its pipe, for `waiting.wait`."""

    trusts_notifications = False

    def __init__(self, database: Database) -> None:
        self._database = database
        self.notifications = shared_notifications(database.real_path)
        self._folder = Path(f"{database.real_path}{SUFFIX}")
        self._name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pipe: int | None = None

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        versions, due = await self._database.read(lambda tx: inspect.watch(tx, queues, since))
        return Look.at((versions.get(queue, 0) for queue in queues), version, due)

    def listen(self, queues: Sequence[str]) -> float:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.close()
            self._loop = loop
            self._open(loop)
        return POLL if self._pipe is None else POLL_WITH_PIPE

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        if not hasattr(os, "mkfifo"):
            return
        hidden = self._folder / f"{_HIDDEN}{self._name}"
        try:
            self._folder.mkdir(exist_ok=True)
            _remove_abandoned(self._folder)
            os.mkfifo(hidden)
            # Read and write: so that the pipe never reports its end when the last writer closes it.
            self._pipe = os.open(hidden, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            os.rename(hidden, self._folder / self._name)
            loop.add_reader(self._pipe, self._read)
        except (OSError, NotImplementedError):
            # A folder that cannot be written, a file system without pipes, a loop without readers.
            self.close()

    def _read(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe, 4096)
        self.notifications.notify()

    def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None and self._loop is not None:
            # A loop that is closed already listens to nothing.
            with contextlib.suppress(RuntimeError, OSError, ValueError, NotImplementedError):
                self._loop.remove_reader(pipe)
            os.close(pipe)
        with contextlib.suppress(OSError):
            for name in (self._name, f"{_HIDDEN}{self._name}"):
                (self._folder / name).unlink(missing_ok=True)
            self._folder.rmdir()


def notify(real_path: str) -> None:
    """Wake all waiters of a database file, after a commit."""
    shared_notifications(real_path).notify()
    folder, own = f"{real_path}{SUFFIX}", f"{os.getpid()}-"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if not name.startswith((own, _HIDDEN)):
                _write_byte(Path(folder, name))


def _write_byte(pipe: Path) -> None:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            # Nobody reads: its process is gone.
            pipe.unlink(missing_ok=True)
        return
    # Full of bytes that nobody took yet (one of them is enough), or closed just now.
    with contextlib.suppress(OSError):
        os.write(descriptor, b"!")
    os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove the pipes of processes that died without closing."""
    for name in os.listdir(folder):
        pid, _, _ = name.removeprefix(_HIDDEN).partition("-")
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            (folder / name).unlink(missing_ok=True)
        except (OSError, ValueError):
            # Alive, and somebody else's; or no pipe of ours.
            continue
