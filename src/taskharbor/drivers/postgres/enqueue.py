"""Storing new jobs: plain batches by one INSERT, all others by the contract's rules, each in one round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, LiteralString, TypeVar

import psycopg

from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.postgres import arrays
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.listener import channel
from taskharbor.drivers.postgres.notify_throttle import NOTIFYING
from taskharbor.drivers.postgres.rows import (
    backoff_column,
    codec_column,
    flag_number,
    given_columns,
    headers_text,
    to_json,
)
from taskharbor.drivers.postgres.statements import load
from taskharbor.jobs import DEFAULT_BACKOFF_MAX, DEFAULT_BACKOFF_MIN, JobRecord, Micros

T = TypeVar("T")


async def enqueue(
    session: Session,
    schema: str,
    records: Sequence[JobRecord],
    now: Micros,
    stir: int,
    *,
    new_ids: bool,
    again: bool,
) -> list[Enqueued]:
    """`again`: an earlier try may have stored them, so do not try the plain way first."""
    sql = load("enqueue", schema)
    if not again:
        try:
            if (
                new_ids
                and len(records) == 1
                and is_default(records[0])
                and await _stored_one(session, sql["one"], records[0], schema, now, stir)
            ):
                return [Enqueued(records[0].id)]
            if is_plain(records):
                await session.rows(sql["plain"], plain_values(records, now, stir, new_ids=new_ids))
                return [Enqueued(record.id) for record in records]
        except psycopg.errors.UniqueViolation:
            # An id is known: a repeated call, or a job twice in the batch. Nothing was stored.
            pass
    rows = await session.rows(sql["by_rules"], rule_values(records, now, stir, again=again))
    return [Enqueued(job_id, existed) for job_id, existed in rows]


async def _stored_one(
    session: Session, statement: LiteralString, record: JobRecord, schema: str, now: Micros, stir: int
) -> bool:
    """Not where the queue is new."""
    rows = await session.rows(statement, one_value(record, schema, now, stir, session.repeats))
    if not rows:
        return False
    session.repeats = rows[0][0]
    return True


def is_plain(records: Sequence[JobRecord]) -> bool:
    """Whether the batch fits `enqueue_plain`: one queue, no keys, the rare settings the same for all."""
    first = records[0]
    rare = _rare(first)
    return all(
        record.key is None
        and record.idempotency_key is None
        and record.queue == first.queue
        and _rare(record) == rare
        for record in records
    )


def is_default(record: JobRecord) -> bool:
    """Whether it fits the statement for a single job."""
    return (
        record.key is None
        and record.idempotency_key is None
        and record.update is None
        and not record.headers
        and record.codec == "json"
        and not record.timeout_us
        and not record.max_stalls
        and record.backoff_min_us == DEFAULT_BACKOFF_MIN
        and record.backoff_max_us == DEFAULT_BACKOFF_MAX
    )


def one_value(record: JobRecord, schema: str, now: Micros, stir: int, repeats: int | None) -> list[Any]:
    return [
        record.id,
        record.type,
        record.run_at_us,
        record.created_at_us,
        -record.priority,
        record.max_attempts,
        0 if record.run_at_us > now else 1,
        record.payload,
        record.queue,
        repeats,
        stir == NOTIFYING,
        channel(schema),
        record.queue,
    ]


def _rare(record: JobRecord) -> tuple[Any, ...]:
    return (
        record.max_attempts,
        record.codec,
        record.timeout_us,
        record.max_stalls,
        record.backoff_min_us,
        record.backoff_max_us,
        record.update,
    )


def plain_values(records: Sequence[JobRecord], now: Micros, stir: int, *, new_ids: bool) -> list[Any]:
    first = records[0]
    payloads = [record.payload for record in records]
    headers = [record.headers for record in records]
    is_same_headers = all(one == first.headers for one in headers)
    return [
        first.queue,
        arrays.text_array([record.id for record in records]),
        *_once_or_each([record.type for record in records], arrays.text_array),
        *_once_or_each([record.run_at_us for record in records], arrays.int_array),
        *_once_or_each([record.created_at_us for record in records], arrays.int_array),
        *_once_or_each([record.priority for record in records], arrays.int_array),
        first.max_attempts,
        headers_text(first.headers) if is_same_headers else None,
        None if is_same_headers else arrays.escaped_texts(map(headers_text, headers)),
        codec_column(first.codec),
        first.timeout_us or None,
        first.max_stalls or None,
        backoff_column(first.backoff_min_us, DEFAULT_BACKOFF_MIN),
        backoff_column(first.backoff_max_us, DEFAULT_BACKOFF_MAX),
        flag_number(first.update),
        payloads[0] if len(payloads) == 1 else b"".join(payloads),
        arrays.ends(payloads),
        now,
        stir,
        new_ids,
    ]


def _once_or_each(values: Sequence[T], as_array: Callable[[Sequence[T]], str]) -> tuple[T | None, str | None]:
    """One value where all are the same, else the array of them."""
    if len(values) == 1 or values.count(values[0]) == len(values):
        return values[0], None
    return None, as_array(values)


def rule_values(records: Sequence[JobRecord], now: Micros, stir: int, *, again: bool) -> list[Any]:
    payloads = [record.payload for record in records]
    return [
        to_json([given_columns(record) for record in records]),
        b"".join(payloads),
        arrays.ends(payloads),
        now,
        stir,
        again,
    ]
