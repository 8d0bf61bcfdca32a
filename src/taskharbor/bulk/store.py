"""The synchronous interface of bulk reading and writing, for tasks of a cluster that do nothing else meanwhile.

Every method may be called in another process than the one before: between them passes plain data (`Part`, cursors, names of
writes), never a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import chain, pairwise
from typing import Any, Self, TypeVar

import pyarrow as pa
from msgspec.structs import replace

from taskharbor.bulk import cursors, publish_staged, stage
from taskharbor.bulk.cursors import LogRange, check_history, parse, ranges_between
from taskharbor.bulk.stage import TaskStaging, chunked
from taskharbor.bulk.tables import Part, Selection, Table, attempts_batch, jobs_batch, queues_batch, selected
from taskharbor.client import portal
from taskharbor.drivers.contract import Driver, JobFilter, JobShare
from taskharbor.drivers.registry import connect
from taskharbor.jobs import Attempt, JobRecord, Micros

T = TypeVar("T")
P = TypeVar("P")


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a driver's coroutine for a caller without an event loop."""
    return portal().call(work)


# -- reading tables through the driver contract: the planner cuts them into parts, tasks in other processes read one part each --

ROWS_PER_PART = 20_000
"""The least rows of a part. A smaller part costs more to start than to read."""
JOBS_PER_PART = 10_000

_PIECES_PER_PART = 4
_PAGE = 5_000
_BATCH_ROWS = 10_000
_BATCH_BYTES = 16_000_000
_SMALLEST_PAGE = 100
_PAGE_BYTES = 4_000_000


# -- planning -------------------------------------------------------------------------------------------------


