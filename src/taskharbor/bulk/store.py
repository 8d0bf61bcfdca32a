"""The synchronous interface of bulk reading and writing, for tasks of a cluster that do nothing else meanwhile.

Every method may be called in another process than the one before: between them passes plain data (`Part`, cursors, names of
writes), never a connection.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, Self, TypeVar

import pyarrow as pa

from taskharbor.bulk import cursors, publish, read, stage
from taskharbor.bulk.stage import TaskStaging, chunked
from taskharbor.bulk.tables import Part, Selection, Table
from taskharbor.client import portal
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.registry import connect
from taskharbor.jobs import JobRecord, Micros

T = TypeVar("T")


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a driver's coroutine for a caller without an event loop."""
    return portal().call(work)


class BulkStore(Protocol):
    """A store, opened by a URL. Reading never blocks or slows claims."""

    url: str

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Safe to call twice."""

    # -- reading ----------------------------------------------------------------------------------------------

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        """Cover the table as it is now, in at most about `parallelism` parts; at least one, even where nothing is there."""

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one part, in batches that fit `bulk.tables` exactly."""

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    def start(self) -> str:
        """Return the cursor before the first row that is kept."""

    def latest(self) -> str:
        """Return a cursor at the end of the log. No row can appear before it any more."""

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        """Cover the rows after one cursor up to and including another. Raises `HistoryGone` if some were removed."""

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        """A cursor at most `rows` rows after `after` (None: any number), and not after `until`; at least one row further where
        there is one. Never before `after`: where `until` is, because retention took the rows at the end, it is `after`."""

    # -- writing ------------------------------------------------------------------------------------------------

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        """Put down one task's jobs where nobody sees them; how many. A task that is tried again uses another name. A batch may be
        `AlikeJobs`, which get their ids here or when they are published."""

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros | None = None) -> int:
        """Make the jobs of these tasks visible by the rules of `Driver.enqueue`, and drop those of all others. How many became
        jobs. A write that was published before stays as it is, and the answer is the same. `now`: the store's time if None."""

    def abandon(self, write: str) -> None:
        """Drop the staged jobs of a write that will not be published."""


class DriverStore(BulkStore):
    """A bulk store over any driver. A reader's handle is opened separately from a writer's, since it must not write."""

    def __init__(self, url: str, driver: Driver | None = None) -> None:
        super().__init__(url)
        self._reader = connect(url) if driver is None else driver
        self._writer = self._reader.clone()
        self._opened: set[Driver] = set()

    def close(self) -> None:
        opened, self._opened = self._opened, set()
        for driver in opened:
            run_sync(driver.close())

    def _reading(self) -> Driver:
        if self._reader not in self._opened:
            run_sync(self._reader.open_to_read())
            self._opened.add(self._reader)
        return self._reader

    def _writing(self) -> Driver:
        if self._writer not in self._opened:
            run_sync(self._writer.open())
            self._opened.add(self._writer)
        return self._writer

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        return run_sync(read.table_parts(self._reading(), table, selection, parallelism))

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        return read.read_part(self._reading(), part)

    def start(self) -> str:
        return str(cursors.Cursor())

    def latest(self) -> str:
        return str(cursors.at_end(run_sync(self._reading().log_streams())))

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        async def plan(driver: Driver) -> list[Part]:
            log = await driver.log_streams()
            first, last = cursors.parse(after, log), cursors.parse(until, log)
            ranges = cursors.ranges_between(log, first, last)
            await cursors.check_history(driver, log, ranges)
            return await read.log_parts(driver, ranges, Selection(), parallelism)

        return run_sync(plan(self._reading()))

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        async def limit(driver: Driver) -> str:
            log = await driver.log_streams()
            first = cursors.parse(after, log)
            last = cursors.never_back(log, first, cursors.parse(until, log))
            if last.places == first.places:
                return after
            return str(last if rows is None else await cursors.limited(driver, log, first, last, rows))

        return run_sync(limit(self._reading()))

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        driver = self._writing()
        staging = TaskStaging(driver, write, task)
        asked: Future[None] | None = None
        try:
            for jobs in chunked(batches, stage.BLOB_JOBS):
                # One blob is sent while the next is made.
                if asked is not None:
                    asked.result()
                asked = portal().begin(staging.put(jobs))
            if asked is not None:
                asked.result()
        finally:
            if asked is not None:
                wait([asked])
        count = run_sync(staging.complete())
        if run_sync(publish.is_over(driver, write)):
            # The write was published without this task, or abandoned. The task must leave nothing behind.
            run_sync(staging.drop())
            return 0
        return count

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros | None = None) -> int:
        driver = self._writing()
        at = run_sync(driver.time()) if now is None else now
        return run_sync(publish.publish(driver, write, tasks, at))

    def abandon(self, write: str) -> None:
        run_sync(publish.abandon(self._writing(), write))


def open_store(url: str) -> BulkStore:
    """The driver's own bulk store, or the one over the driver contract. No I/O yet: connections are made when needed.

    Raises what `connect` raises: an unknown scheme, a missing extra, options the driver does not know.
    """
    driver = connect(url)
    own = type(driver).bulk_store(url)
    return DriverStore(url, driver) if own is None else own
