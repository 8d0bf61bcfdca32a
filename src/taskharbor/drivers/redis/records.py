"""The stored job, from a record and back, by the layout in `lua/layout.lua`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct as Layout
from typing import Final, NamedTuple

import msgspec

from taskharbor.drivers.redis.library import LAYOUT, Word, layout
from taskharbor.jobs import (
    DEFAULT_BACKOFF_MAX,
    DEFAULT_BACKOFF_MIN,
    JobRecord,
    JobState,
    Micros,
    UpdateFlags,
    UpdateRunAt,
)

STATES: Final = tuple(JobState)
SCHEDULED, READY, INFLIGHT = LAYOUT["SCHEDULED"], LAYOUT["READY"], LAYOUT["INFLIGHT"]
NONCE_LENGTH: Final[int] = LAYOUT["TOKEN_SIZE"]

_RUN_AT: tuple[UpdateRunAt, ...] = ("no", "yes", "later", "earlier")
_FLAGS = [
    UpdateFlags(bool(number & 1), _RUN_AT[number >> 3], bool(number & 2), bool(number & 4))
    for number in range(32)
]
_FLAG_NUMBERS = {flags: number for number, flags in enumerate(_FLAGS)}
_FRONT = layout("FRONT")
_LEASE = layout("LEASE")
_PLACE = Layout(">HQ")
"""The client's part of PLACE."""
_SEQ_SIZE: Final[int] = LAYOUT["SEQ_SIZE"]
_LOWEST_PRIORITY: Final[int] = LAYOUT["LOWEST_PRIORITY"]


class More(msgspec.Struct, omit_defaults=True, gc=False, rename=lambda name: LAYOUT[name.upper()]):
    """Fields that few jobs have."""

    last_error: str | None = None
    failed_at: Micros | None = None
    flags: int | None = None
    cancel_requested: bool = False
    merged_into: str | None = None
    has_progress: bool = False
    has_result: bool = False
    idempotency_key: str | None = None
    backoff_min: Micros = DEFAULT_BACKOFF_MIN
    backoff_max: Micros = DEFAULT_BACKOFF_MAX


class Head(msgspec.Struct, array_like=True, gc=False):
    """What transitions look at and seldom change."""

    run_at: Micros
    priority: int
    attempts: int
    stalls: int
    max_attempts: int
    max_stalls: int
    created_at: Micros
    type: str
    key: str | bool
    body_size: int
    payload_size: int
    more: More | bool


class Body(msgspec.Struct, array_like=True, gc=False):
    """What only those who run the job look at, where it is not the default."""

    codec: str
    headers: dict[str, str]
    timeout: Micros


encode = msgspec.msgpack.Encoder().encode
decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_body = msgspec.msgpack.Decoder(Body).decode
_NO_MORE = More()
_DEFAULT_BACKOFF = (DEFAULT_BACKOFF_MIN, DEFAULT_BACKOFF_MAX)
# Unbound and straight from msgspec: a third of the cost of making one field by field.
_copy: Callable[[JobRecord], JobRecord] = JobRecord.__copy__  # type: ignore[attr-defined]


# -- in ---------------------------------------------------------------------------------------------------


def job_words(records: Iterable[JobRecord]) -> list[Word]:
    """New jobs as `store` in `lua/enqueue.lua` takes them."""
    words: list[Word] = []
    kind, place = None, b""
    for record in records:
        # Most batches are of one kind.
        if kind != (kind := (record.type, record.priority, record.run_at_us)):
            name = record.type.encode()
            rank = _LOWEST_PRIORITY - record.priority
            place = len(name).to_bytes(2) + name + _PLACE.pack(rank, max(record.run_at_us, 0))
        words += (record.id, place, _new_job(record))
    return words


def _new_job(record: JobRecord) -> bytes:
    """A job that nothing has happened to, as it is stored in front of its number."""
    body = b""
    if record.codec != "json" or record.headers or record.timeout_us:
        body = encode((record.codec, record.headers, record.timeout_us))
    payload, key = record.payload, record.key
    more: More | bool = False
    backoff = (record.backoff_min_us, record.backoff_max_us)
    if key is not None or record.idempotency_key is not None or backoff != _DEFAULT_BACKOFF:
        made = More(
            flags=None if record.update is None else _FLAG_NUMBERS[record.update],
            idempotency_key=record.idempotency_key,
            backoff_min=record.backoff_min_us,
            backoff_max=record.backoff_max_us,
        )
        # An empty map would come back from Lua as an array.
        more = made != _NO_MORE and made
    head = encode(
        (
            record.run_at_us, record.priority, 0, 0, record.max_attempts, record.max_stalls, record.created_at_us,
            record.type, False if key is None else key, len(body), len(payload), more,
        )
    )  # fmt: skip
    is_plain = key is None and more is False
    return b"".join((_FRONT.pack(READY, 0, 0, 0, len(head), is_plain), head, body, payload))


