"""The attempt log: one per queue (and shard), read as one.

A cursor holds a place per log, so that nothing that one queue writes late is skipped because another was ahead, and the id of
its store: the places mean nothing in another.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from heapq import merge
from itertools import islice

import msgspec

from taskharbor.drivers.contract import AttemptPage
from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.locating import Place
from taskharbor.drivers.objectstore.queue_cell import QueueCell
from taskharbor.drivers.objectstore.rows import StoredRow, attempts_of
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Attempt


class LogCursor(msgspec.Struct, array_like=True, frozen=True):
    store_id: str
    places: list[tuple[str, int, int]]
    """Queue, shard, and the number of the last row that was read."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LogCursor).decode


async def read_attempts(store: OpenStore, after: str | None, limit: int) -> AttemptPage:
    places = {} if after is None else parsed_cursor(after, store.catalog.store_id)
    cells = await store.all_cells()

    async def part(cell: QueueCell) -> list[tuple[int, str, int, StoredRow]]:
        number = places.get((cell.queue, cell.shard), 0)

        def step(state: QueueState, brought: Brought) -> list[StoredRow]:
            return state.rows_after(number, limit, brought)

        return [(row.number, cell.queue, cell.shard, row) for row in await cell.look(step)]

    parts = await asyncio.gather(*map(part, cells))
    rows = list(islice(merge(*parts, key=lambda row: row[:3]), limit))
    for number, queue, shard, _ in rows:
        places[queue, shard] = number
    attempts = [attempt for _, queue, _, row in rows for attempt in attempts_of(queue, (row,))]
    return AttemptPage(attempts, written_cursor(store.catalog.store_id, places))


async def job_attempts(store: OpenStore, job_id: str) -> list[Attempt]:
    """Rows outlive their jobs, so every queue is asked."""
    cells = await store.all_cells()

    async def part(cell: QueueCell) -> list[Attempt]:
        rows = await cell.look(lambda state, brought: state.rows_of(job_id, brought))
        return attempts_of(cell.queue, rows)

    found = await asyncio.gather(*map(part, cells))
    return sorted((attempt for rows in found for attempt in rows), key=lambda attempt: attempt.seq)


def parsed_cursor(cursor: str, store_id: str) -> dict[Place, int]:
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


def written_cursor(store_id: str, places: dict[Place, int]) -> str:
    cursor = LogCursor(
        store_id, [(queue, shard, number) for (queue, shard), number in sorted(places.items())]
    )
    return base64.urlsafe_b64encode(_encode(cursor)).decode().rstrip("=")