async def table_parts(driver: Driver, table: Table, selection: Selection, parallelism: int) -> list[Part]:
    """Cover the table as it is now, in about `parallelism` parts; at least one."""
    if table == "attempts":
        log = await driver.log_streams()
        ranges = [
            LogRange(one.name, one.queue, 0, one.last)
            for one in log.streams
            if one.last and (selection.queue is None or one.queue in (None, selection.queue))
        ]
        return await _log_parts(driver, ranges, selection, parallelism) or [
            Part(table=table, selection=selection, bounds={"ranges": []})
        ]
    now = await driver.time()
    if table == "queues":
        return [Part(table=table, selection=selection, bounds={"now": now})]
    queues = await driver.stats(now=now)
    jobs = sum(
        count
        for one in queues
        if selection.queue in (None, one.queue)
        for state, count in one.counts.items()
        if selection.state in (None, state)
    )
    count = max(1, min(parallelism, jobs // JOBS_PER_PART))
    shares = await driver.split_jobs(queue=selection.queue, parts=count)
    return [
        Part(table=table, selection=selection, bounds={"shares": shares[n::count], "now": now})
        for n in range(min(count, len(shares)) or 1)
    ]


async def log_parts_between(driver: Driver, after: str, until: str, parallelism: int) -> list[Part]:
    """Cover the rows of the log after one cursor up to and including another. Raises HistoryGone if some were removed."""
    log = await driver.log_streams()
    ranges = ranges_between(log, parse(after, log), parse(until, log))
    await check_history(driver, ranges, log)
    return await _log_parts(driver, ranges, Selection(), parallelism)


async def _log_parts(
    driver: Driver, ranges: Sequence[LogRange], selection: Selection, parallelism: int
) -> list[Part]:
    """Cut these ranges into shares of about the same number of rows."""
    pieces: list[LogRange] = []
    rows = max(1, ROWS_PER_PART // _PIECES_PER_PART)
    for one in ranges:
        edges = await driver.split_log(one.stream, after=one.after, until=one.until, rows=rows)
        for low, high in pairwise([one.after, *edges, one.until]):
            is_resumed = one.is_resumed and low == one.after
            pieces.append(replace(one, after=low, until=high, is_resumed=is_resumed))
    count = max(1, min(parallelism, len(pieces) // _PIECES_PER_PART))
    edges = [len(pieces) * n // count for n in range(count + 1)]
    return [
        Part(table="attempts", selection=selection, bounds={"ranges": _joined(pieces[low:high])})
        for low, high in pairwise(edges)
        if low < high
    ]


def _joined(pieces: Sequence[LogRange]) -> list[LogRange]:
    joined: list[LogRange] = []
    for one in pieces:
        if joined and joined[-1].stream == one.stream and joined[-1].until == one.after:
            joined[-1] = replace(joined[-1], until=one.until)
        else:
            joined.append(one)
    return joined


# -- reading --------------------------------------------------------------------------------------------------


def read_part(driver: Driver, part: Part) -> Iterator[pa.RecordBatch]:
    """Read the rows of one part. Call it from a thread that is not the portal's."""
    if part.table == "attempts":
        ranges: list[LogRange] = part.bounds["ranges"]
        rows = (page for one in ranges for page in _pages(partial(_log_page, driver, one), one.after))
        yield from _batches(rows, attempts_batch, part.selection, "ended_at")
        if any(one.is_strict for one in ranges):
            # Rows that retention removed during the read are missing from it.
            portal().call(check_history(driver, ranges))
    elif part.table == "jobs":
        jobs = (
            page
            for share in part.bounds["shares"]
            for page in _pages(partial(_job_page, driver, part, share), (share.after, _SMALLEST_PAGE))
        )
        yield from _batches(jobs, jobs_batch, part.selection, "created_at", _weight)
    else:
        queues = portal().call(driver.stats(now=part.bounds["now"]))
        if wanted := [one for one in queues if part.selection.queue in (None, one.queue)]:
            yield queues_batch(wanted)


async def _log_page(driver: Driver, one: LogRange, after: int) -> tuple[list[Attempt], int | None]:
    page = await driver.read_log(one.stream, after=after, until=one.until, limit=_PAGE)
    return page.attempts, page.place if page.place < one.until else None


async def _job_page(
    driver: Driver, part: Part, share: JobShare, at: tuple[str | None, int]
) -> tuple[list[JobRecord], tuple[str | None, int] | None]:
    selection, (cursor, limit) = part.selection, at
    wanted = JobFilter(
        queue=selection.queue if share.queue is None else share.queue,
        types=None if selection.type is None else frozenset({selection.type}),
        states=None if selection.state is None else frozenset({selection.state}),
        until=share.until,
    )
    page = await driver.list_jobs(wanted, now=part.bounds["now"], limit=limit, cursor=cursor)
    if page.cursor is None:
        return page.jobs, None
    # Larger pages while jobs are small.
    size = sum(map(_weight, page.jobs)) // len(page.jobs) + 1
    return page.jobs, (page.cursor, max(_SMALLEST_PAGE, min(_PAGE, 4 * limit, _PAGE_BYTES // size)))


def _weight(job: JobRecord) -> int:
    return len(job.payload) + len(job.result or b"")


def _batches(
    pages: Iterable[list[T]],
    make: Callable[[list[T]], pa.RecordBatch],
    selection: Selection,
    instant: str,
    weigh: Callable[[T], int] = lambda row: 0,
) -> Iterator[pa.RecordBatch]:
    """Yield the selected rows of the pages, in batches that are neither too long nor too large."""
    rows: list[T] = []
    weight = 0
    for page in chain(pages, [None]):
        rows += page or []
        weight += sum(map(weigh, page or []))
        if rows and (page is None or len(rows) >= _BATCH_ROWS or weight >= _BATCH_BYTES):
            chosen = selected(make(rows), selection, instant)
            if chosen.num_rows:
                yield chosen
            rows, weight = [], 0


def _pages(ask: Callable[[P], Coroutine[Any, Any, tuple[list[T], P | None]]], start: P) -> Iterator[list[T]]:
    """Yield page after page. The next page is requested while the caller works on the last."""

    asked: Future[tuple[list[T], P | None]] | None = portal().begin(ask(start))
    try:
        while asked is not None:
            rows, following = asked.result()
            asked = None if following is None else portal().begin(ask(following))
            yield rows
    finally:
        if asked is not None:
            asked.cancel()


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
        return run_sync(table_parts(self._reading(), table, selection, parallelism))

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one part, in batches that fit `bulk.tables` exactly."""
        return read_part(self._reading(), part)

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    def start(self) -> str:
        """Return the cursor before the first row that is kept."""
        return str(cursors.LogCursor())

    def latest(self) -> str:
        """Return a cursor at the end of the log. No row can appear before it any more."""
        return str(cursors.at_end(run_sync(self._reading().log_streams())))

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        """Cover the rows after one cursor up to and including another. Raises `HistoryGone` if some were removed."""
        return run_sync(log_parts_between(self._reading(), after, until, parallelism))

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
