"""Storing new jobs: plain batches by one INSERT, all others by the contract's rules, each in one round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import psycopg

from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import (
    ends,
    escaped_texts,
    given_columns,
    int_array,
    stored_value,
    text_array,
    to_json,
)
from taskharbor.drivers.postgres.statements import channel, load
from taskharbor.jobs import JobRecord, Micros

T = TypeVar("T")

_RARE = ("max_attempts", "max_stalls", "codec", "timeout_us", "backoff_min_us", "backoff_max_us", "update")
"""Settings that are the same for all jobs of a batch."""
rare_settings = attrgetter(*_RARE)
_DEFAULTS = {name: getattr(JobRecord(id="", type="", run_at_us=0, created_at_us=0), name) for name in _RARE}
_USUAL = tuple(_DEFAULTS.values())[1:]


async def enqueue(
    session: Session,
    records: Sequence[JobRecord],
    now: Micros,
    stir: int,
    *,
    new_ids: bool,
) -> list[Enqueued]:
    sql = load("enqueue", session.schema)
    # An earlier try may have stored them: then not the plain way first.
    if not session.is_repeated:
        try:
            if (
                new_ids
                and len(records) == 1
                and await _stored_one(session, sql["one"], records[0], now, stir)
            ):
                return [Enqueued(records[0].id)]
            if is_plain(records):
                await session.rows(sql["plain"], [*batch_values(records), now, stir, new_ids])
                return [Enqueued(record.id) for record in records]
        except psycopg.errors.UniqueViolation:
            # An id is known: a repeated call, or a job twice in the batch. Nothing was stored.
            pass
    rows = await session.rows(sql["by_rules"], [*rule_values(records), now, stir, session.is_repeated])
    return [Enqueued(job_id, existed) for job_id, existed in rows]


async def _stored_one(session: Session, statement: str, job: JobRecord, now: Micros, stir: int) -> bool:
    """Not where it has anything but defaults, or the queue is new."""
    if not (
        job.key is None
        and job.idempotency_key is None
        and not job.headers
        and rare_settings(job)[1:] == _USUAL
    ):
        return False
    values = [
        job.id, job.type, job.run_at_us, job.created_at_us, -job.priority, job.max_attempts,
        0 if job.run_at_us > now else 1, job.payload, job.queue, session.repeats, stir, channel(session.schema),
    ]  # fmt: skip
    rows = await session.rows(statement, values)
    if rows:
        session.repeats = rows[0][0]
    return bool(rows)


def is_plain(records: Sequence[JobRecord]) -> bool:
    """Whether the jobs fit a `job_batch`, and have no idempotency keys."""
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
    """The fields of a `job_batch`. `payloads`: of jobs that differ from the one record in nothing else."""
    first = records[0]
    own = [record.payload for record in records] if payloads is None else payloads
    headers = [record.headers for record in records]
    is_same = headers.count(first.headers) == len(headers)
    is_idempotent = first.idempotency_key is not None
    return [
        first.queue,
        text_array([record.id for record in records]) if has_ids else None,
        *_once_or_each([record.type for record in records], text_array),
        *_once_or_each([record.run_at_us for record in records], int_array),
        *_once_or_each([record.created_at_us for record in records], int_array),
        *_once_or_each([-record.priority for record in records], int_array),
        stored_value("headers", first.headers) if is_same else None,
        None if is_same else escaped_texts([stored_value("headers", one) for one in headers]),
        text_array([record.idempotency_key or "" for record in records]) if is_idempotent else None,
        first.max_attempts,
        *[
            None if value == _DEFAULTS[name] else stored_value(name, value)
            for name, value in zip(_RARE[1:], rare_settings(first)[1:], strict=True)
        ],
        own[0] if len(own) == 1 else b"".join(own),
        ends(own),
    ]


def _once_or_each(values: Sequence[T], as_array: Callable[[Sequence[T]], str]) -> tuple[T | None, str | None]:
    """One value where all are the same, else the array of them."""
    if len(values) == 1 or values.count(values[0]) == len(values):
        return values[0], None
    return None, as_array(values)


def rule_values(records: Sequence[JobRecord]) -> list[Any]:
    payloads = [record.payload for record in records]
    return [to_json([given_columns(record) for record in records]), b"".join(payloads), ends(payloads)]
