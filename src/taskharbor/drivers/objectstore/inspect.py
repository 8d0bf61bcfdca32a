"""Looking at jobs, queues and the attempt log: the images of some shards and their segments, read as one.

The log is one per shard. A cursor of it holds a position per shard, so that nothing that one queue writes late is skipped
because another was ahead, and the id of its store: the positions mean nothing in another. Tasks that read in bulk take a log as
a stream, and shares of it by number.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from heapq import merge
from itertools import accumulate, islice, pairwise, takewhile
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from taskharbor.drivers import operations as op
from taskharbor.drivers import records as rec
from taskharbor.drivers.engine import inspect as engine
from taskharbor.drivers.engine.tables import Transaction, load
from taskharbor.drivers.objectstore import archive
from taskharbor.drivers.objectstore.archive import ARCHIVED
from taskharbor.drivers.objectstore.image import Entry, entries
from taskharbor.drivers.objectstore.queue import Shard, Store
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros

_SQL = load("image", __package__)
_STEPS = 64
"""Numbers that stand for the jobs or rows of a segment when they are split into shares."""


# -- cursors --------------------------------------------------------------------------------------------------


# The id of the store, and for each shard the number of the last row that was read. A cursor of jobs has one number, of the last
# job of a page.
_Cursor: TypeAlias = tuple[str, dict[str, Annotated[int, Meta(ge=0, lt=engine.FOREVER)]]]
_encode = msgspec.msgpack.Encoder(order="sorted").encode
_decode = msgspec.msgpack.Decoder(_Cursor).decode


def _cursor(store_id: str, positions: dict[str, int]) -> str:
    return base64.urlsafe_b64encode(_encode((store_id, positions))).decode().rstrip("=")


def _positions(cursor: str, store_id: str, *, of_jobs: bool = False) -> dict[str, int]:
    try:
        found: _Cursor = _decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        found = ("", {})
    its_store, positions = found
    if not its_store or (of_jobs and len(positions) != 1):
        raise rec.not_a_cursor(cursor)
    if its_store != store_id:
        raise InvalidRequest("this cursor is of another store, or of one that was here before: begin anew")
    return positions


# -- jobs -----------------------------------------------------------------------------------------------------


async def list_jobs(store: Store, call: op.ListJobs) -> rec.Page:
    """List jobs. Numbers follow time between queues, so they give the order of the whole store. A cursor is the last number and
    its shard."""
    store_id = store.catalog.store_id
    before, behind = (engine.FOREVER, "") if call.cursor is None else _place(call.cursor, store_id)
    end = (0, "") if call.selection.until is None else _place(call.selection.until, store_id)

    async def part(shard: Shard) -> list[tuple[tuple[int, str], JobRecord]]:
        # Jobs of two machines can by chance have the same number. Then the shard's name decides.
        is_later = call.cursor is not None and shard.name < behind
        found = await list_shard(shard, call.selection, call.now, call.limit + 1, before + is_later)
        return [((number, shard.name), job) for number, job in found]

    parts = await asyncio.gather(*map(part, await store.shards(call.selection.queue)))
    merged = merge(*parts, key=lambda one: one[0], reverse=True)
    found = list(islice(takewhile(lambda one: one[0] >= end, merged), call.limit + 1))
    page = found[: call.limit]
    jobs = [job for _, job in page]
    if len(found) <= call.limit:
        return rec.Page(jobs, None)
    (number, name), _ = page[-1]
    return rec.Page(jobs, _cursor(store_id, {name: number}))


def _place(cursor: str, store_id: str) -> tuple[int, str]:
    ((name, number),) = _positions(cursor, store_id, of_jobs=True).items()
    return number, name


async def list_shard(
    shard: Shard, selection: rec.JobFilter, now: Micros, limit: int, before: int = engine.FOREVER
) -> list[tuple[int, JobRecord]]:
    """List the jobs of a shard, newest accepted first. A segment is read when the page has reached its newest job, or may reach
    it soon."""
    is_archived = selection.states is None or bool(selection.states & ARCHIVED)
    wanted: set[str] = set()

    def step(transaction: Transaction) -> tuple[tuple[list[tuple[int, JobRecord]], list[Entry]], list[Entry]]:
        known = [one for one in entries(transaction) if one.jobs and one.first_job < before and is_archived]
        here = engine.find_jobs(transaction, selection, now, limit, before)
        return (here, known), [one for one in known if one.name in wanted]

    while True:
        (here, known), segments = await shard.look_with(step)
        there = [archive.find_jobs(*segment, selection, limit, before) for segment in segments]
        found = list(islice(merge(here, *there, key=lambda job: job[0], reverse=True), limit))
        floor = found[-1][0] if len(found) == limit else 0
        lacking = [one for one in known if one.name not in wanted and one.last_job > floor]
        if not lacking:
            return found
        lacking.sort(key=lambda one: -one.last_job)
        before_each = accumulate((one.jobs for one in lacking), initial=0)
        wanted.update(one.name for one, jobs in zip(lacking, before_each, strict=False) if jobs < limit)


async def stats(store: Store, call: op.Stats) -> list[rec.QueueStats]:
    queues = sorted(await store.catalog.queues()) if call.queue is None else [call.queue]
    found = await asyncio.gather(*(_queue_stats(store.shards_of(queue), call) for queue in queues))
    return [one for one in found if one is not None]


async def _queue_stats(shards: Sequence[Shard], call: op.Stats) -> rec.QueueStats | None:
    """Return the figures of one queue. None: nobody ever used it, and the call does not name it. The counters include jobs that
    have moved into segments."""
    parts = await asyncio.gather(
        *(shard.look(lambda transaction: engine.stats(transaction, call.now, call.queue)) for shard in shards)
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


# -- the log --------------------------------------------------------------------------------------------------


async def read_attempts(store: Store, call: op.ReadAttempts) -> rec.AttemptPage:
    """Read the log. A shard that cannot be read does not block the rows of the others: its rows are read later."""
    store_id = store.catalog.store_id
    positions = {} if call.after is None else _positions(call.after, store_id)

    async def part(shard: Shard) -> list[tuple[int, str, Attempt]]:
        number = shard.own_number(positions.get(shard.name, 0))
        rows = await _rows(shard, number, engine.FOREVER, call.limit)
        return [(row.seq, shard.name, row) for row in rows]

    parts = await asyncio.gather(*map(part, await store.shards()), return_exceptions=True)
    errors = [part for part in parts if isinstance(part, BaseException)]
    readable = [part for part in parts if not isinstance(part, BaseException)]
    page = list(islice(merge(*readable, key=lambda row: row[:2]), call.limit))
    if errors and not page:
        raise errors[0]
    positions |= {name: number for number, name, _ in page}
    return rec.AttemptPage([row for *_, row in page], _cursor(store_id, positions))


async def _rows(shard: Shard, after: int, until: int, limit: int) -> list[Attempt]:
    """Return the first rows between two numbers of the shard. All rows of an image come after those of its segments."""

    def step(transaction: Transaction) -> tuple[list[Attempt], list[Entry]]:
        needed: list[Entry] = []
        for entry in _with_rows(transaction, after, until):
            # The first segment may have been read in part; all others count in full.
            if sum(one.rows for one in needed[1:]) < limit:
                needed.append(entry)
        return engine.attempts_between(transaction, after, until, limit), needed

    here, segments = await shard.look_with(step, rows_only=True)
    rows: list[Attempt] = []
    for entry, segment in segments:
        rows += engine.attempts_between(segment.rows(entry), after, until, limit - len(rows))
    return shard.public_rows([*rows, *here][:limit])


def _with_rows(transaction: Transaction, after: int, until: int) -> list[Entry]:
    """Return the segments that hold rows of this range, in their order."""
    return [
        one for one in entries(transaction) if one.rows and one.last_row > after and one.first_row <= until
    ]


async def job_attempts(store: Store, call: op.JobAttempts) -> list[Attempt]:
    """Return the rows of a job. Rows outlive their jobs, so every queue is asked."""
    job_id = call.job_id

    def step(transaction: Transaction) -> tuple[list[Attempt], list[Entry]]:
        found = [one for one in entries(transaction) if one.first_row_id <= job_id <= one.last_row_id]
        return engine.job_attempts(transaction, job_id), [one for one in found if one.rows]

    async def part(shard: Shard) -> list[Attempt]:
        rows, segments = await shard.look_with(step, rows_only=True)
        for entry, segment in segments:
            rows += engine.job_attempts(segment.rows(entry), job_id)
        return shard.public_rows(rows)

    found = await asyncio.gather(*map(part, await store.shards()))
    return sorted((row for rows in found for row in rows), key=lambda attempt: attempt.seq)


async def log_streams(store: Store, call: op.LogStreams) -> rec.LogState:
    """Return the streams. Every image of a queue follows another, so the last number of a landed image is the end of its log."""

    async def stream(shard: Shard) -> rec.LogStream:
        marks = await shard.look(lambda transaction: transaction.execute(_SQL["log_marks"]).fetchone())
        last, trimmed = map(shard.public_number, marks)
        return rec.LogStream(name=shard.name, queue=shard.queue, last=last, trimmed=trimmed, is_dense=False)

    return rec.LogState(store.catalog.store_id, await asyncio.gather(*map(stream, await store.shards())))


async def read_log(store: Store, call: op.ReadLog) -> rec.LogPage:
    shard = store.shard_named(call.stream)
    found = await _rows(shard, shard.own_number(call.after), shard.own_number(call.until), call.limit)
    return rec.LogPage(found, found[-1].seq if len(found) == call.limit else call.until)


# -- shares ---------------------------------------------------------------------------------------------------


async def split_log(store: Store, call: op.SplitLog) -> list[int]:
    shard = store.shard_named(call.stream)
    after, until = shard.own_number(call.after), shard.own_number(call.until)
    archived, rows = await shard.look(
        lambda transaction: (
            _with_rows(transaction, after, until),
            engine.attempts_between(transaction, after, until, engine.FOREVER),
        )
    )
    points: list[tuple[int, int]] = [(row.seq, 1) for row in rows]
    for entry in archived:
        points += _spread(max(after, entry.first_row), min(until, entry.last_row), entry.rows)
    cuts = _cuts(sorted(points), sum(count for _, count in points) // call.rows)
    return [shard.public_number(number) for number in cuts if after < number < until]


async def split_jobs(store: Store, call: op.SplitJobs) -> list[rec.JobShare]:
    """Split queue by queue, because a listing of several queues reads a page of each."""

    def step(transaction: Transaction) -> list[tuple[int, int]]:
        points = [(seq, 1) for (seq,) in transaction.execute(_SQL["job_numbers"])]
        for entry in entries(transaction):
            points += _spread(entry.first_job, entry.last_job, entry.jobs)
        return points

    found: list[tuple[str, list[tuple[int, int]]]] = []
    for queue in await store.catalog.queues() if call.queue is None else [call.queue]:
        points_of = await asyncio.gather(*(shard.look(step) for shard in store.shards_of(queue)))
        found.append((queue, sorted(point for points in points_of for point in points)))
    total = sum(count for _, points in found for _, count in points)
    shares: list[rec.JobShare] = []
    for queue, points in found:
        size = sum(count for _, count in points)
        inner = _cuts(points, max(1, round(call.parts * size / total))) if size else []
        cursors = [None, *(_cursor(store.catalog.store_id, {"": number}) for number in reversed(inner)), None]
        shares += [rec.JobShare(queue=queue, after=low, until=high) for low, high in pairwise(cursors)]
    return shares


def _spread(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """Return some numbers between two, each with its share of `count` items, as if the items were spread evenly."""
    steps = min(count, _STEPS)
    return [
        (first + (last - first) * (n + 1) // steps, count * (n + 1) // steps - count * n // steps)
        for n in range(steps)
    ]


def _cuts(points: Sequence[tuple[int, int]], parts: int) -> list[int]:
    """Return the numbers that cut the items into `parts` shares of about the same size."""
    total = sum(count for _, count in points)
    found: list[int] = []
    seen = 0
    for number, count in points:
        seen += count
        if len(found) < parts - 1 and seen * parts >= total * (len(found) + 1):
            found.append(number)
    return sorted(set(found))
