"""The attempt log: one per shard of a queue, read as one.

A cursor holds a place per log, so that nothing that one queue writes late is skipped because another was ahead, and the id of
its store: the places mean nothing in another. Tasks that read in bulk take a log as a stream, and shares of it by number.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from heapq import merge
from itertools import islice

import msgspec

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import AttemptPage, LogPage, LogState, LogStream
from taskharbor.drivers.engine import inspect as engine
from taskharbor.drivers.engine.statements import Transaction, load
from taskharbor.drivers.objectstore.segments import Entry, Segment, entries, size_with_rows
from taskharbor.drivers.objectstore.shard import Loaded, Shard
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import Attempt

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
        number = places.get((shard.queue, shard.number), 0)

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

        rows = await shard.look_with(needs, step)
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

    found = await asyncio.gather(*(shard.look_with(needs, step) for shard in await store.all_shards()))
    return sorted((attempt for rows in found for attempt in rows), key=lambda attempt: attempt.seq)


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
        LogStream(name=shard.name, queue=shard.queue, last=last, trimmed=trimmed, is_dense=False)
        for shard, (last, trimmed) in zip(shards, marks, strict=True)
    ]
    return LogState(store.catalog.store_id, streams)


async def read_log(store: OpenStore, call: op.ReadLog) -> LogPage:
    after, until, limit = call.after, call.until, call.limit
    shard = _shard(store, call.stream)
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
    found = [*found, *rows][:limit]
    return LogPage(found, found[-1].seq if len(found) == limit else until)


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
        kept[name] = Segment(data, where)
        for old in list(kept)[:-_SEGMENTS]:
            del kept[old]
    return kept[name]


async def split_log(store: OpenStore, call: op.SplitLog) -> list[int]:
    after, until = call.after, call.until
    archived, rows = await _shard(store, call.stream).look(
        lambda transaction: (
            _with_rows(transaction, after, until),
            engine.attempts_between(transaction, after, until, engine.FOREVER),
        )
    )
    points: list[tuple[int, int]] = [(row.seq, 1) for row in rows]
    for entry in archived:
        points += spread(max(after, entry.first_row), min(until, entry.last_row), entry.rows)
    places = edges(sorted(points), sum(count for _, count in points) // call.rows)
    return [place for place in places if after < place < until]


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
