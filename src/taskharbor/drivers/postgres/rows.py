"""Records to columns and back. NULL stands for a default, so that most jobs are short rows and short answers."""

from __future__ import annotations

import base64
from typing import Any, Final

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
    UpdateRunAt,
)

STATES: Final = tuple(JobState)
OUTCOMES: Final = tuple(Outcome)
STATE_NUMBERS: Final = {state: number for number, state in enumerate(STATES)}

SCHEDULED, READY, BLOCKED, INFLIGHT, DONE, DEAD, CANCELLED = range(7)

SECRET_LENGTH: Final = 24

_RUN_AT: tuple[UpdateRunAt, ...] = ("no", "yes", "later", "earlier")
_FLAGS = [
    UpdateFlags(bool(number & 1), _RUN_AT[number >> 3], bool(number & 2), bool(number & 4))
    for number in range(32)
]
_FLAG_NUMBERS = {flags: number for number, flags in enumerate(_FLAGS)}

_encode = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_LONGEST = 2**63 - 1


def to_json(value: Any) -> str:
    return _encode(value).decode()


def flag_number(flags: UpdateFlags | None) -> int | None:
    return None if flags is None else _FLAG_NUMBERS[flags]


def headers_text(headers: dict[str, str]) -> str | None:
    return to_json(headers) if headers else None


def in_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def given_columns(record: JobRecord) -> dict[str, Any]:
    """A record as the columns of `jobs` that are not defaults, for storing it by the rules."""
    columns: dict[str, Any] = {
        "id": record.id,
        "queue": record.queue,
        "type": record.type,
        "rank": -record.priority,
        "run_at": record.run_at_us,
        "created_at": record.created_at_us,
        "max_attempts": record.max_attempts,
    }
    optional = {
        "key": record.key,
        "idempotency_key": record.idempotency_key,
        "flags": flag_number(record.update),
        "headers": headers_text(record.headers),
        "codec": codec_column(record.codec),
        "timeout_us": record.timeout_us or None,
        "max_stalls": record.max_stalls or None,
        "backoff_min_us": backoff_column(record.backoff_min_us, DEFAULT_BACKOFF_MIN),
        "backoff_max_us": backoff_column(record.backoff_max_us, DEFAULT_BACKOFF_MAX),
    }
    columns.update({name: value for name, value in optional.items() if value is not None})
    return columns


def codec_column(codec: str) -> str | None:
    return None if codec == "json" else codec


def backoff_column(value: Micros, default: Micros) -> Micros | None:
    return None if value == default else value


def lease_token(secret: str, seq: int) -> str:
    """What a holder proves its lease with: the secret of the reserve call and the job's number.

    The number saves settling the search by id. It grants nothing: id and secret are still compared.
    """
    return f"{secret}{seq:x}"


def token_parts(token: str) -> tuple[str, int]:
    try:
        seq = int(token[SECRET_LENGTH:], 16)
    except ValueError:
        seq = -1
    return token[:SECRET_LENGTH], seq if 0 <= seq <= _LONGEST else -1


def leased_job(row: tuple[Any, ...], queue: str, secret: str, worker: str) -> JobRecord:
    """From a row of `reserve`."""
    (
        _, seq, rank, run_at, job_id, type_, payload, created_at, max_attempts, fence, reserved_at, expires_at,
        key, attempts, stalls, max_stalls, codec, headers, timeout, flags, idempotency_key, backoff_min, backoff_max,
        last_error, failed_at,
    ) = row  # fmt: skip
    job = JobRecord(
        id=job_id,
        type=type_,
        queue=queue,
        payload=payload,
        priority=-rank,
        run_at_us=run_at,
        created_at_us=created_at,
        key=key,
        idempotency_key=idempotency_key,
        max_attempts=max_attempts,
        state=JobState.INFLIGHT,
        attempts=attempts,
        stalls=stalls,
        fence=fence,
        last_error=last_error,
        failed_at_us=failed_at,
        token=f"{secret}{seq:x}",
        worker=worker,
        expires_at_us=expires_at,
        reserved_at_us=reserved_at,
    )
    if (
        codec is not None
        or headers is not None
        or timeout is not None
        or max_stalls is not None
        or flags is not None
        or backoff_min is not None
        or backoff_max is not None
    ):
        _apply_optional(job, codec, headers, timeout, max_stalls, flags, backoff_min, backoff_max)
    return job


def _apply_optional(
    job: JobRecord,
    codec: str | None,
    headers: str | None,
    timeout: Micros | None,
    max_stalls: int | None,
    flags: int | None,
    backoff_min: Micros | None,
    backoff_max: Micros | None,
) -> None:
    if codec is not None:
        job.codec = codec
    if headers is not None:
        job.headers = _decode_headers(headers)
    if timeout is not None:
        job.timeout_us = timeout
    if max_stalls is not None:
        job.max_stalls = max_stalls
    if flags is not None:
        job.update = _FLAGS[flags]
    if backoff_min is not None:
        job.backoff_min_us = backoff_min
    if backoff_max is not None:
        job.backoff_max_us = backoff_max


def record_from_row(row: tuple[Any, ...], now: Micros) -> JobRecord:
    """From the columns of `inspect.sql`."""
    (
        seq, queue, job_id, type_, payload, rank, run_at, created_at, key, idempotency_key, max_attempts, max_stalls, state,
        attempts, stalls, fence, last_error, failed_at, finished_at, result, progress, cancel_requested, merged_into,
        token, worker, expires_at, reserved_at, codec, headers, timeout, flags, backoff_min, backoff_max,
    ) = row  # fmt: skip
    if state <= READY:
        state = SCHEDULED if run_at > now else READY
    job = JobRecord(
        id=job_id,
        type=type_,
        queue=queue,
        payload=payload,
        priority=-rank,
        run_at_us=run_at,
        created_at_us=created_at,
        key=key,
        idempotency_key=idempotency_key,
        max_attempts=max_attempts,
        state=STATES[state],
        attempts=attempts,
        stalls=stalls,
        fence=fence,
        last_error=last_error,
        failed_at_us=failed_at,
        finished_at_us=finished_at,
        result=result,
        progress=progress,
        cancel_requested=cancel_requested,
        merged_into=merged_into,
        token=None if token is None else lease_token(token, seq),
        worker=worker,
        expires_at_us=expires_at,
        reserved_at_us=reserved_at,
    )
    _apply_optional(job, codec, headers, timeout, max_stalls, flags, backoff_min, backoff_max)
    return job


def attempt_from_row(row: tuple[Any, ...]) -> Attempt:
    """From the columns of `log.sql`."""
    return Attempt(
        seq=row[0],
        job_id=row[2],
        queue=row[3],
        type=row[4],
        key=row[5],
        priority=-row[6],
        fence=row[7],
        worker=row[8],
        created_at_us=row[9],
        run_at_us=row[10],
        reserved_at_us=row[11],
        lease_expires_at_us=row[12],
        ended_at_us=row[13],
        outcome=OUTCOMES[row[14]],
        state=STATES[row[15]],
        error_type=row[16],
        error_message=row[17],
        payload_size=row[18],
    )
