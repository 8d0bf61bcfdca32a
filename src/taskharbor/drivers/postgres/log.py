"""The attempt log, in an order that never skips a row that commits late.

A cursor is `epoch.xid.seq`. Rows are read by the number of the transaction that wrote them, and only below the oldest transaction
that still runs. In a restored cluster these numbers begin again, so each cluster has an epoch. The server keeps epoch and number
in one number. For bulk readers that is the place of a row: rows of one transaction stay together.
"""

from __future__ import annotations

import asyncio

import msgspec

from taskharbor.drivers.contract import AttemptPage, LogPage, LogState, LogStream
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.records import numbered_attempt
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Attempt

_LOOKS = 20
_PAUSE = 0.005
"""Seconds between looks. A row is usually held back by a transaction that ends in a moment, so a reader looks a few times before
it reports that there is nothing new."""
_STREAM = "log"
_XID_BITS = 48


class Place(msgspec.Struct, frozen=True, order=True):
    """The row after which to go on."""

    xid: int
    """The number of the transaction, with the epoch in front."""
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.xid % 2**_XID_BITS}.{self.seq}"

    @property
    def epoch(self) -> int:
        return self.xid >> _XID_BITS


START = Place(1 << _XID_BITS, 0)


def parse_cursor(cursor: str | None) -> Place:
    if cursor is None:
        return START
    parts = cursor.split(".")
    if len(parts) == 3 and all(part.isdecimal() and len(part) < 20 for part in parts):
        epoch, xid, seq = map(int, parts)
        if epoch < 2**14 and xid < 2**_XID_BITS and seq < 2**63:
            return Place((epoch << _XID_BITS) + xid, seq)
    raise InvalidRequest(f"{cursor!r} is not a cursor of this log: pass on what the last page gave")


async def read_attempts(session: Session, after: str | None, limit: int) -> AttemptPage:
    place = parse_cursor(after)
    ((last,),) = await session.named("log", "epoch")
    if place.epoch > last:
        raise InvalidRequest(f"{after!r} is a cursor of another store: this one is in epoch {last}")
    rows = await session.named("log", "page", place.xid, place.seq, limit)
    if not rows and await await_writers(session):
        rows = await session.named("log", "page", place.xid, place.seq, limit)
    end = Place(*rows[-1][:2]) if rows else place
    return AttemptPage([numbered_attempt(row[1:]) for row in rows], str(end))


async def await_writers(session: Session) -> bool:
    """Wait a moment for transactions that hold back rows which are visible already. Return False if nothing was held back."""
    ((newest,),) = await session.named("log", "held_back")
    looks = 0 if newest is None else _LOOKS
    for _ in range(looks):
        await asyncio.sleep(_PAUSE)
        if (await session.named("log", "is_over", newest))[0][0]:
            break
    return looks > 0


async def job_attempts(session: Session, job_id: str) -> list[Attempt]:
    return [numbered_attempt(row[1:]) for row in await session.named("log", "of_job", job_id)]


async def log_streams(session: Session) -> LogState:
    await await_writers(session)
    ((system_id, trimmed, last),) = await session.named("log", "stream")
    stream = LogStream(name=_STREAM, queue=None, last=last, trimmed=trimmed, is_dense=False)
    return LogState(f"{system_id}/{session.schema}", [stream])


async def read_log(session: Session, stream: str, after: int, until: int, limit: int) -> LogPage:
    if stream != _STREAM:
        raise InvalidRequest(
            f"{stream!r} is not a stream of this store's log: pass on what `log_streams` gave"
        )
    rows = await session.named("log", "range", after, until, limit)
    rows.sort(key=lambda row: row[:2])
    return LogPage([numbered_attempt(row[1:]) for row in rows], rows[-1][0] if len(rows) >= limit else until)
