"""Reads tables through the driver contract: the planner cuts them into parts, and tasks in other processes read one part each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, pairwise
from typing import Any, TypeVar

import pyarrow as pa
from msgspec.structs import replace

from taskharbor.bulk.cursors import LogRange, check_history, parse, ranges_between
from taskharbor.bulk.tables import Part, Selection, Table, attempts_batch, jobs_batch, queues_batch, selected
from taskharbor.client import portal
from taskharbor.drivers.contract import Driver, JobFilter, JobShare
from taskharbor.jobs import Attempt, JobRecord

ROWS_PER_PART = 20_000
"""The least rows of a part. A smaller part costs more to start than to read."""
JOBS_PER_PART = 10_000

_PIECES_PER_PART = 4
_PAGE = 5_000
_BATCH_ROWS = 10_000
_BATCH_BYTES = 16_000_000
_SMALLEST_PAGE = 100
_PAGE_BYTES = 4_000_000

T = TypeVar("T")
P = TypeVar("P")


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
