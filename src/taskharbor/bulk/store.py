"""The synchronous interface of bulk reading and writing, for tasks of a cluster that do nothing else meanwhile.

Every method may be called in another process than the one before: between them passes plain data (`Part`, cursors, names of
writes), never a connection.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Self, TypeVar

import pyarrow as pa

from taskharbor.bulk import cursors, publish_staged, read_tables, stage
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


class BulkStore:
    """A store, opened by a URL, over the driver contract. Reading never blocks or slows claims. A reader's handle is opened
    separately from a writer's, since it must not write."""

    def __init__(self, url: str, driver: Driver | None = None) -> None:
        self.url = url
        self._reader = connect(url) if driver is None else driver
        self._writer = self._reader.clone()
        self._opened: set[Driver] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Safe to call twice."""
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

    def time(self) -> Micros:
        """Return the store's time."""
        return run_sync(self._reading().time())

    # -- reading ----------------------------------------------------------------------------------------------

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        """Cover the table as it is now, in at most about `parallelism` parts; at least one, even where nothing is there."""
        return run_sync(read_tables.table_parts(self._reading(), table, selection, parallelism))

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one part, in batches that fit `bulk.tables` exactly."""
        return read_tables.read_part(self._reading(), part)

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    def start(self) -> str:
        """Return the cursor before the first row that is kept."""
        return str(cursors.LogCursor())

    def latest(self) -> str:
        """Return a cursor at the end of the log. No row can appear before it any more."""
        return str(cursors.at_end(run_sync(self._reading().log_streams())))

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        """Cover the rows after one cursor up to and including another. Raises `HistoryGone` if some were removed."""
        return run_sync(read_tables.log_parts_between(self._reading(), after, until, parallelism))

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        """Return a cursor at most `rows` rows after `after` (None: any number), and not after `until`; at least one row further
        if there is one. Never before `after`: if retention took the rows at the end, so that `until` is, it is `after`."""
        return run_sync(cursors.limited(self._reading(), after, until, rows))

    # -- writing ------------------------------------------------------------------------------------------------

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        """Put down one task's jobs where nobody sees them. Returns their number. A task that is tried again uses another name. A
        batch may be `AlikeJobs`, which get their ids here or when they are published."""
        driver = self._writing()
        staging = TaskStaging(driver, write, task)
        sent: Future[None] = Future()
        sent.set_result(None)
        try:
            for jobs in chunked(batches, stage.BLOB_JOBS):
                # One blob is sent while the next is made.
                sent.result()
                sent = portal().begin(staging.put(jobs))
            sent.result()
        finally:
            wait([sent])
        count = run_sync(staging.complete())
        if run_sync(publish_staged.is_over(driver, write)):
            # The write was published without this task, or abandoned. The task must leave nothing behind.
            run_sync(staging.drop())
            return 0
        return count

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros | None = None) -> int:
        """Make the jobs of these tasks visible by the rules of `Driver.enqueue`, and drop those of all others. Returns the number
        of new jobs. A write that was published before stays as it is, and the answer is the same. `now`: the store's time if
        None."""
        driver = self._writing()
        at = run_sync(driver.time()) if now is None else now
        return run_sync(publish_staged.publish(driver, write, tasks, at))

    def abandon(self, write: str) -> None:
        """Drop the staged jobs of a write that will not be published."""
        run_sync(publish_staged.abandon(self._writing(), write))


def open_store(url: str) -> BulkStore:
    """The driver's own bulk store, or the one over the driver contract. No I/O yet: connections are made when needed.

    Raises what `connect` raises: an unknown scheme, a missing extra, options the driver does not know.
    """
    driver = connect(url)
    own = type(driver).bulk_store(url)
    return BulkStore(url, driver) if own is None else own
