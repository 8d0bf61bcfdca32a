"""Bulk reading and writing: a stream of the log per queue and shard, blobs as objects, portions noted in the queues' states."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from itertools import pairwise

from taskharbor.bulk.stage import unpack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import JobShare, LogPage, LogState, LogStream
from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.blobs import Conflict, Unclear
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.folding import wall_clock
from taskharbor.drivers.objectstore.locating import Place, shard_of
from taskharbor.drivers.objectstore.naming import log_folder
from taskharbor.drivers.objectstore.numbers import take_stamps
from taskharbor.drivers.objectstore.published import Published, noted
from taskharbor.drivers.objectstore.queue_cell import QueueCell
from taskharbor.drivers.objectstore.rows import StoredRow, attempts_of
from taskharbor.drivers.objectstore.segments import Segment, size_with_rows
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobError, JobNotFound
from taskharbor.jobs import JobRecord, JobState

_LARGE = 256 * 1024
"""Bytes of a segment from which on two requests for a part of it cost less than one for all."""
_BEGINNING = 64 * 1024
"""Enough for nearly every header."""
_SEGMENTS = 8
"""Segments that a handle keeps of those it read rows from."""
_TRIES = 6
_PAUSE = 0.05
_PLAIN, _ZLIB = b"\0", b"\1"


# -- the attempt log ------------------------------------------------------------------------------------------


def _name(cell: QueueCell) -> str:
    return f"{cell.shard}:{cell.queue}"


def _cell(store: OpenStore, stream: str) -> QueueCell:
    shard, _, queue = stream.partition(":")
    if not queue or shard not in map(str, range(store.catalog.shards)):
        raise InvalidRequest(
            f"{stream!r} is not a stream of this store's log: pass on what `log_streams` gave"
        )
    return store.cell(queue, int(shard))


async def log_streams(store: OpenStore) -> LogState:
    """Every write of a queue's object follows another: the last number of a state that has landed is the end of its log."""
    cells = await store.all_cells()
    marks = await asyncio.gather(
        *(cell.look(lambda state, _: (state.tail.numbering.last, state.tail.trimmed)) for cell in cells)
    )
    streams = [
        LogStream(name=_name(cell), queue=cell.queue, last=last, trimmed=trimmed, is_dense=False)
        for cell, (last, trimmed) in zip(cells, marks, strict=True)
    ]
    return LogState(store.catalog.store_id, streams)


async def _rows_at(
    store: OpenStore, stream: str, after: int, until: int
) -> tuple[list[SegmentEntry], list[StoredRow]]:
    """The segments that hold rows of this range, and the rows that are in none."""

    def step(state: QueueState, _: Brought) -> tuple[list[SegmentEntry], list[StoredRow]]:
        entries = [
            one for one in state.segments if one.rows and one.last_row > after and one.first_row <= until
        ]
        return entries, [row for row in state.tail.after(after) if row.number <= until]

    return await _cell(store, stream).look(step)


async def read_log(store: OpenStore, call: op.ReadLog) -> LogPage:
    after, until, limit = call.after, call.until, call.limit
    cell = _cell(store, call.stream)
    entries, tail = await _rows_at(store, call.stream, after, until)
    found: list[StoredRow] = []
    for entry in entries:
        if len(found) < limit:
            segment = await _segment(store, log_folder(cell.queue, cell.shard), entry)
            found += segment.rows_after(entry, after, limit - len(found))
    found = [row for row in (*found, *tail) if row.number <= until][:limit]
    return LogPage(attempts_of(cell.queue, found), found[-1].number if len(found) == limit else until)


async def _segment(store: OpenStore, folder: str, entry: SegmentEntry) -> Segment:
    """Of a large one only its beginning, which has all its rows: jobs with their payloads may be most of it."""
    name = f"{folder}/{entry.name}"
    kept = store.row_segments
    if name not in kept:
        where = f"{store.blobs.place}/{name}"
        size = _BEGINNING if entry.jobs and entry.size > _LARGE else entry.size
        while True:
            data = await store.blobs.read_start(name, size)
            if data is None:
                raise BackendUnavailable(f"{where} was replaced while it was to be read: read again")
            size = size_with_rows(data, where)
            if size <= len(data) or entry.size <= len(data):
                break
        kept[name] = Segment(data, where)
        for old in list(kept)[:-_SEGMENTS]:
            del kept[old]
    return kept[name]


