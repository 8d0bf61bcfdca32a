"""The attempt log, in an order that never skips a row that commits late.

A cursor is `epoch.xid.seq`. Rows are read by the number of the transaction that wrote them, and only below the oldest
transaction that still runs; in a restored cluster those numbers begin anew, which is what the epoch is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import LiteralString

import msgspec

from taskharbor.drivers.contract import AttemptPage
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.prepared import Row
from taskharbor.drivers.postgres.rows import attempt_from_row
from taskharbor.drivers.postgres.statements import load
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Attempt

_LOOKS = 20
_PAUSE = 0.005
"""A row that is held back is usually held back by a transaction that ends in a moment: look a few times before saying
that there is nothing new."""


class Place(msgspec.Struct, frozen=True):
    """After which row to go on."""

    epoch: int
    xid: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.xid}.{self.seq}"


START = Place(1, 0, 0)


def parse_cursor(cursor: str | None) -> Place:
    if cursor is None:
        return START
    parts = cursor.split(".")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 21 for part in parts):
        raise InvalidRequest(f"{cursor!r} is not a cursor of this log: pass on what the last page gave")
    return Place(*map(int, parts))


@cache
def _statement(name: str, schema: str) -> LiteralString:
    sql = load("log", schema)
    return sql[name].replace("/*columns*/", sql["columns"])


async def read_attempts(session: Session, schema: str, after: str | None, limit: int) -> AttemptPage:
    place = parse_cursor(after)
    epochs = await session.rows(_statement("epochs", schema))
    last = epochs[-1][0]
    if place.epoch > last:
        raise InvalidRequest(f"{after!r} is a cursor of another store: this one is in epoch {last}")
    while place.epoch < last:
        rows = await _old_page(session, schema, place, epochs, limit)
        if rows:
            return _page(rows, place)
        place = Place(place.epoch + 1, 0, 0)
    begin = epochs[-1][1]
    for look in range(_LOOKS):
        values = {"xid": str(place.xid), "seq": place.seq, "after": begin, "limit": limit}
        rows = await session.rows(_statement("page", schema), values)
        if rows or not await session.value(_statement("is_held_back", schema), {"after": begin}):
            break
        if look < _LOOKS - 1:
            await asyncio.sleep(_PAUSE)
    return _page(rows, place)


async def _old_page(
    session: Session, schema: str, place: Place, epochs: Sequence[Row], limit: int
) -> list[Row]:
    bounds: dict[int, int] = dict(epochs)
    values = {
        "xid": str(place.xid),
        "seq": place.seq,
        "after": bounds[place.epoch],
        "until": bounds[place.epoch + 1],
        "limit": limit,
    }
    return await session.rows(_statement("page_of_old_epoch", schema), values)


def _page(rows: Sequence[Row], place: Place) -> AttemptPage:
    end = Place(place.epoch, int(rows[-1][1]), rows[-1][0]) if rows else place
    return AttemptPage([attempt_from_row(row) for row in rows], str(end))


async def job_attempts(session: Session, schema: str, job_id: str) -> list[Attempt]:
    rows = await session.rows(_statement("of_job", schema), {"id": job_id})
    return [attempt_from_row(row) for row in rows]
