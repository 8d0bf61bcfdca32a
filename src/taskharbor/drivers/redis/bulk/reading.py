"""Reading a Redis store: streams by ranges of their ids, jobs by ranges of their sets, several tasks at once.

Everything is read in pages that keep the server for less than a millisecond, and the next is asked for while the last is
turned into Arrow. Nothing is held on the server in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from taskharbor.bulk.batches import from_rows, job_row, queue_row
from taskharbor.bulk.contract import Part, Selection, Table
from taskharbor.drivers.contract import QueueStats
from taskharbor.drivers.redis import inspect
from taskharbor.drivers.redis.bulk import jobs, ranges, streams
from taskharbor.drivers.redis.bulk.attempts import rows_from
from taskharbor.drivers.redis.bulk.held import HeldStore
from taskharbor.drivers.redis.bulk.ranges import Range
from taskharbor.drivers.redis.log import page_call, place_of
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.redis.stored import record_from
from taskharbor.jobs import JobRecord, Micros

_PAGE = 1000
_BATCH_ROWS = 10_000
_BATCH_BYTES = 16_000_000


class RedisReading(HeldStore):
    """The reading half."""

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        if table == "queues":
            return [Part(table=table, selection=selection)]
        if table == "attempts":
            return self.call(lambda store: _attempt_parts(store, selection, parallelism))
        return self.call(lambda store: _job_parts(store, selection, parallelism))

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        if part.table == "attempts":
            return self._read_attempts(part)
        if part.table == "jobs":
            return self._read_jobs(part)
        return self._read_queues(part.selection.queue)

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    def start(self) -> str:
        return self.call(streams.start)

    def latest(self) -> str:
        return self.call(streams.latest)

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        async def planned(store: Store) -> list[list[Range]]:
            found = await streams.ranges_between(store, after, until)
            return await ranges.shared_out(store, found, parallelism)

        return [
            Part(table="attempts", bounds={"ranges": ranges.written(share)}) for share in self.call(planned)
        ]

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        return self.call(lambda store: streams.limited(store, after, until, rows))

    # -- rows ---------------------------------------------------------------------------------------------------

    def _read_attempts(self, part: Part) -> Iterator[pa.RecordBatch]:
        selection = part.selection
        wanted = [one for one in ranges.parsed(part.bounds["ranges"]) if selection.queue in (None, one.queue)]
        numbers = self.call(lambda store: store.queues()) if wanted else {}
        rows: list[tuple[Any, ...]] = []
        for one in wanted:
            number = numbers.get(one.queue, 0)
            for page in self._pages(one):
                rows += rows_from(page, number, one)
                if len(rows) >= _BATCH_ROWS:
                    yield from _attempts(rows, selection)
                    rows = []
        yield from _attempts(rows, selection)
        # What retention took while this was read is missing from it.
        self.call(lambda store: streams.check_history(store, wanted))

    def _pages(self, one: Range) -> Iterator[list[Any]]:
        def ask(after: int) -> Future[list[Any]]:
            return self.begin(lambda store: _page(store, one, after))

        asked: Future[list[Any]] | None = ask(one.after)
        try:
            while asked is not None:
                found = asked.result()
                last = place_of(found[-2]) if len(found) > 1 else one.until
                asked = ask(last) if last < one.until else None
                yield found
        finally:
            if asked is not None:
                asked.cancel()

    def _read_jobs(self, part: Part) -> Iterator[pa.RecordBatch]:
        now = part.bounds["now"]
        assert isinstance(now, int)
        selection = part.selection
        rows: list[tuple[Any, ...]] = []
        weight = 0
        for stretch in jobs.parsed(part.bounds["stretches"]):
            for job in self._jobs_in(stretch, selection, now):
                if _is_wanted(job, selection):
                    rows.append(job_row(job))
                    weight += len(job.payload) + len(job.result or b"")
                    if len(rows) >= _BATCH_ROWS or weight >= _BATCH_BYTES:
                        yield from _batches("jobs", rows)
                        rows, weight = [], 0
        yield from _batches("jobs", rows)

    def _jobs_in(self, stretch: jobs.Stretch, selection: Selection, now: Micros) -> Iterator[JobRecord]:
        def ask(place: jobs.Place) -> Future[jobs.JobPage]:
            return self.begin(lambda store: jobs.page(store, stretch, place, selection.state))

        asked: Future[jobs.JobPage] | None = ask(jobs.begin(stretch))
        try:
            while asked is not None:
                page = asked.result()
                asked = None if page.following is None else ask(page.following)
                for job_id, value in page.jobs:
                    yield record_from(job_id, stretch.queue, value, now)
        finally:
            if asked is not None:
                asked.cancel()

    def _read_queues(self, queue: str | None) -> Iterator[pa.RecordBatch]:
        async def stats(store: Store) -> list[QueueStats]:
            found = await inspect.stats(store, await _now(store), None)
            return [one for one in found if queue in (None, one.queue)]

        yield from _batches("queues", list(map(queue_row, self.call(stats))))


async def _page(store: Store, one: Range, after: int) -> list[Any]:
    (found,) = await store.ask_all((page_call(store, one.queue, after, one.until, _PAGE),))
    return list(found)


async def _attempt_parts(store: Store, selection: Selection, parallelism: int) -> list[Part]:
    wanted = [
        Range(queue, 0, end, False)
        for queue, end in (await streams.ends(store)).items()
        if selection.queue in (None, queue)
    ]
    shares = await ranges.shared_out(store, wanted, parallelism)
    return [
        Part(table="attempts", selection=selection, bounds={"ranges": ranges.written(share)})
        for share in shares or [[]]
    ]


async def _job_parts(store: Store, selection: Selection, parallelism: int) -> list[Part]:
    now = await _now(store)
    shares = await jobs.shared_out(store, selection, parallelism)
    return [
        Part(table="jobs", selection=selection, bounds={"stretches": jobs.written(share), "now": now})
        for share in shares or [[]]
    ]


async def _now(store: Store) -> Micros:
    seconds, micros = await store.connections.command("TIME")
    return int(seconds) * 1_000_000 + int(micros)


def _batches(table: Table, rows: list[tuple[Any, ...]]) -> Iterator[pa.RecordBatch]:
    batch = from_rows(table, rows)
    if batch is not None:
        yield batch


def _attempts(rows: list[tuple[Any, ...]], selection: Selection) -> Iterator[pa.RecordBatch]:
    for batch in _batches("attempts", rows):
        chosen = _chosen(batch, selection)
        if chosen.num_rows:
            yield chosen


def _chosen(batch: pa.RecordBatch, selection: Selection) -> pa.RecordBatch:
    """The queue was chosen before."""
    ended = batch.column("ended_at").cast(pa.int64())
    conditions = []
    if selection.type is not None:
        conditions.append(pc.equal(batch.column("type"), selection.type))
    if selection.state is not None:
        conditions.append(pc.equal(batch.column("state"), selection.state.value))
    if selection.since_us is not None:
        conditions.append(pc.greater_equal(ended, selection.since_us))
    if selection.until_us is not None:
        conditions.append(pc.less(ended, selection.until_us))
    for condition in conditions[1:]:
        conditions[0] = pc.and_(conditions[0], condition)
    return batch.filter(conditions[0]) if conditions else batch


def _is_wanted(job: JobRecord, selection: Selection) -> bool:
    return (
        (selection.type is None or job.type == selection.type)
        and (selection.state is None or job.state == selection.state)
        and (selection.since_us is None or job.created_at_us >= selection.since_us)
        and (selection.until_us is None or job.created_at_us < selection.until_us)
    )
