"""Claiming jobs: reclaim what is over, promote what is due, lease the first of the line.

Each step is one or two statements over the whole batch, whatever its size. Cost depends on what is claimed, not on
what waits, is scheduled or has ended: every look is a seek into an index that holds only such jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import msgspec

from taskharbor.drivers.engine.settle import reclaim_queue
from taskharbor.drivers.engine.tables import Counts, State, Transaction, apply_spec, load, to_json
from taskharbor.jobs import JobRecord, JobState, Micros
from taskharbor.requests import new_token

_SQL = load("reserve")

PROMOTE_AT_LEAST = 1000
"""Due jobs promoted per call, if there are that many: each is promoted once, and stats counts the rest."""
RECLAIM_AT_MOST = 10_000

_FIRST_OF_ANY_TYPE, _FIRST_OF_ONE_TYPE, _CHOSEN = (
    _SQL["leased_rows"].replace("/*jobs*/", _SQL[jobs])
    for jobs in ("first_of_any_type", "first_of_one_type", "chosen")
)
OF_ONE_TYPE = {
    name: _SQL[name]
    .replace("jobs_scheduled", "jobs_scheduled_type")
    .replace("state = 0", "state = 0 AND type = :type")
    for name in ("due_priorities", "promote")
}
_Place: TypeAlias = list[int]
"""Minus the priority, run_at, seq: smaller is earlier in line."""
_decode_rows = msgspec.json.Decoder().decode
_INFLIGHT = JobState.INFLIGHT


def reserve(
    transaction: Transaction,
    queue: str,
    limit: int,
    lease_for: Micros,
    now: Micros,
    worker: str,
    types: Sequence[str] | None,
    shard: tuple[int, int] = (0, 1),
) -> list[JobRecord]:
    """`shard`: which of how many this database is. Each grants its share of the queue's bound on leases."""
    probe = transaction.execute(_SQL["probe"], (now, queue)).fetchone()
    if probe is None:
        return []
    if probe[7]:
        reclaim_queue(transaction, probe[0], now, RECLAIM_AT_MOST)
        probe = transaction.execute(_SQL["probe"], (now, queue)).fetchone()
    number, paused, max_inflight, scheduled, ready, inflight, latest_end, has_expired = probe
    wanted = None if types is None else list(dict.fromkeys(types))
    if paused or limit < 1 or wanted == []:
        return []
    if max_inflight is not None:
        if has_expired:
            (inflight,) = transaction.execute(_SQL["valid_leases"], (number, now)).fetchone()
        place, shards = shard
        share = max_inflight // shards + (place < max_inflight % shards)
        limit = min(limit, share - inflight)
        if limit < 1:
            return []
    counts = Counts(transaction)
    promoted = _promote(transaction, counts, number, limit, now, wanted) if scheduled else 0
    ready += promoted
    if not ready:
        return []
    rows, payloads, seqs = _choose_due(transaction, counts, number, ready, limit, now, wanted)
    jobs: list[JobRecord] = []
    if rows:
        secret = new_token()
        # `now` may have been read before another call ended a lease: the log must not show one beside the other.
        reserved_at = max(now, latest_end)
        expires_at = reserved_at + lease_for
        jobs = _records(transaction, rows, payloads or b"", queue, secret, worker, reserved_at, expires_at)
        transaction.execute(_SQL["lease"], (secret, worker, reserved_at, expires_at, seqs))
        counts.move(number, State.READY, State.INFLIGHT, len(jobs))
    if promoted and ready > len(jobs):
        # Nobody who begins to wait now finds the rest among the scheduled.
        counts.stir(number)
    counts.flush()
    return jobs


def _choose_due(
    transaction: Transaction,
    counts: Counts,
    number: int,
    ready: int,
    limit: int,
    now: Micros,
    types: list[str] | None,
) -> tuple[list[list[Any]], bytes | None, str]:
    """The first of the line. What is not due yet by the caller's clock is scheduled again: somebody whose clock was
    ahead made it ready. All of a priority at once, so that one such claim is enough."""
    while True:
        text, payloads, seqs = _choose(transaction, number, ready, limit, types)
        rows: list[list[Any]] = _decode_rows(text)
        early = {row[5] for row in rows if row[3] > now}
        if not early:
            return rows, payloads, seqs
        for priority in early:
            put_back = transaction.execute(_SQL["put_back"], (number, priority, now)).rowcount
            counts.move(number, State.READY, State.SCHEDULED, put_back)
        counts.stir(number)