# -- out --------------------------------------------------------------------------------------------------


class LeaseFront(NamedTuple):
    """What stands in front of a job that is inflight, but for the token."""

    worker: str | None
    expires_at: Micros | None
    reserved_at: Micros | None
    end: int


NO_LEASE = LeaseFront(None, None, None, 0)


def read_lease(value: bytes, at: int = 0) -> LeaseFront:
    _, expires_at, reserved_at, worker_size = _LEASE.unpack_from(value, at)
    worker_at = at + _LEASE.size
    end = worker_at + worker_size
    return LeaseFront(value[worker_at:end].decode(), expires_at, reserved_at, end)


def seq_of(value: bytes) -> int:
    return int.from_bytes(value[-_SEQ_SIZE:])


def record_from(job_id: str, queue: str, value: bytes, now: Micros) -> JobRecord:
    if value[0] != INFLIGHT:
        return _record(job_id, queue, value, 0, now, NO_LEASE, None)
    lease = read_lease(value)
    at = lease.end + NONCE_LENGTH
    # The queue saves settling the search by id; it grants nothing.
    return _record(job_id, queue, value, at, now, lease, value[lease.end : at].decode() + queue)


def _record(
    job_id: str, queue: str, value: bytes, at: int, now: Micros, lease: LeaseFront, token: str | None
) -> JobRecord:
    """From the front on, which is at `at`."""
    state, fence, _, finished_at, head_size, _ = _FRONT.unpack_from(value, at)
    body_at = at + _FRONT.size + head_size
    head = decode_head(value[at + _FRONT.size : body_at])
    if token is not None:
        # Behind the lease they are as the claim found them.
        state, fence = INFLIGHT, fence + 1
    elif state == READY and head.run_at > now:
        state = SCHEDULED
    payload_at = body_at + head.body_size
    payload_end = payload_at + head.payload_size
    record = JobRecord(
        id=job_id,
        type=head.type,
        queue=queue,
        payload=value[payload_at:payload_end],
        priority=head.priority,
        run_at_us=head.run_at,
        created_at_us=head.created_at,
        key=head.key if isinstance(head.key, str) else None,
        max_attempts=head.max_attempts,
        max_stalls=head.max_stalls,
        state=STATES[state],
        attempts=head.attempts,
        stalls=head.stalls,
        fence=fence,
        finished_at_us=finished_at or None,
        token=token,
        worker=lease.worker,
        expires_at_us=lease.expires_at,
        reserved_at_us=lease.reserved_at,
    )
    if head.body_size:
        body = _decode_body(value[body_at:payload_at])
        record.codec, record.headers, record.timeout_us = body.codec, body.headers, body.timeout
    if isinstance(head.more, More):
        more, tail = head.more, value[payload_end:-_SEQ_SIZE]
        record.last_error, record.failed_at_us = more.last_error, more.failed_at
        record.update = None if more.flags is None else _FLAGS[more.flags]
        record.cancel_requested, record.merged_into = more.cancel_requested, more.merged_into
        record.idempotency_key = more.idempotency_key
        record.backoff_min_us, record.backoff_max_us = more.backoff_min, more.backoff_max
        record.progress = tail if more.has_progress else None
        record.result = tail if more.has_result else None
    return record


def leased_records(
    ids: Sequence[bytes],
    values: Sequence[bytes],
    queue: str,
    worker: str,
    token: str,
    reserved_at: Micros,
    expires_at: Micros,
) -> list[JobRecord]:
    """The jobs of one claim, from what was stored while they waited."""
    lease = LeaseFront(worker, expires_at, reserved_at, 0)
    named_token = token + queue
    records: list[JobRecord] = []
    last: JobRecord | None = None
    before_payload = b""
    for job_id, value in zip(ids, values, strict=True):
        # Neighbours often differ in id and payload only: what they have in common is read once.
        if last is not None and value.startswith(before_payload):
            record = _copy(last)
            record.id = job_id.decode()
            record.payload = value[len(before_payload) : -_SEQ_SIZE]
            record.headers = last.headers.copy()
        else:
            record = last = _record(job_id.decode(), queue, value, 0, 0, lease, named_token)
            before_payload = value[: -_SEQ_SIZE - len(record.payload)]
        records.append(record)
    return records
