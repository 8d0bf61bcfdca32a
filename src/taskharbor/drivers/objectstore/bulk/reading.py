"""Reading an object store: segments by several tasks at once, and what is in no segment from the queues' states.

States are read once, where the read is planned; a task reads its segments by itself, the next one while the last is turned into
Arrow. Nobody who works with the store notices: nothing is locked, and nothing is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from taskharbor.bulk.batches import from_rows, queue_row
from taskharbor.bulk.contract import Part, Selection, Table
from taskharbor.drivers.contract import QueueStats
from taskharbor.drivers.objectstore.bulk import streams
from taskharbor.drivers.objectstore.bulk.attempts import AttemptBatches, row_blocks, rows_in, rows_of_tail
from taskharbor.drivers.objectstore.bulk.cursors import START
from taskharbor.drivers.objectstore.bulk.held import HeldStore
from taskharbor.drivers.objectstore.bulk.jobs import (
    JobBatches,
    count_of,
    jobs_of_block,
    jobs_of_state,
    may_be_archived,
)
from taskharbor.drivers.objectstore.bulk.logs import Log, Logs, QueueDocument, together
from taskharbor.drivers.objectstore.bulk.shares import (
    JOBS,
    ROWS,
    JobPiece,
    Range,
    RowPiece,
    shared_jobs,
    shared_rows,
)
from taskharbor.drivers.objectstore.encoding import QueueCodec
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.folding import wall_clock
from taskharbor.drivers.objectstore.inspect import joined_stats
from taskharbor.drivers.objectstore.segments import Segment
from taskharbor.jobs import Micros

A = TypeVar("A")
R = TypeVar("R")

_AHEAD = 2
"""Objects that are on their way while one is worked on."""


class ObjectStoreReading(HeldStore):
    """The reading half."""

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        if table == "attempts":
            shares = self.call(lambda logs: _planned_rows(logs, selection, parallelism))
            plans: list[str | None] = [ROWS.written(share) for share in shares or [[]]]
        elif table == "jobs":
            # A store's own time would cost a write. This only tells what is scheduled from what is ready.
            now = wall_clock()
            plans = self.call(lambda logs: _planned_jobs(logs, selection, parallelism))
            return [
                Part(table=table, selection=selection, bounds={"pieces": plan, "now": now}) for plan in plans
            ]
        else:
            plans = [None]
        return [Part(table=table, selection=selection, bounds={"pieces": plan}) for plan in plans]

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        if part.table == "attempts":
            return self._read_attempts(part)
        if part.table == "jobs":
            return self._read_jobs(part)
        return self._read_queues(part.selection.queue)

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    def start(self) -> str:
        return str(START)

    def latest(self) -> str:
        return self.call(streams.latest)

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        ranges = self.call(lambda logs: streams.ranges_between(logs, after, until))
        shares = shared_rows(ranges, parallelism)
        return [Part(table="attempts", bounds={"pieces": ROWS.written(share)}) for share in shares]

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        return self.call(lambda logs: streams.limited(logs, after, until, rows))

    # -- rows ---------------------------------------------------------------------------------------------------

    def _read_attempts(self, part: Part) -> Iterator[pa.RecordBatch]:
        selection = part.selection
        pieces = [
            piece for piece in ROWS.parsed(part.bounds["pieces"]) if selection.queue in (None, piece.queue)
        ]
        batches = AttemptBatches(selection)
        for piece, found in self._read_ahead(pieces, _read_piece):
            after, until = piece.after, piece.until
            for entry, segment in found.segments:
                blocks = piece.portion.of_blocks(segment.header.row_blocks)
                for block in row_blocks(blocks, entry, after, until, selection):
                    yield from batches.add(piece.queue, rows_in(segment, block, entry, after, until))
            if found.tail:
                yield from batches.add(piece.queue, rows_of_tail(found.tail, after, until))
        yield from batches.rest()

    # -- jobs ---------------------------------------------------------------------------------------------------

    def _read_jobs(self, part: Part) -> Iterator[pa.RecordBatch]:
        now = part.bounds["now"]
        assert isinstance(now, int)
        selection, plan = part.selection, part.bounds["pieces"]
        batches = JobBatches()
        if plan is None:
            # Each queue as it is at one moment: its state, and the segments that this state names.
            for document in self._documents(selection):
                yield from batches.add(_jobs_of(document, now, selection))
                archived = _archived_pieces(document, selection)
                yield from self._read_job_pieces(archived, batches, now, selection)
        else:
            yield from self._read_job_pieces(JOBS.parsed(plan), batches, now, selection)
        yield from batches.rest()

    def _documents(self, selection: Selection) -> Iterator[QueueDocument]:
        places = self.call(lambda logs: logs.places(selection.queue))
        for _, document in self._read_ahead(places, lambda logs, place: logs.document(place)):
            if document is not None:
                yield document

    def _read_job_pieces(
        self, pieces: Iterable[JobPiece], batches: JobBatches, now: Micros, selection: Selection
    ) -> Iterator[pa.RecordBatch]:
        for piece, found in self._read_ahead(pieces, _read_jobs):
            if isinstance(found, Segment):
                assert piece.entry is not None
                for block in piece.portion.of_blocks(found.header.job_blocks):
                    yield from batches.add(jobs_of_block(found, block, piece.entry, selection))
            elif found is not None:
                yield from batches.add(_jobs_of(found, now, selection))

    # -- queues -------------------------------------------------------------------------------------------------

    def _read_queues(self, queue: str | None) -> Iterator[pa.RecordBatch]:
        now = wall_clock()
        batch = from_rows("queues", map(queue_row, self.call(lambda logs: _stats(logs, queue, now))))
        if batch is not None:
            yield batch

    # -- one after the other, the next ones on their way -----------------------------------------------------------

    def _read_ahead(
        self, items: Iterable[A], work: Callable[[Logs, A], Coroutine[Any, Any, R]]
    ) -> Iterator[tuple[A, R]]:
        asked: deque[tuple[A, Future[R]]] = deque()
        try:
            for item in items:
                asked.append((item, self.begin(partial(_swapped, work, item))))
                if len(asked) > _AHEAD:
                    first, future = asked.popleft()
                    yield first, future.result()
            while asked:
                first, future = asked.popleft()
                yield first, future.result()
        finally:
            for _, future in asked:
                future.cancel()


def _swapped(
    work: Callable[[Logs, A], Coroutine[Any, Any, R]], item: A, logs: Logs
) -> Coroutine[Any, Any, R]:
    return work(logs, item)


# -- planning ---------------------------------------------------------------------------------------------------


async def _planned_rows(logs: Logs, selection: Selection, parallelism: int) -> list[list[RowPiece]]:
    found = await logs.all(selection.queue)
    return shared_rows([Range(log, 0, log.last) for log in found], parallelism)


async def _planned_jobs(logs: Logs, selection: Selection, parallelism: int) -> list[str | None]:
    if parallelism < 2:
        return [None]
    documents = await together(await logs.places(selection.queue), logs.document)
    found: list[tuple[JobPiece, int]] = []
    for document in documents:
        if document is not None:
            found.append((JobPiece(document.queue, document.shard, None), count_of(document.jobs)))
            found += [
                (piece, piece.entry.jobs) for piece in _archived_pieces(document, selection) if piece.entry
            ]
    shares = shared_jobs(found, parallelism)
    return [JOBS.written(share) for share in shares] if len(shares) > 1 else [None]


def _archived_pieces(document: QueueDocument, selection: Selection) -> list[JobPiece]:
    if not may_be_archived(selection):
        return []
    return [JobPiece(document.queue, document.shard, entry) for entry in document.head.segments if entry.jobs]


# -- reading ----------------------------------------------------------------------------------------------------


class _Found:
    """Where a piece's rows are: in segments, and in the tail of a state."""

    def __init__(self, segments: list[tuple[SegmentEntry, Segment]], tail: bytes = b"") -> None:
        self.segments = segments
        self.tail = tail


