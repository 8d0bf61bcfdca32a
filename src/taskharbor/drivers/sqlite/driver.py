"""A handle on an SQLite store: the contract's asynchronous face. The work itself is in the operations' modules."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Self, TypeVar

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import (
    Capabilities,
    Driver,
    JobShare,
    Woken,
)
from taskharbor.drivers.engine import bulk, inspect, reserve, settle
from taskharbor.drivers.engine.calls import FUNCTIONS
from taskharbor.drivers.engine.statements import Transaction
from taskharbor.drivers.sqlite.database import Database
from taskharbor.drivers.sqlite.migrations import migrate
from taskharbor.drivers.sqlite.notifications import PipeSource
from taskharbor.drivers.sqlite.options import Options, parse_url
from taskharbor.drivers.waiting import wait
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import JobRecord, Micros

A = TypeVar("A")

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
                database = self.database = Database(self.options)
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
        run = database.write if call.changes else database.read
        return await run(lambda tx: function(tx, call))

    async def _split_jobs(self, call: op.SplitJobs) -> list[JobShare]:
        return await self._apply(bulk.split_jobs, call)

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        def take_back(jobs: list[JobRecord]) -> Callable[[Transaction], None] | None:
            # The caller was cancelled: without this the jobs would stall until their leases expire.
            leases = [lease for job in jobs if (lease := job.lease) is not None]
            return (lambda tx: settle.release_all(tx, leases, call.now)) if leases else None

        return await self._opened.write(
            lambda tx: reserve.reserve(
                tx, call.queue, call.limit, call.lease_for, call.now, call.worker, call.types
            ),
            undo=take_back,
        )

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
            self._source = PipeSource(
                database.real_path,
                lambda names, since: database.read(lambda tx: inspect.watch(tx, names, since)),
            )
        return await wait(self._source, call)
