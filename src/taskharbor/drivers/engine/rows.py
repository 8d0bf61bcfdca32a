"""Records to rows and back.

States and outcomes are small integers in the file. What SQL never looks at travels in one JSON column, which
is NULL for a job that uses only defaults: most of them, and each column costs time at every move of the job.
"""

from __future__ import annotations

from typing import Any

import msgspec

from taskharbor.jobs import (
    DEFAULT_BACKOFF_MAX,
    DEFAULT_BACKOFF_MIN,
    Attempt,
    JobRecord,
    JobState,
    Micros,
    Outcome,
    UpdateFlags,
)

STATES = tuple(JobState)
OUTCOMES = tuple(Outcome)
STATE_NUMBERS = {state: number for number, state in enumerate(STATES)}
OUTCOME_NUMBERS = {outcome: number for number, outcome in enumerate(OUTCOMES)}

SCHEDULED, READY, BLOCKED, INFLIGHT, DONE, DEAD, CANCELLED = range(7)

INLINE_PAYLOAD = 1024
"""Longer payloads get a row of their own: SQLite rewrites the whole row whenever a job moves."""

TOKEN_LENGTH = 24


class Spec(msgspec.Struct, omit_defaults=True):
    """The part of a record that only Python reads. Field names are those of JobRecord."""

    codec: str = "json"
    headers: dict[str, str] = {}
    timeout_us: Micros = 0
    update: UpdateFlags | None = None
    idempotency_key: str | None = None
    backoff_min_us: Micros = DEFAULT_BACKOFF_MIN
    backoff_max_us: Micros = DEFAULT_BACKOFF_MAX


_encode = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(Spec).decode


def to_json(value: Any) -> str:
    return _encode(value).decode()


def spec_of(record: JobRecord) -> Spec:
    return Spec(
        record.codec,
        record.headers,
        record.timeout_us,
        record.update,
        record.idempotency_key,
        record.backoff_min_us,
        record.backoff_max_us,
    )


def spec_text(record: JobRecord) -> str | None:
    if (
        record.codec == "json"
        and not record.headers
        and not record.timeout_us
        and record.update is None
        and record.idempotency_key is None
        and record.backoff_min_us == DEFAULT_BACKOFF_MIN
        and record.backoff_max_us == DEFAULT_BACKOFF_MAX
    ):
        return None
    return to_json(spec_of(record))


def read_spec(text: str | None) -> Spec:
    return Spec() if text is None else _decode_spec(text)


def apply_spec(record: JobRecord, text: str) -> None:
    spec = _decode_spec(text)
    record.codec = spec.codec
    record.headers = spec.headers
    record.timeout_us = spec.timeout_us
    record.update = spec.update
    record.idempotency_key = spec.idempotency_key
    record.backoff_min_us = spec.backoff_min_us
    record.backoff_max_us = spec.backoff_max_us


def record_from_row(row: tuple[Any, ...], now: Micros) -> JobRecord:
    """From the columns of `inspect.sql`."""
    state = row[11]
    if state == SCHEDULED and row[6] <= now:
        state = READY
    record = JobRecord(
        id=row[1],
        type=row[2],
        queue=row[3],
        payload=row[4],
        priority=row[5],
        run_at_us=row[6],
        created_at_us=row[7],
        key=row[8],
        max_attempts=row[9],
        max_stalls=row[10],
        state=STATES[state],
        attempts=row[12],
        stalls=row[13],
        fence=row[14],
        last_error=row[15],
        failed_at_us=row[16],
        finished_at_us=row[17],
        result=row[18],
        progress=row[19],
        cancel_requested=bool(row[20]),
        merged_into=row[21],
        token=None if row[22] is None else lease_token(row[22], row[0]),
        worker=row[23],
        expires_at_us=row[24],
        reserved_at_us=row[25],
    )
    if row[26] is not None:
        apply_spec(record, row[26])
    return record


def attempt_from_row(row: tuple[Any, ...]) -> Attempt:
    return Attempt(
        seq=row[0],
        job_id=row[1],
        queue=row[2],
        type=row[3],
        key=row[4],
        priority=row[5],
        fence=row[6],
        worker=row[7],
        created_at_us=row[8],
        run_at_us=row[9],
        reserved_at_us=row[10],
        lease_expires_at_us=row[11],
        ended_at_us=row[12],
        outcome=OUTCOMES[row[13]],
        state=STATES[row[14]],
        error_type=row[15],
        error_message=row[16],
        payload_size=row[17],
    )


def lease_token(secret: str, seq: int) -> str:
    """What a holder proves its lease with: the secret of the reserve call and where the job stands.

    The row number saves settling the search by id. It grants nothing: id and secret are still compared.
    """
    return f"{secret}{seq:x}"