async def split_log(store: OpenStore, call: op.SplitLog) -> list[int]:
    after, until = call.after, call.until
    entries, tail = await _rows_at(store, call.stream, after, until)
    points: list[tuple[int, int]] = [(row.number, 1) for row in tail]
    for entry in entries:
        points += _spread(max(after, entry.first_row), min(until, entry.last_row), entry.rows)
    edges = _edges(sorted(points), sum(count for _, count in points) // call.rows)
    return [place for place in edges if after < place < until]


def _spread(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """So many things between two numbers, as if they lay evenly: some of the numbers, each with its share."""
    steps = min(count, 64)
    return [
        (first + (last - first) * (n + 1) // steps, count * (n + 1) // steps - count * n // steps)
        for n in range(steps)
    ]


def _edges(points: Sequence[tuple[int, int]], parts: int) -> list[int]:
    """Numbers that cut the things at these numbers into so many shares of about the same size."""
    total = sum(count for _, count in points)
    edges: list[int] = []
    seen = 0
    for number, count in points:
        seen += count
        if len(edges) < parts - 1 and seen * parts >= total * (len(edges) + 1):
            edges.append(number)
    return sorted(set(edges))


# -- jobs -----------------------------------------------------------------------------------------------------


async def split_jobs(store: OpenStore, call: op.SplitJobs) -> list[JobShare]:
    """Queue by queue: a listing of several reads a page of each."""

    def step(state: QueueState, _: Brought) -> list[tuple[int, int]]:
        points = [(slot.seq, 1) for slot in state.kept_slots()]
        for entry in state.segments:
            points += _spread(entry.first_job, entry.last_job, entry.jobs)
        return points

    queues = await store.catalog.queues() if call.queue is None else [call.queue]
    found: list[tuple[str, list[tuple[int, int]]]] = []
    for name in queues:
        parts_of = await asyncio.gather(*(cell.look(step) for cell in store.shards_of(name)))
        found.append((name, sorted(point for points in parts_of for point in points)))
    total = sum(count for _, points in found for _, count in points)
    shares: list[JobShare] = []
    for name, points in found:
        size = sum(count for _, count in points)
        inner = _edges(points, max(1, round(call.parts * size / total))) if size else []
        edges = [None, *(f"{number}:" for number in reversed(inner)), None]
        shares += [JobShare(queue=name, after=low, until=high) for low, high in pairwise(edges)]
    return shares


async def remove(store: OpenStore, job_ids: Sequence[str]) -> list[JobState | JobError]:
    ids = list(job_ids)

    async def ask(cell: QueueCell, at: list[int]) -> list[JobState | JobError]:
        own = [ids[one] for one in at]
        return await cell.change(lambda state, brought: state.remove_ended(own, wall_clock(), brought))

    answers = await store.by_home(ids, ask, lambda answer: isinstance(answer, JobNotFound))
    return [JobNotFound(job_id) if one is None else one for job_id, one in zip(ids, answers, strict=True)]


# -- blobs ----------------------------------------------------------------------------------------------------


async def put_blob(store: OpenStore, call: op.PutBlob) -> bool:
    blobs, name, data = store.blobs, call.blob, call.data
    stored = _ZLIB + await asyncio.to_thread(zlib.compress, data, 1) if blobs.is_remote else _PLAIN + data
    if not call.swaps:
        await blobs.put(name, stored)
        return True
    for tries in range(_TRIES):
        found = await blobs.read(name)
        held = None if found is None else _plain(found.data)
        if held != call.expected:
            # An earlier try of this loop may have landed.
            return tries > 0 and held == data
        try:
            if found is None:
                await blobs.create(name, stored)
            else:
                await blobs.replace(name, stored, found.version)
            return True
        except (Conflict, Unclear):
            await asyncio.sleep(_PAUSE * 2**tries)
    raise BackendUnavailable(f"{blobs.where(name)} could not be written: nothing certain was heard of it")


def _plain(stored: bytes) -> bytes:
    return zlib.decompress(memoryview(stored)[1:]) if stored[:1] == _ZLIB else stored[1:]


async def read_blobs(store: OpenStore, names: Sequence[str]) -> list[bytes | None]:
    found = await asyncio.gather(*map(store.blobs.read, names))
    return [None if blob is None else _plain(blob.data) for blob in found]


async def check_room(store: OpenStore, call: op.CheckRoom) -> None:
    for cell in store.shards_of(call.queue):
        await cell.look(lambda state, _: None)
        cell.refuse_when_full(call.size // store.catalog.shards)


async def publish_blobs(store: OpenStore, call: op.PublishBlobs) -> dict[str, int]:
    """One change of each queue's object, with the note that it was made. Ids are made by the tasks that stage, so other queues
    are not asked for them."""
    jobs = [job for data in await read_blobs(store, call.names) if data is not None for job in unpack(data)]
    first = take_stamps(max(1, len(jobs)))
    places: dict[Place, tuple[list[JobRecord], list[int]]] = {}
    for at, job in enumerate(jobs, first):
        records, stamps = places.setdefault((job.queue, shard_of(job, store.catalog.shards)), ([], []))
        records.append(job)
        stamps.append(at)
    await store.catalog.add_queues(queue for queue, _ in places)

    async def publish(cell: QueueCell, records: list[JobRecord], stamps: list[int]) -> int:
        def step(state: QueueState, brought: Brought) -> int:
            known = state.published.get(call.series, Published(call.number, 0, 0))
            added = known.added if known.number == call.number else 0
            if (known.number, known.portions) < (call.number, call.portion):
                cell.refuse_when_full(sum(len(record.payload) for record in records))
                answers = state.enqueue_known(records, stamps, call.now, brought)
                added += sum(not answer.existed for answer in answers)
                mark = Published(call.number, call.portion, added)
                state.published = noted(state.published, call.series, mark)
                state.touched = True
            return added

        return await cell.change(step)

    cells = [store.cell(*place) for place in places]
    totals = await asyncio.gather(
        *(publish(cell, *batch) for cell, batch in zip(cells, places.values(), strict=True))
    )
    return dict(zip(map(_name, cells), totals, strict=True))
