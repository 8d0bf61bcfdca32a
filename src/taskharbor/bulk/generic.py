"""Any driver as a bulk store, through its contract: page by page, one part per table. Slow, and always there.

A cursor here is `seq@cursor`: the last row's number, by which it is recognised again, and the driver's own cursor after it,
whose text means nothing to anybody else. What retention removes in between cannot be noticed this way, unless it takes the
row that a range ends with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from taskharbor.bulk.batches import attempt_row, from_rows, job_row, queue_row
from taskharbor.bulk.contract import HistoryGone, Part, Selection, Table
from taskharbor.bulk.driven import DriverBacked
from taskharbor.bulk.generic_writing import GenericWriting
from taskharbor.drivers.contract import AttemptPage, Driver, JobFilter, Page, QueueStats
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Attempt

_PAGE = 5_000
_NO_LIMIT = 2**63


class _Position(NamedTuple):
    seq: int
    cursor: str | None

    def __str__(self) -> str:
        return f"{self.seq}@{'' if self.cursor is None else self.cursor}"


_START = _Position(0, None)


def _position(cursor: str) -> _Position:
    seq, separator, rest = cursor.partition("@")
    if not separator or not seq.isdecimal():
        raise InvalidRequest(
            f"{cursor!r} is not a cursor of this store: pass on what `start` or `latest` gave"
        )
    return _Position(int(seq), rest or None)


class GenericReading(DriverBacked):
    """The reading half."""

    def __init__(self, url: str, driver: Driver | None = None) -> None:
        super().__init__(url, driver)
        self._furthest = _START
        """Where the last look for the end of the log came to: the next one goes on from there."""

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        if table == "attempts":
            return [
                Part(table=table, selection=selection, bounds={"after": str(_START), "until": self.latest()})
            ]
        return [Part(table=table, selection=selection)]

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        if part.table == "attempts":
            yield from self._read_attempts(part)
        elif part.table == "jobs":
            yield from self._read_jobs(part.selection)
        else:
            batch = from_rows("queues", map(queue_row, self._queues(part.selection.queue)))
            if batch is not None:
                yield batch

    # -- the attempt log ----------------------------------------------------------------------------------------

    def start(self) -> str:
        return str(_START)

    def latest(self) -> str:
        for page in self._pages(self._furthest.cursor):
            self._furthest = _Position(page.attempts[-1].seq, page.cursor)
        return str(self._furthest)

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        if _position(after).seq == _position(until).seq:
            return []
        return [Part(table="attempts", bounds={"after": after, "until": until})]

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        position, last = _position(after), _position(until).seq
        left = _NO_LIMIT if rows is None else rows
        while left > 0 and position.seq != last:
            page = self._page(position.cursor, min(left, _PAGE))
            if not page.attempts:
                break
            if any(one.seq == last for one in page.attempts):
                return until
            position = _Position(page.attempts[-1].seq, page.cursor)
            left -= len(page.attempts)
        return str(position)

    def _read_attempts(self, part: Part) -> Iterator[pa.RecordBatch]:
        after, last = _position(str(part.bounds["after"])), _position(str(part.bounds["until"])).seq
        if after.seq == last:
            return
        for page in self._pages(after.cursor):
            found = page.attempts
            end = next((n for n, one in enumerate(found, 1) if one.seq == last), None)
            wanted = [one for one in found[:end] if _is_wanted_attempt(one, part.selection)]
            batch = from_rows("attempts", map(attempt_row, wanted))
            if batch is not None:
                yield batch
            if end is not None:
                return
        raise HistoryGone(
            f"the log ends before row {last}, which was there when this read was planned: retention has removed it since. "
            "Keep the log longer (keep_attempts of the queues), or begin anew"
        )

    def _pages(self, cursor: str | None) -> Iterator[AttemptPage]:
        while (page := self._page(cursor, _PAGE)).attempts:
            yield page
            cursor = page.cursor

    def _page(self, cursor: str | None, limit: int) -> AttemptPage:
        return self.call(lambda driver: driver.read_attempts(after=cursor, limit=limit))

    # -- jobs and queues ----------------------------------------------------------------------------------------

    def _read_jobs(self, selection: Selection) -> Iterator[pa.RecordBatch]:
        wanted = JobFilter(
            queue=selection.queue,
            types=None if selection.type is None else frozenset({selection.type}),
            states=None if selection.state is None else frozenset({selection.state}),
        )
        cursor: str | None = None
        while True:
            page = self._job_page(wanted, cursor)
            jobs = [job for job in page.jobs if _is_within(job.created_at_us, selection)]
            batch = from_rows("jobs", map(job_row, jobs))
            if batch is not None:
                yield batch
            cursor = page.cursor
            if cursor is None:
                return

    def _job_page(self, wanted: JobFilter, cursor: str | None) -> Page:
        async def page(driver: Driver) -> Page:
            return await driver.list_jobs(wanted, now=await driver.time(), limit=_PAGE, cursor=cursor)

        return self.call(page)

    def _queues(self, queue: str | None) -> list[QueueStats]:
        async def stats(driver: Driver) -> list[QueueStats]:
            found = await driver.stats(now=await driver.time())
            return [one for one in found if queue is None or one.queue == queue]

        return self.call(stats)


class GenericStore(GenericReading, GenericWriting):
    """Both halves."""


def _is_wanted_attempt(one: Attempt, selection: Selection) -> bool:
    return (
        (selection.queue is None or one.queue == selection.queue)
        and (selection.type is None or one.type == selection.type)
        and (selection.state is None or one.state == selection.state)
        and _is_within(one.ended_at_us, selection)
    )


def _is_within(instant: int, selection: Selection) -> bool:
    """From `since` on, and before `until`: two reads with one end at the other's beginning share no row."""
    return (selection.since_us is None or instant >= selection.since_us) and (
        selection.until_us is None or instant < selection.until_us
    )
