"""Stores new jobs: plain batches by one INSERT, all others by the contract's rules, each in one round trip.

Also bulk writing through the driver contract, for brokers. A program that reaches the server itself uses `bulk`, which is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

import psycopg

from taskharbor.bulk.stage import unpack
from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import ends, int_array, rule_values, stored_value, text_array, to_json
from taskharbor.jobs import JobRecord, Micros

T = TypeVar("T")

_RARE = ("max_attempts", "max_stalls", "codec", "timeout_us", "backoff_min_us", "backoff_max_us", "update")
"""Settings that are the same for all jobs of a batch."""
rare_settings = attrgetter(*_RARE)
_DEFAULTS = {name: getattr(JobRecord(id="", type="", run_at_us=0, created_at_us=0), name) for name in _RARE}
_CHUNK = 1000
_USUAL = tuple(_DEFAULTS.values())[1:]


async def store(
    session: Session, records: Sequence[JobRecord], now: Micros, stir: int, *, new_ids: bool
) -> list[Enqueued]:
    # After an earlier try that may have stored the jobs, the plain way is not tried first.
    if not session.is_repeated:
        try:
            if new_ids and len(records) == 1 and await _stored_one(session, records[0], now, stir):
                return [Enqueued(records[0].id)]
            if is_plain(records):
                async with nullcontext() if session.is_idle else session.connection.transaction():
                    await session.named("enqueue", "plain", *batch_values(records), now, stir, new_ids)
                return [Enqueued(record.id) for record in records]
        except psycopg.errors.UniqueViolation:
            # An id is known: a repeated call, or a job twice in the batch. Nothing was stored.
            pass
    rows = await session.named("enqueue", "by_rules", *rule_values(records), now, stir, session.is_repeated)
    return [Enqueued(job_id, existed) for job_id, existed in rows]


async def _stored_one(session: Session, job: JobRecord, now: Micros, stir: int) -> bool:
    """Not where it has anything but defaults, or the queue is new."""
    if job.headers or not is_plain([job]) or rare_settings(job)[1:] != _USUAL:
        return False
    values = [
        job.id, job.type, job.run_at_us, job.created_at_us, -job.priority, job.max_attempts,
        0 if job.run_at_us > now else 1, job.payload, job.queue, stir, session.channel,
    ]  # fmt: skip
    return bool(await session.named("enqueue", "one", *values))


def is_plain(records: Sequence[JobRecord]) -> bool:
    """Return True if the jobs fit a `job_batch` and have no idempotency keys."""
    queue, rare = records[0].queue, rare_settings(records[0])
    return all(
        record.key is None
        and record.idempotency_key is None
        and record.queue == queue
        and rare_settings(record) == rare
        for record in records
    )


def batch_values(
    records: Sequence[JobRecord], payloads: Sequence[bytes] | None = None, *, has_ids: bool = True
) -> list[Any]:
    """Return the fields of a `job_batch`. `payloads`: for jobs that differ from the one record in nothing else."""
    first = records[0]
    own = [record.payload for record in records] if payloads is None else payloads
    headers = [to_json(record.headers) if record.headers else "" for record in records]
    return [
        first.queue,
        text_array([record.id for record in records]) if has_ids else None,
        text_array(_once_or_each([record.type for record in records])),
        int_array(_once_or_each([record.run_at_us for record in records])),
        int_array(_once_or_each([record.created_at_us for record in records])),
        int_array(_once_or_each([-record.priority for record in records])),
        text_array(_once_or_each(headers)) if any(headers) else None,
        text_array([record.idempotency_key or "" for record in records])
        if first.idempotency_key is not None
        else None,
        first.max_attempts,
        *[
            None if value == _DEFAULTS[name] else stored_value(name, value)
            for name, value in zip(_RARE[1:], rare_settings(first)[1:], strict=True)
        ],
        own[0] if len(own) == 1 else b"".join(own),
        ends(own),
    ]


def _once_or_each(values: Sequence[T]) -> Sequence[T]:
    """Return one value if all are the same, else all values."""
    return values[:1] if values.count(values[0]) == len(values) else values


# -- bulk writing through the contract --------------------------------------------------------------------------------


async def put_blob(session: Session, blob: str, data: bytes, swaps: bool, expected: bytes | None) -> bool:
    if expected is not None:
        return bool(await session.named("blobs", "replace", blob, data, expected))
    return bool(await session.named("blobs", "create" if swaps else "put", blob, data))


async def read_blobs(session: Session, names: Sequence[str]) -> list[bytes | None]:
    return [data for (data,) in await session.named("blobs", "read", text_array(names))]


async def list_blobs(session: Session, folder: str) -> list[str]:
    return [name for (name,) in await session.named("blobs", "names", f"{folder}/")]


async def drop_blobs(session: Session, names: Sequence[str]) -> list[None]:
    await session.named("blobs", "drop", text_array(names))
    return [None] * len(names)


async def publish_blobs(
    session: Session, series: str, number: int, portion: int, names: Sequence[str], now: Micros
) -> dict[str, int]:
    async with session.connection.transaction():
        await session.named("blobs", "lock_series", series)
        known = (await session.named("blobs", "portion", series) or [(number, 0, 0)])[0]
        added: int = known[2] if known[0] == number else 0
        if tuple(known[:2]) < (number, portion):
            for name in names:
                (data,) = await read_blobs(session, [name])
                added += 0 if data is None else await _enqueue(session, unpack(data), now)
            await session.named("blobs", "note", series, number, portion, added)
    return {"": added}


async def _enqueue(session: Session, jobs: Sequence[JobRecord], now: Micros) -> int:
    """Enqueue within the caller's transaction, in runs of jobs that are stored the same way."""
    added = 0
    for _, run in groupby(jobs, lambda job: (job.queue, job.key is None and job.idempotency_key is None)):
        some = list(run)
        for start in range(0, len(some), _CHUNK):
            stored = await store(session, some[start : start + _CHUNK], now, session.stir, new_ids=False)
            added += sum(not one.existed for one in stored)
    return added