def _choose(
    transaction: Transaction, number: int, ready: int, limit: int, types: list[str] | None
) -> tuple[str, bytes | None, str]:
    if types is None:
        row: tuple[str, bytes | None, str] = transaction.execute(
            _FIRST_OF_ANY_TYPE, (number, limit)
        ).fetchone()
    elif len(types) == 1:
        row = transaction.execute(_FIRST_OF_ONE_TYPE, (number, types[0], limit)).fetchone()
    else:
        if ready <= len(types):
            # So few that to look at all of them costs less than one seek per type.
            known = set(types)
            jobs = transaction.fetch(_SQL["ready_types"], (number,))
            seqs = [seq for seq, type_ in jobs if type_ in known][:limit]
        else:
            seqs = _first_of(transaction, number, limit, types)
        row = transaction.execute(_CHOSEN, (to_json(seqs),)).fetchone()
    return row


def _first_of(transaction: Transaction, number: int, limit: int, types: list[str]) -> list[int]:
    """The first ready jobs of several types. Each type has a line of its own: a portion of each is read, and more of those
    whose next job may come before the last one chosen."""
    if len(types) > limit:
        values = {"types": to_json(types), "queue": number, "limit": limit}
        types = transaction.fetch(_SQL["first_types"], values)
    lines: dict[str, list[_Place]] = {}
    first: list[_Place] = []
    portion = limit // max(1, len(types)) + 1
    while types:
        values = {"types": to_json(types), "queue": number, "limit": portion}
        lines.update(zip(types, transaction.fetch(_SQL["first_by_type"], values), strict=True))
        first = sorted(chain.from_iterable(lines.values()))[:limit]
        is_full = len(first) == limit
        types = [
            one
            for one in types
            if len(line := lines[one]) == portion and not (is_full and line[-1] >= first[-1])
        ]
        portion *= 4
    return [seq for _, _, seq in first]


def _promote(
    transaction: Transaction, counts: Counts, number: int, limit: int, now: Micros, types: list[str] | None
) -> int:
    """Make due scheduled jobs ready, in claim order and at least `limit` of them: so a claim takes the right ones.

    Returns how many became ready."""
    most = max(limit, PROMOTE_AT_LEAST)
    promoted = _promote_due(transaction, _SQL, {"queue": number, "now": now}, most)
    if promoted >= most and types is not None:
        values = {"types": to_json(types), "queue": number}
        for one in transaction.fetch(_SQL["scheduled_types"], values):
            due = {"queue": number, "now": now, "type": one}
            promoted += _promote_due(transaction, OF_ONE_TYPE, due, limit)
    if promoted:
        counts.move(number, State.SCHEDULED, State.READY, promoted)
    return promoted


def _promote_due(
    transaction: Transaction, statements: dict[str, str], values: dict[str, Any], most: int
) -> int:
    promoted = 0
    for priority in transaction.fetch(statements["due_priorities"], values):
        if promoted >= most:
            break
        place = values | {"priority": priority, "limit": most - promoted}
        promoted += transaction.execute(statements["promote"], place).rowcount
    return promoted


def _records(
    transaction: Transaction,
    rows: list[list[Any]],
    payloads: bytes,
    queue: str,
    secret: str,
    worker: str,
    reserved_at: Micros,
    expires_at: Micros,
) -> list[JobRecord]:
    jobs: list[JobRecord] = []
    start = 0
    for seq, job_id, type_, run_at, created_at, priority, max_attempts, fence, size, extra in rows:
        if size >= 0:
            end = start + size
            payload = payloads[start:end]
            start = end
        else:
            (payload,) = transaction.execute(_SQL["payload"], (seq,)).fetchone()
        job = JobRecord(
            id=job_id,
            type=type_,
            queue=queue,
            payload=payload,
            priority=priority,
            run_at_us=run_at,
            created_at_us=created_at,
            max_attempts=max_attempts,
            state=_INFLIGHT,
            fence=fence + 1,
            token=f"{secret}{seq:x}",
            worker=worker,
            expires_at_us=expires_at,
            reserved_at_us=reserved_at,
        )
        if extra is not None:
            job.key, job.attempts, job.stalls, job.max_stalls, job.failed_at_us, job.last_error, spec = extra
            if spec is not None:
                apply_spec(job, spec)
        jobs.append(job)
    if start != len(payloads):
        raise ValueError("the size of a stored payload is wrong")
    return jobs
