"""Looking at jobs, queues and the attempt log.

The log is one per shard, read as one. A cursor of it holds a place per shard, so that nothing that one queue writes late is
skipped because another was ahead, and the id of its store: the places mean nothing in another. Tasks that read in bulk take
a log as a stream, and shares of it by number.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from heapq import merge
from itertools import accumulate, islice, pairwise, takewhile

import msgspec

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import (
    AttemptPage,
    JobFilter,
    JobShare,
    LogPage,
    LogState,
    LogStream,
    Page,
    QueueSettings,
    QueueStats,
)
from taskharbor.drivers.engine import inspect as engine
from taskharbor.drivers.engine import tables
from taskharbor.drivers.engine.tables import Transaction, load
from taskharbor.drivers.objectstore.segments import Entry, Segment, entries, size_with_rows
from taskharbor.drivers.objectstore.shard import Loaded, Shard
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros


async def get(store: OpenStore, job_ids: Sequence[str], now: Micros) -> list[JobRecord | None]:
    async def ask(shard: Shard, at: list[int]) -> list[JobRecord | None]:
        own = [job_ids[one] for one in at]
        found = await shard.look(lambda transaction: engine.get(transaction, own, now))
        lost = [job_id for job_id, job in zip(own, found, strict=True) if job is None]
        archived = await shard.archived(lost) if lost else {}
        return [job or archived.get(job_id) for job_id, job in zip(own, found, strict=True)]

    return await store.by_home(job_ids, ask, lambda answer: answer is None)


async def list_jobs(
    store: OpenStore, selection: JobFilter, now: Micros, limit: int, cursor: str | None
) -> Page:
    """Numbers follow time between queues, so they are the order of the whole store; a cursor is the last one and whose it is."""
    before, behind = (engine.FOREVER, "") if cursor is None else _parsed(cursor)
    end = (0, "") if selection.until is None else _parsed(selection.until)
    shards = await store.all_shards() if selection.queue is None else store.shards_of(selection.queue)
    # Of jobs with the same number, which takes two machines and bad luck, the queue's name decides.
    shards.sort(key=lambda shard: shard.name, reverse=True)

    async def part(shard: Shard) -> list[tuple[tuple[int, str], JobRecord]]:
        is_later = cursor is not None and shard.name < behind
        found = await _list_shard(shard, selection, now, limit + 1, before + is_later)
        return [((number, shard.name), job) for number, job in found]

    parts = await asyncio.gather(*map(part, shards))
    merged = merge(*parts, key=lambda one: one[0], reverse=True)
    found = list(islice(takewhile(lambda one: one[0] >= end, merged), limit + 1))
    page = found[:limit]
    jobs = [job for _, job in page]
    if len(found) <= limit:
        return Page(jobs, None)
    (number, name), _ = page[-1]
    return Page(jobs, f"{number}:{name}")


async def _list_shard(
    shard: Shard, selection: JobFilter, now: Micros, limit: int, before: int
) -> list[tuple[int, JobRecord]]:
    """The newest accepted first. A segment is read when the page has come to its newest job, or may come to it soon."""
    is_archived = selection.states is None or bool(selection.states & {JobState.DONE, JobState.CANCELLED})
    wanted: set[str] = set()

    def needs(transaction: Transaction) -> list[Entry]:
        return [entry for entry in entries(transaction) if entry.name in wanted]

    def step(transaction: Transaction, loaded: Loaded) -> tuple[list[tuple[int, JobRecord]], list[str]]:
        """The page so far, and the segments that it lacks."""
        known = [one for one in entries(transaction) if one.jobs and one.first_job < before and is_archived]
        here = engine.find_jobs(transaction, selection, now, limit, before)
        there = [
            loaded[one.name].matching(one, selection, limit, before) for one in known if one.name in wanted
        ]
        found = list(islice(merge(here, *there, key=lambda job: job[0], reverse=True), limit))
        floor = found[-1][0] if len(found) == limit else 0
        lacking = [one for one in known if one.name not in wanted and one.last_job > floor]
        lacking.sort(key=lambda one: -one.last_job)
        enough = next(
            (at for at, jobs in enumerate(accumulate(one.jobs for one in lacking), 1) if jobs >= limit), None
        )
        return found, [one.name for one in lacking[:enough]]

    while True:
        found, lacking = await shard.look_with(needs, step)
        if not lacking:
            return found
        wanted.update(lacking)


def _parsed(cursor: str) -> tuple[int, str]:
    number, separator, name = cursor.partition(":")
    if not (number.isdecimal() and len(number) < 20 and int(number) < engine.FOREVER and separator):
        raise InvalidRequest(
            f"{cursor[:60]!r} is not a cursor of this store: pass on what the last page gave"
        )
    return int(number), name


async def stats(store: OpenStore, now: Micros, queue: str | None) -> list[QueueStats]:
    queues = sorted(await store.catalog.queues()) if queue is None else [queue]
    found = await asyncio.gather(*(_stats_of(store, name, now) for name in queues))
    if queue is not None and found[0] is None:
        return [QueueStats(queue=queue, counts=dict.fromkeys(JobState, 0))]
    return [one for one in found if one is not None]


async def _stats_of(store: OpenStore, queue: str, now: Micros) -> QueueStats | None:
    """None: nobody ever used the queue. Counters go on counting the jobs that have left for segments."""
    parts = await asyncio.gather(
        *(
            shard.look(lambda transaction: engine.stats(transaction, now, None))
            for shard in store.shards_of(queue)
        )
    )
    known = [one for part in parts for one in part]
    if len(known) < 2:
        return known[0] if known else None
    heads = [part.head_run_at_us for part in known if part.head_run_at_us is not None]
    return msgspec.structs.replace(
        known[0],
        counts={state: sum(part.counts[state] for part in known) for state in JobState},
        done_total=sum(part.done_total for part in known),
        dead_total=sum(part.dead_total for part in known),
        cancelled_total=sum(part.cancelled_total for part in known),
        head_run_at_us=min(heads, default=None),
    )


async def settings(store: OpenStore, queue: str) -> QueueSettings:
    return await store.shards_of(queue)[0].look(lambda transaction: tables.settings_of(transaction, queue))


_LARGE = 256 * 1024
"""Bytes of a segment from which on two requests for a part of it cost less than one for all."""
_BEGINNING = 64 * 1024
"""Enough for the header, and for the rows of most segments."""
_SEGMENTS = 8
"""Segments that a handle keeps of those it read rows from."""
_SQL = load("image", __package__)


class LogCursor(msgspec.Struct, array_like=True, frozen=True):
    store_id: str
    places: list[tuple[str, int, int]]
    """Queue, shard, and the number of the last row that was read."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LogCursor).decode