async def _read_piece(logs: Logs, piece: RowPiece) -> _Found:
    if piece.entry is not None:
        return _Found([(piece.entry, await logs.segment_of_rows(piece.place, piece.entry))])
    log: Log | None = await logs.log(piece.place)
    if log is None:
        return _Found([])
    streams.check_history(logs, log, piece.after, is_strict=piece.is_strict)
    # They may have gone to a segment since.
    entries = [
        entry
        for entry in log.segments
        if entry.rows and entry.last_row > piece.after and entry.first_row <= piece.until
    ]
    segments = await together(entries, lambda entry: logs.segment_of_rows(piece.place, entry))
    return _Found(list(zip(entries, segments, strict=True)), log.tail)


async def _read_jobs(logs: Logs, piece: JobPiece) -> Segment | QueueDocument | None:
    if piece.entry is None:
        return await logs.document(piece.place)
    return await logs.segment(piece.place, piece.entry)


def _jobs_of(document: QueueDocument, now: Micros, selection: Selection) -> list[tuple[Any, ...]]:
    return jobs_of_state(document.jobs, document.head.fields, now, selection)


async def _stats(logs: Logs, queue: str | None, now: Micros) -> list[QueueStats]:
    places = await logs.places(queue)
    documents = await together(places, logs.document)
    by_queue: dict[str, list[QueueStats]] = {}
    for document in documents:
        if document is not None:
            codec = QueueCodec(document.queue, document.shard, logs.catalog.shards)
            stats = codec.decode(document.body).stats_at(now)
            if stats is not None:
                by_queue.setdefault(document.queue, []).append(stats)
    return [joined_stats(by_queue[name]) for name in sorted(by_queue)]
