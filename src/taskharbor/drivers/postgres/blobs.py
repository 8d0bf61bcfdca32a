"""Bulk writing through the driver contract, for brokers. Who reaches the server itself uses `bulk`, which is faster."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import psycopg

from taskharbor.bulk.stage import unpack
from taskharbor.drivers import operations as op
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.enqueue import batch_values, is_plain, rule_values
from taskharbor.drivers.postgres.rows import text_array
from taskharbor.drivers.postgres.statements import load
from taskharbor.jobs import JobRecord, Micros

_CHUNK = 1000


async def put_blob(session: Session, call: op.PutBlob) -> bool:
    sql = load("blobs", session.schema)
    if call.expected is not None:
        return bool(await session.rows(sql["replace"], [call.blob, call.data, call.expected]))
    how = "create" if call.swaps else "put"
    return bool(await session.rows(sql[how], [call.blob, call.data]))


async def read_blobs(session: Session, names: Sequence[str]) -> list[bytes | None]:
    return [
        data for (data,) in await session.rows(load("blobs", session.schema)["read"], [text_array(names)])
    ]


async def list_blobs(session: Session, folder: str) -> list[str]:
    return [name for (name,) in await session.rows(load("blobs", session.schema)["names"], [f"{folder}/"])]


async def drop_blobs(session: Session, names: Sequence[str]) -> list[None]:
    await session.rows(load("blobs", session.schema)["drop"], [text_array(names)])
    return [None] * len(names)


async def publish_blobs(session: Session, call: op.PublishBlobs) -> dict[str, int]:
    sql = load("blobs", session.schema)
    async with session.connection.transaction():
        await session.rows(sql["lock_series"], [call.series])
        known = (await session.rows(sql["portion"], [call.series]) or [(call.number, 0, 0)])[0]
        added: int = known[2] if known[0] == call.number else 0
        if tuple(known[:2]) < (call.number, call.portion):
            for name in call.names:
                (data,) = await read_blobs(session, [name])
                added += 0 if data is None else await _enqueue(session, unpack(data), call.now)
            await session.rows(sql["note"], [call.series, call.number, call.portion, added])
    return {"": added}


async def _enqueue(session: Session, jobs: Sequence[JobRecord], now: Micros) -> int:
    """Within the caller's transaction: runs of plain jobs by one INSERT, where no id is known, and all others by the rules."""
    sql = load("enqueue", session.schema)
    added = 0
    for _, run in groupby(jobs, lambda job: (job.queue, job.key is None and job.idempotency_key is None)):
        some = list(run)
        for start in range(0, len(some), _CHUNK):
            chunk = some[start : start + _CHUNK]
            try:
                if is_plain(chunk):
                    async with session.connection.transaction():
                        await session.rows(sql["plain"], [*batch_values(chunk), now, session.stir, False])
                    added += len(chunk)
                    continue
            except psycopg.errors.UniqueViolation:
                pass
            rows = await session.rows(sql["by_rules"], [*rule_values(chunk), now, session.stir, False])
            added += sum(not existed for _, existed in rows)
    return added