async def read_attempts(store: OpenStore, after: str | None, limit: int) -> AttemptPage:
    places = {} if after is None else parsed_cursor(after, store.catalog.store_id)

    async def part(shard: Shard) -> list[tuple[int, str, int, Attempt]]:
        number = shard.own_number(places.get((shard.queue, shard.number), 0))

        def needs(transaction: Transaction) -> list[Entry]:
            found: list[Entry] = []
            for entry in _with_rows(transaction, number, engine.FOREVER):
                # The first one may have been read in part; all others count in full.
                if sum(one.rows for one in found[1:]) < limit:
                    found.append(entry)
            return found

        def step(transaction: Transaction, loaded: Loaded) -> list[Attempt]:
            rows: list[Attempt] = []
            for entry in needs(transaction):
                rows += loaded[entry.name].rows_between(entry, number, engine.FOREVER, limit - len(rows))
            return rows + engine.attempts_between(transaction, number, engine.FOREVER, limit - len(rows))

        rows = shard.public_rows(await shard.look_with(needs, step))
        return [(row.seq, shard.queue, shard.number, row) for row in rows]

    parts = await asyncio.gather(*map(part, await store.all_shards()))
    page = list(islice(merge(*parts, key=lambda row: row[:3]), limit))
    for number, queue, shard, _ in page:
        places[queue, shard] = number
    return AttemptPage([row[-1] for row in page], written_cursor(store.catalog.store_id, places))


def _with_rows(transaction: Transaction, after: int, until: int) -> list[Entry]:
    """Segments that hold rows of this range, in their order. All rows of an image come after them."""
    return [
        one for one in entries(transaction) if one.rows and one.last_row > after and one.first_row <= until
    ]


async def job_attempts(store: OpenStore, job_id: str) -> list[Attempt]:
    """Rows outlive their jobs, so every queue is asked."""

    def needs(transaction: Transaction) -> list[Entry]:
        return [
            one for one in entries(transaction) if one.rows and one.first_row_id <= job_id <= one.last_row_id
        ]

    def step(transaction: Transaction, loaded: Loaded) -> list[Attempt]:
        archived = [row for entry in needs(transaction) for row in loaded[entry.name].rows_of(entry, job_id)]
        return archived + engine.job_attempts(transaction, job_id)

    shards = await store.all_shards()
    found = await asyncio.gather(*(shard.look_with(needs, step) for shard in shards))
    public = [row for shard, rows in zip(shards, found, strict=True) for row in shard.public_rows(rows)]
    return sorted(public, key=lambda attempt: attempt.seq)


def parsed_cursor(cursor: str, store_id: str) -> dict[tuple[str, int], int]:
    try:
        found = _decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise InvalidRequest(
            f"{cursor[:60]!r} is not a cursor of this log: pass on what the last page gave"
        ) from None
    if found.store_id != store_id:
        raise InvalidRequest(
            "this cursor is of another store's log, or of one that was here before: read this one from its beginning"
        )
    return {(queue, shard): number for queue, shard, number in found.places}


def written_cursor(store_id: str, places: dict[tuple[str, int], int]) -> str:
    cursor = LogCursor(
        store_id, [(queue, shard, number) for (queue, shard), number in sorted(places.items())]
    )
    return base64.urlsafe_b64encode(_encode(cursor)).decode().rstrip("=")


# -- in bulk --------------------------------------------------------------------------------------------------


