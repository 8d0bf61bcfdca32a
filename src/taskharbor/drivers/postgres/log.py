"""The attempt log, in an order that never skips a row that commits late.

A cursor is `epoch.xid.seq`. Rows are read by the number of the transaction that wrote them, and only below the oldest
transaction that still runs; in a restored cluster those numbers begin anew, which is what the epoch is for. To bulk readers each
epoch is a stream, and the place of a row is the number of its transaction: rows of one transaction stay together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import AttemptPage, LogPage, LogState, LogStream
from taskharbor.drivers.postgres.connections import Row, Session
from taskharbor.drivers.postgres.rows import attempt_record
from taskharbor.drivers.postgres.statements import load
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Attempt

_LOOKS = 20
_PAUSE = 0.005
"""A row that is held back is usually held back by a transaction that ends in a moment: look a few times before saying
that there is nothing new."""
_OLD_EPOCH = 2**62
"""The end of a stream that a restored cluster brought along: no transaction has such a number."""


class Place(msgspec.Struct, frozen=True, order=True):
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


async def read_attempts(session: Session, after: str | None, limit: int) -> AttemptPage:
    sql = load("log", session.schema)
    place = parse_cursor(after)
    epochs: dict[int, int] = dict(await session.rows(sql["epochs"]))
    last = max(epochs)
    if place.epoch > last:
        raise InvalidRequest(f"{after!r} is a cursor of another store: this one is in epoch {last}")
    while place.epoch < last:
        values = [str(place.xid), place.seq, epochs[place.epoch], epochs[place.epoch + 1], limit]
        rows = await session.rows(sql["page_of_old_epoch"], values)
        if rows:
            return _page(rows, place)
        place = Place(place.epoch + 1, 0, 0)
    for look in range(_LOOKS):
        rows = await session.rows(sql["page"], [str(place.xid), place.seq, epochs[last], limit])
        if rows or not await session.value(sql["is_held_back"], [epochs[last]]):
            break
        if look < _LOOKS - 1:
            await asyncio.sleep(_PAUSE)
    return _page(rows, place)


def _page(rows: Sequence[Row], place: Place) -> AttemptPage:
    end = Place(place.epoch, int(rows[-1][0]), rows[-1][1]) if rows else place
    return AttemptPage([attempt_record(row) for row in rows], str(end))


async def job_attempts(session: Session, job_id: str) -> list[Attempt]:
    rows = await session.rows(load("log", session.schema)["of_job"], [job_id])
    return [attempt_record(row) for row in rows]


async def log_streams(session: Session) -> LogState:
    sql = load("log", session.schema)
    epochs = await session.rows(sql["streams"])
    _, begin, _, trimmed = epochs[-1]
    for _ in range(_LOOKS):
        if not await session.value(sql["is_held_back"], [begin]):
            break
        await asyncio.sleep(_PAUSE)
    last = await session.value(sql["end_of_log"], [begin])
    # In another cluster nobody can tell what retention took of a stream before.
    streams = [
        LogStream(name=str(epoch), queue=None, last=_OLD_EPOCH, trimmed=None, is_dense=False)
        for epoch, *_ in epochs
    ]
    streams[-1] = msgspec.structs.replace(streams[-1], last=max(last, trimmed), trimmed=trimmed)
    return LogState(f"{epochs[0][2]}/{session.schema}", streams)


async def read_log(session: Session, call: op.ReadLog) -> LogPage:
    sql = load("log", session.schema)
    epochs: dict[int, int] = dict(await session.rows(sql["epochs"]))
    epoch = int(call.stream) if call.stream.isdecimal() and len(call.stream) < 10 else 0
    if epoch not in epochs:
        raise InvalidRequest(
            f"{call.stream!r} is not a stream of this store's log: pass on what `log_streams` gave"
        )
    values = [str(call.after), str(call.until), epochs[epoch], epochs.get(epoch + 1, 2**63 - 1), call.limit]
    rows = await session.rows(sql["range"], values)
    rows.sort(key=lambda row: (int(row[0]), row[1]))
    place = int(rows[-1][0]) if len(rows) >= call.limit else call.until
    return LogPage([attempt_record(row) for row in rows], place)
