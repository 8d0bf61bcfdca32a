"""The stored job, from a record and back, by the layout in `lua/layout.lua`."""

from __future__ import annotations

from struct import Struct as Layout
from typing import Any, Final, NamedTuple

import msgspec

from taskharbor.drivers.redis.library import LAYOUT, layout
from taskharbor.jobs import (
    DEFAULT_BACKOFF_MAX,
    DEFAULT_BACKOFF_MIN,
    MAX_PRIORITY,
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
FRONT = layout("FRONT_AND_BASE")
_SEQ_AT = layout("FRONT").size
_BEHIND_SEQ = Layout(f">{FRONT.format[-2:]}")
LEASE = layout("LEASE")
_PLACE = Layout(">HQ")
_GRAINS = [bytes([number]) for number in range(256)]


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


# -- in ---------------------------------------------------------------------------------------------------


def head_and_rest(record: JobRecord) -> tuple[list[Any], bytes]:
    """A record as it is before anything happened to it: its head, and its body with the payload behind."""
    body = b""
    if record.codec != "json" or record.headers or record.timeout_us:
        body = encode((record.codec, record.headers, record.timeout_us))
    payload = record.payload
    key = record.key
    more: More | bool = False
    if (
        key is not None
        or record.idempotency_key is not None
        or record.backoff_min_us != DEFAULT_BACKOFF_MIN
        or record.backoff_max_us != DEFAULT_BACKOFF_MAX
    ):
        made = More(
            flags=None if record.update is None else _FLAG_NUMBERS[record.update],
            idempotency_key=record.idempotency_key,
            backoff_min=record.backoff_min_us,
            backoff_max=record.backoff_max_us,
        )
        # An empty map would come back from Lua as an array.
        more = False if made == _NO_MORE else made
    head = [
        record.run_at_us, record.priority, 0, 0, record.max_attempts, record.max_stalls, record.created_at_us, record.type,
        False if key is None else key, len(body), len(payload), more,
    ]  # fmt: skip
    return head, body + payload if body else payload


_NO_MORE = More()


def stored_tail(record: JobRecord) -> bytes:
    """A new job as it is stored, behind its number."""
    head, rest = head_and_rest(record)
    packed = encode(head)
    is_plain = head[-1] is False and record.key is None
    return _BEHIND_SEQ.pack(len(packed), is_plain) + packed + rest + _GRAINS[hash(record.id) & 255]


def place_in_line(record: JobRecord) -> bytes:
    """Its member of `ready` up to run_at."""
    name = record.type.encode()
    return (
        len(name).to_bytes(2) + name + _PLACE.pack(MAX_PRIORITY - record.priority, max(record.run_at_us, 0))
    )


# -- out --------------------------------------------------------------------------------------------------


class Fronts(NamedTuple):
    """A stored job up to its head."""

    state: int
    fence: int
    finished_at: Micros
    worker: str | None
    expires_at: Micros | None
    reserved_at: Micros | None
    token: str | None
    head: Head
    end: int
    """Where what follows begins."""


class LeaseFront(NamedTuple):
    """What stands in front of a job that is inflight, but for the token."""

    worker: str | None
    expires_at: Micros | None
    reserved_at: Micros | None
    end: int


NO_LEASE = LeaseFront(None, None, None, 0)


def lease_front(worker: str, expires_at: Micros, reserved_at: Micros) -> bytes:
    name = worker.encode()
    return LEASE.pack(INFLIGHT, expires_at, reserved_at, len(name)) + name


def read_lease(value: bytes, at: int = 0) -> LeaseFront:
    _, expires_at, reserved_at, worker_size = LEASE.unpack_from(value, at)
    worker_at = at + LEASE.size
    end = worker_at + worker_size
    return LeaseFront(value[worker_at:end].decode(), expires_at, reserved_at, end)


def read_fronts(value: bytes) -> Fronts:
    lease, token, at = NO_LEASE, None, 0
    is_leased = value[0] == INFLIGHT
    if is_leased:
        lease = read_lease(value)
        at = lease.end + NONCE_LENGTH
        token = value[lease.end : at].decode()
    state, fence, _, finished_at, _, head_size, _ = FRONT.unpack_from(value, at)
    if is_leased:
        # Behind the lease they are as the claim found them.
        state, fence = INFLIGHT, fence + 1
    head_at = at + FRONT.size
    end = head_at + head_size
    head = decode_head(value[head_at:end])
    return Fronts(
        state, fence, finished_at, lease.worker, lease.expires_at, lease.reserved_at, token, head, end
    )


def seq_of(value: bytes) -> int:
    at = read_lease(value).end + NONCE_LENGTH if value[0] == INFLIGHT else 0
    return int.from_bytes(value[at + _SEQ_AT : at + _SEQ_AT + 8])


def record_from(job_id: str, queue: str, value: bytes, now: Micros) -> JobRecord:
    state, fence, finished_at, worker, expires_at, reserved_at, token, head, end = read_fronts(value)
    if token is not None:
        # The queue saves settling the search by id; it grants nothing.
        token += queue
    if state == READY and head.run_at > now:
        state = SCHEDULED
    payload_at = end + head.body_size
    record = JobRecord(
        id=job_id,
        type=head.type,
        queue=queue,
        payload=value[payload_at : payload_at + head.payload_size],
        priority=head.priority,
        run_at_us=head.run_at,
        created_at_us=head.created_at,
        key=None if head.key is False else head.key,  # type: ignore[arg-type]  # a text, or False
        max_attempts=head.max_attempts,
        max_stalls=head.max_stalls,
        state=STATES[state],
        attempts=head.attempts,
        stalls=head.stalls,
        fence=fence,
        finished_at_us=finished_at or None,
        token=token,
        worker=worker,
        expires_at_us=expires_at,
        reserved_at_us=reserved_at,
    )
    if head.body_size:
        apply_body(record, value[end:payload_at])
    if head.more is not False:
        _apply_more(record, head.more, value[payload_at + head.payload_size : -1])  # type: ignore[arg-type]
    return record


def apply_body(record: JobRecord, packed: bytes) -> None:
    body = _decode_body(packed)
    record.codec, record.headers, record.timeout_us = body.codec, body.headers, body.timeout


def _apply_more(record: JobRecord, more: More, tail: bytes) -> None:
    record.last_error = more.last_error
    record.failed_at_us = more.failed_at
    record.update = None if more.flags is None else _FLAGS[more.flags]
    record.cancel_requested = more.cancel_requested
    record.merged_into = more.merged_into
    record.idempotency_key = more.idempotency_key
    record.backoff_min_us, record.backoff_max_us = more.backoff_min, more.backoff_max
    if more.has_progress:
        record.progress = tail
    if more.has_result:
        record.result = tail