def _shard(store: OpenStore, stream: str) -> Shard:
    shard, _, queue = stream.partition(":")
    if not queue or shard not in map(str, range(store.catalog.shards)):
        raise InvalidRequest(
            f"{stream!r} is not a stream of this store's log: pass on what `log_streams` gave"
        )
    return store.shards_of(queue)[int(shard)]


async def log_streams(store: OpenStore) -> LogState:
    """Every image of a queue follows another: the last number of one that has landed is the end of its log."""
    shards = await store.all_shards()
    marks = await asyncio.gather(
        *(
            shard.look(lambda transaction: transaction.connection.execute(_SQL["log_marks"]).fetchone())
            for shard in shards
        )
    )
    streams = [
        LogStream(
            name=shard.name,
            queue=shard.queue,
            last=shard.public_number(last),
            trimmed=shard.public_number(trimmed),
            is_dense=False,
        )
        for shard, (last, trimmed) in zip(shards, marks, strict=True)
    ]
    return LogState(store.catalog.store_id, streams)


async def read_log(store: OpenStore, call: op.ReadLog) -> LogPage:
    shard = _shard(store, call.stream)
    after, until, limit = shard.own_number(call.after), shard.own_number(call.until), call.limit
    archived, rows = await shard.look(
        lambda transaction: (
            _with_rows(transaction, after, until),
            engine.attempts_between(transaction, after, until, limit),
        )
    )
    found: list[Attempt] = []
    for entry in archived:
        if len(found) < limit:
            segment = await _rows_of(store, shard, entry)
            found += segment.rows_between(entry, after, until, limit - len(found))
    found = shard.public_rows([*found, *rows][:limit])
    return LogPage(found, found[-1].seq if len(found) == limit else call.until)


async def _rows_of(store: OpenStore, shard: Shard, entry: Entry) -> Segment:
    """Of a large one only its beginning, which has all its rows: jobs with their payloads may be most of it."""
    name = f"{shard.log_folder}/{entry.name}"
    kept = store.row_segments
    if name not in kept:
        where = store.blobs.where(name)
        size = _BEGINNING if entry.jobs and entry.size > _LARGE else entry.size
        while True:
            data = await store.blobs.read_start(name, size)
            if data is None:
                raise BackendUnavailable(f"{where} was replaced while it was to be read: read again")
            size = size_with_rows(data, where)
            if size <= len(data) or entry.size <= len(data):
                break
        kept[name] = Segment(data, where, shard.queue)
        for old in list(kept)[:-_SEGMENTS]:
            del kept[old]
    return kept[name]


async def split_log(store: OpenStore, call: op.SplitLog) -> list[int]:
    shard = _shard(store, call.stream)
    after, until = shard.own_number(call.after), shard.own_number(call.until)
    archived, rows = await shard.look(
        lambda transaction: (
            _with_rows(transaction, after, until),
            engine.attempts_between(transaction, after, until, engine.FOREVER),
        )
    )
    points: list[tuple[int, int]] = [(row.seq, 1) for row in rows]
    for entry in archived:
        points += spread(max(after, entry.first_row), min(until, entry.last_row), entry.rows)
    places = edges(sorted(points), sum(count for _, count in points) // call.rows)
    return [shard.public_number(place) for place in places if after < place < until]


def spread(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """So many things between two numbers, as if they lay evenly: some of the numbers, each with its share."""
    steps = min(count, 64)
    return [
        (first + (last - first) * (n + 1) // steps, count * (n + 1) // steps - count * n // steps)
        for n in range(steps)
    ]


def edges(points: Sequence[tuple[int, int]], parts: int) -> list[int]:
    """Numbers that cut the things at these numbers into so many shares of about the same size."""
    total = sum(count for _, count in points)
    found: list[int] = []
    seen = 0
    for number, count in points:
        seen += count
        if len(found) < parts - 1 and seen * parts >= total * (len(found) + 1):
            found.append(number)
    return sorted(set(found))


async def split_jobs(store: OpenStore, call: op.SplitJobs) -> list[JobShare]:
    """Queue by queue: a listing of several reads a page of each."""

    def step(transaction: Transaction) -> list[tuple[int, int]]:
        points = [(seq, 1) for (seq,) in transaction.connection.execute(_SQL["job_numbers"])]
        for entry in entries(transaction):
            points += spread(entry.first_job, entry.last_job, entry.jobs)
        return points

    queues = await store.catalog.queues() if call.queue is None else [call.queue]
    found: list[tuple[str, list[tuple[int, int]]]] = []
    for name in queues:
        parts_of = await asyncio.gather(*(shard.look(step) for shard in store.shards_of(name)))
        found.append((name, sorted(point for points in parts_of for point in points)))
    total = sum(count for _, points in found for _, count in points)
    shares: list[JobShare] = []
    for name, points in found:
        size = sum(count for _, count in points)
        inner = edges(points, max(1, round(call.parts * size / total))) if size else []
        cuts = [None, *(f"{number}:" for number in reversed(inner)), None]
        shares += [JobShare(queue=name, after=low, until=high) for low, high in pairwise(cuts)]
    return shares
