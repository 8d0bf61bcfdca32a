"""Bulk reading and writing through the driver contract, for brokers. Who reaches the server itself uses `bulk`, which is faster.

The log is a stream per epoch, and the place of a row is the number of its transaction: rows of one transaction stay together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

import msgspec
import psycopg

from taskharbor.bulk.stage import unpack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import LogPage, LogState, LogStream
from taskharbor.drivers.postgres import arrays, enqueue
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import attempt_from_row
from taskharbor.drivers.postgres.statements import load
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, Micros

_OLD_EPOCH = 2**62
"""The end of a stream that a restored cluster brought along: no transaction has such a number."""
_LOOKS = 20
_PAUSE = 0.005
"""A row that is held back is usually held back by a transaction that ends in a moment."""
_CHUNK = 1000


async def log_streams(session: Session, schema: str) -> LogState:
    sql, log = load("blobs", schema), load("log", schema)
    epochs = await session.rows(sql["streams"])
    _, begin, _, trimmed = epochs[-1]
    for _ in range(_LOOKS):
        if not await session.value(log["is_held_back"], {"after": begin}):
            break
        await asyncio.sleep(_PAUSE)
    last = await session.value(sql["end_of_log"], [begin])
    # In another cluster nobody can tell what retention took of a stream before.
    streams = [
        LogStream(name=str(epoch), queue=None, last=_OLD_EPOCH, trimmed=None, is_dense=False)
        for epoch, *_ in epochs
    ]
    streams[-1] = msgspec.structs.replace(streams[-1], last=max(last, trimmed), trimmed=trimmed)
    return LogState(f"{epochs[0][2]}/{schema}", streams)


async def read_log(session: Session, schema: str, call: op.ReadLog) -> LogPage:
    sql, log = load("blobs", schema), load("log", schema)
    bounds: dict[int, int] = dict(await session.rows(log["epochs"]))
    epoch = int(call.stream) if call.stream.isdecimal() and len(call.stream) < 10 else 0
    if epoch not in bounds:
        raise InvalidRequest(
            f"{call.stream!r} is not a stream of this store's log: pass on what `log_streams` gave"
        )
    begin, end = bounds[epoch], bounds.get(epoch + 1, 2**63 - 1)
    statement = sql["log"].replace("/*columns*/", log["columns"])
    rows = await session.rows(statement, [str(call.after), str(call.until), begin, end, call.limit])
    rows.sort(key=lambda row: (int(row[1]), row[0]))
    place = int(rows[-1][1]) if len(rows) >= call.limit else call.until
    return LogPage([attempt_from_row(row) for row in rows], place)


# -- blobs ----------------------------------------------------------------------------------------------------


async def put_blob(session: Session, schema: str, call: op.PutBlob) -> bool:
    sql = load("blobs", schema)
    if call.expected is not None:
        return bool(await session.rows(sql["replace"], [call.data, call.blob, call.expected]))
    how = "create" if call.swaps else "put"
    return bool(await session.rows(sql[how], [call.blob, call.data]))


async def read_blobs(session: Session, schema: str, names: Sequence[str]) -> list[bytes | None]:
    rows = await session.rows(load("blobs", schema)["read"], [arrays.text_array(list(names))])
    return [None if data is None else bytes(data) for (data,) in rows]


async def list_blobs(session: Session, schema: str, folder: str) -> list[str]:
    return [name for (name,) in await session.rows(load("blobs", schema)["names"], [f"{folder}/"])]


async def drop_blobs(session: Session, schema: str, names: Sequence[str]) -> list[None]:
    await session.rows(load("blobs", schema)["drop"], [arrays.text_array(list(names))])
    return [None] * len(names)


async def publish_blobs(session: Session, schema: str, call: op.PublishBlobs, stir: int) -> dict[str, int]:
    sql = load("blobs", schema)
    async with session.connection.transaction():
        await session.rows(sql["lock_series"], [call.series])
        known = (await session.rows(sql["portion"], [call.series]) or [(call.number, 0, 0)])[0]
        added: int = known[2] if known[0] == call.number else 0
        if tuple(known[:2]) < (call.number, call.portion):
            for name in call.names:
                (data,) = await read_blobs(session, schema, [name])
                added += 0 if data is None else await _enqueue(session, schema, unpack(data), call.now, stir)
            await session.rows(sql["note"], [call.series, call.number, call.portion, added])
    return {"": added}


async def _enqueue(session: Session, schema: str, jobs: Sequence[JobRecord], now: Micros, stir: int) -> int:
    """Within the caller's transaction: runs of plain jobs by one INSERT, where no id is known, and all others by the rules."""
    sql = load("enqueue", schema)
    added = 0
    for _, run in groupby(jobs, lambda job: (job.queue, job.key is None and job.idempotency_key is None)):
        some = list(run)
        for start in range(0, len(some), _CHUNK):
            chunk = some[start : start + _CHUNK]
            try:
                if enqueue.is_plain(chunk):
                    async with session.connection.transaction():
                        values = enqueue.plain_values(chunk, now, stir, new_ids=False)
                        await session.rows(sql["plain"], values)
                    added += len(chunk)
                    continue
            except psycopg.errors.UniqueViolation:
                pass
            values = enqueue.rule_values(chunk, now, stir, again=False)
            added += sum(not existed for _, existed in await session.rows(sql["by_rules"], values))
    return added
