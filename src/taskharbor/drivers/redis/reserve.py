"""Claiming jobs. A claim whose answer was lost is asked for again by its own name, so nothing it leased is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from taskharbor.drivers.redis.library import Call
from taskharbor.drivers.redis.records import FRONT, apply_body, decode_head, encode, lease_front, record_from
from taskharbor.drivers.redis.store import Store
from taskharbor.jobs import JobRecord, JobState, Micros
from taskharbor.requests import new_id, new_token

# Unbound and straight from msgspec: a third of the cost of making one field by field.
_copy: Callable[[JobRecord], JobRecord] = JobRecord.__copy__  # type: ignore[attr-defined]


class Granted(NamedTuple):
    """What all leases of one claim have in common."""

    queue: str
    worker: str
    token: str
    reserved_at: Micros
    expires_at: Micros


def leased_records(
    ids: Sequence[bytes], values: Sequence[bytes], granted: Granted, now: Micros
) -> list[JobRecord]:
    """What one claim brought, from the stored jobs as they waited. Neighbours often differ in id and payload only: what they
    have in common is read once."""
    alike: JobRecord | None = None
    last_head, last_fence, body_size = b"", 0, 0
    records: list[JobRecord] = []
    add, layout, head_at = records.append, FRONT.unpack_from, FRONT.size
    for job_id, value in zip(ids, values, strict=True):
        _, fence, _, _, _, head_size, is_plain = layout(value)
        if not is_plain:
            add(record_from(job_id.decode(), granted.queue, _under_lease(value, granted), now))
            continue
        body_at = head_at + head_size
        packed_head = value[head_at:body_at]
        if alike is None or packed_head != last_head or fence != last_fence:
            alike, body_size = _like(packed_head, fence + 1, granted)
            last_head, last_fence = packed_head, fence
        record = _copy(alike)
        record.id = job_id.decode()
        record.payload = value[body_at + body_size : -1]
        if body_size:
            apply_body(record, value[body_at : body_at + body_size])
        else:
            record.headers = {}
        add(record)
    return records


def _under_lease(value: bytes, granted: Granted) -> bytes:
    """The job as it is stored now."""
    front = lease_front(granted.worker, granted.expires_at, granted.reserved_at)
    return front + granted.token.encode() + value


def _like(packed_head: bytes, fence: int, granted: Granted) -> tuple[JobRecord, int]:
    """A plain job without id and payload, and the length of its body."""
    head = decode_head(packed_head)
    record = JobRecord(
        id="",
        type=head.type,
        queue=granted.queue,
        priority=head.priority,
        run_at_us=head.run_at,
        created_at_us=head.created_at,
        max_attempts=head.max_attempts,
        max_stalls=head.max_stalls,
        state=JobState.INFLIGHT,
        attempts=head.attempts,
        stalls=head.stalls,
        fence=fence,
        token=granted.token + granted.queue,
        worker=granted.worker,
        expires_at_us=granted.expires_at,
        reserved_at_us=granted.reserved_at,
    )
    return record, head.body_size


_FIRST = 6
"""Where jobs begin in the answer."""


class Claimed(NamedTuple):
    """What a claim brought, and what it saw."""

    jobs: list[JobRecord]
    untold: int
    """Deaths that have yet to be told of in a failure queue."""
    moves: int
    """How often the queue had moved, where the claim took all there was; else -1."""
    due: Micros | None
    """What comes due next in that case."""


class Claimer:
    """One handle's claims."""

    def __init__(self) -> None:
        self._unclear: dict[tuple[str, str], list[str]] = {}
        """Tokens of calls whose answer never came, by queue and worker: the next one asks for their jobs first."""

    def token(self, queue: str, worker: str) -> tuple[str, bool]:
        """The token to claim with, and whether a call with it may have leased jobs without anybody hearing of it."""
        unclear = self._unclear.get((queue, worker))
        return (unclear.pop(), True) if unclear else (new_token(), False)

    def is_unclear(self, queue: str, worker: str) -> bool:
        return bool(self._unclear.get((queue, worker)))

    def lose_answer(self, queue: str, worker: str, token: str) -> None:
        self._unclear.setdefault((queue, worker), []).append(token)


class Claim(NamedTuple):
    """What is asked for."""

    queue: str
    limit: int
    lease_for: Micros
    now: Micros
    worker: str
    types: Sequence[str] | None
    token: str


async def reserve(store: Store, claim: Claim, *, is_unclear: bool) -> Claimed:
    failure_id = new_id()

    def make(again: int) -> tuple[Call]:
        return (call_of(store, claim, failure_id, is_again=bool(again) or is_unclear),)

    (answer,) = await store.client.run(make)
    return claimed(answer, claim)


def call_of(
    store: Store, claim: Claim, failure_id: str, *, is_again: bool = False, sent_at: Micros | None = None
) -> Call:
    """`sent_at`: the server's time when the caller's is `now`, for a call that is sent ahead and run later."""
    return store.call(
        "reserve",
        claim.queue,
        claim.now,
        claim.lease_for,
        claim.limit,
        claim.worker,
        claim.token,
        1 if is_again else 0,
        failure_id,
        b"" if claim.types is None else encode(list(dict.fromkeys(claim.types))),
        "" if sent_at is None else sent_at,
    )


def claimed(answer: Sequence[Any], claim: Claim) -> Claimed:
    untold, moves, due, now, reserved_at, expires_at = answer[:_FIRST]
    granted = Granted(claim.queue, claim.worker, claim.token, reserved_at, expires_at)
    jobs = leased_records(answer[_FIRST::2], answer[_FIRST + 1 :: 2], granted, now)
    return Claimed(jobs, untold, moves, None if due < 0 else due)
