"""Stored jobs as records, by the layout in `lua/layout.lua`. The structs here use the record's names for their fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from taskharbor.drivers.records import STATES, not_a_cursor
from taskharbor.drivers.redis.library import LAYOUT, layout
from taskharbor.jobs import DEFAULT_BACKOFF_MAX, DEFAULT_BACKOFF_MIN, JobRecord, Micros, UpdateFlags

END: Final = 2**53
"""A number above the number of every job and of every row of the log."""
SCHEDULED, READY, INFLIGHT = LAYOUT["SCHEDULED"], LAYOUT["READY"], LAYOUT["INFLIGHT"]
NONCE_LENGTH: Final[int] = LAYOUT["TOKEN_SIZE"]
FRONT = layout("FRONT")
_LEASE = layout("LEASE")
_SEQ_SIZE: Final[int] = LAYOUT["SEQ_SIZE"]


def constant(field: str) -> str:
    """Return the name of a field in `lua/layout.lua`."""
    return field.removesuffix("_us").upper()


class More(msgspec.Struct, omit_defaults=True, gc=False, rename=lambda name: LAYOUT[constant(name)]):
    """Fields that few jobs have. `progress` and `result` only tell if there is one."""

    last_error: str | None = None
    failed_at_us: Micros | None = None
    update: UpdateFlags | None = None
    cancel_requested: bool = False
    merged_into: str | None = None
    progress: bool = False
    result: bool = False
    idempotency_key: str | None = None
    backoff_min_us: Micros = DEFAULT_BACKOFF_MIN
    backoff_max_us: Micros = DEFAULT_BACKOFF_MAX


class Head(msgspec.Struct, array_like=True, gc=False):
    """Fields that transitions read and seldom change."""

    run_at_us: Micros
    priority: int
    attempts: int
    stalls: int
    max_attempts: int
    max_stalls: int
    created_at_us: Micros
    type: str
    key: str | bool
    body_size: int
    payload_size: int
    more: More | bool


encode = msgspec.msgpack.Encoder().encode
decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_body = msgspec.msgpack.Decoder(tuple[str, dict[str, str], Micros]).decode
# Unbound and straight from msgspec: a third of the cost of making one field by field.
_copy: Callable[[JobRecord], JobRecord] = JobRecord.__copy__  # type: ignore[attr-defined]


def read_pair(cursor: str, separator: str) -> tuple[int, int]:
    """Parse a cursor that consists of two numbers."""
    one, _, other = cursor.partition(separator)
    if not (one.isdecimal() and other.isdecimal() and len(cursor) < 40):
        raise not_a_cursor(cursor)
    return int(one), int(other)


class LeaseFront(NamedTuple):
    """The fields in front of an inflight job, without the token."""

    worker: str | None
    expires_at: Micros | None
    reserved_at: Micros | None
    end: int = 0


NO_LEASE = LeaseFront(None, None, None)


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
    # The token names the queue, so that a settlement needs no search by id. The name proves nothing.
    return _record(job_id, queue, value, at, now, lease, value[lease.end : at].decode() + queue)


def _record(
    job_id: str, queue: str, value: bytes, at: int, now: Micros, lease: LeaseFront, token: str | None
) -> JobRecord:
    """Read a stored job whose front is at `at`."""
    state, fence, _, finished_at, head_size, _ = FRONT.unpack_from(value, at)
    body_at = at + FRONT.size + head_size
    head = decode_head(value[at + FRONT.size : body_at])
    payload_at = body_at + head.body_size
    tail_at = payload_at + head.payload_size
    if token is not None:
        # Behind the lease, state and fence are those from before the claim.
        state, fence = INFLIGHT, fence + 1
    elif state == READY and head.run_at_us > now:
        state = SCHEDULED
    fields = msgspec.structs.asdict(head)
    more, _, _ = (fields.pop(name) for name in ("more", "body_size", "payload_size"))
    if head.body_size:
        fields["codec"], fields["headers"], fields["timeout_us"] = _decode_body(value[body_at:payload_at])
    if more:
        fields |= msgspec.structs.asdict(more)
        tail = value[tail_at:-_SEQ_SIZE]
        fields |= {"progress": tail if more.progress else None, "result": tail if more.result else None}
    fields |= {
        "id": job_id,
        "queue": queue,
        "payload": value[payload_at:tail_at],
        "key": head.key or None,
        "state": STATES[state],
        "fence": fence,
        "finished_at_us": finished_at or None,
        "token": token,
        "worker": lease.worker,
        "expires_at_us": lease.expires_at,
        "reserved_at_us": lease.reserved_at,
    }
    return JobRecord(**fields)


def leased_records(
    ids: Sequence[bytes], values: Sequence[bytes], queue: str, token: str, lease: LeaseFront
) -> list[JobRecord]:
    """Return the jobs of one claim, from their stored form while they waited."""
    named_token = token + queue
    records: list[JobRecord] = []
    last: JobRecord | None = None
    before_payload = b""
    for job_id, value in zip(ids, values, strict=True):
        # Neighbours often differ in id and payload only. The common part is read once.
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
