"""Ending and extending leases, hundreds in one round trip."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, assert_never

from taskharbor.drivers.contract import Ack, Discard, Extension, Fail, Release, Retry, Settlement
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import in_base64, int_array, text_array, to_json, token_parts
from taskharbor.drivers.postgres.statements import call
from taskharbor.errors import JobError, JobNotFound, JobNotInflight, LeaseExpired, LeaseMismatch
from taskharbor.jobs import Failure, Lease, Micros

_BUSY = 5
_ERRORS: dict[int, type[JobError]] = {1: JobNotFound, 2: JobNotInflight, 3: LeaseMismatch, 4: LeaseExpired}


async def settle(session: Session, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
    times = Counter([one.job_id for one in settlements])
    has_duplicates = len(times) < len(settlements)
    others = {
        n: _other(one) | ({"is_duplicate": True} if times[one.job_id] > 1 else {})
        for n, one in enumerate(settlements, start=1)
        if type(one) is not Ack or one.result is not None or has_duplicates
    }
    answers: list[int] | None = await session.call(
        "settle",
        *_leases(settlements),
        to_json(others) if others else None,
        now,
        session.stir,
        session.is_repeated,
    )
    if answers is None:
        return [None] * len(settlements)
    return [
        None if code == 0 else _ERRORS[code](one.job_id)
        for one, code in zip(settlements, answers, strict=True)
    ]


def _leases(items: Sequence[Settlement] | Sequence[Extension]) -> tuple[str, str, str]:
    parts = [token_parts(one.token) for one in items]
    return (
        int_array([seq for _, seq in parts]),
        text_array([one.job_id for one in items]),
        text_array([secret for secret, _ in parts]),
    )


def _other(settlement: Settlement) -> dict[str, Any]:
    """What the server needs to know of a settlement that is not a plain ack."""
    match settlement:
        case Ack(result=result):
            return {"kind": 0} | ({} if result is None else {"result": in_base64(result)})
        case Retry(run_at_us=run_at, attempts=attempts, error=error):
            return {"kind": 1, "run_at": run_at, "attempts": attempts, **_error(error)}
        case Fail(attempts=attempts, error=error):
            return {"kind": 2, "attempts": attempts, **_error(error)}
        case Release(run_at_us=run_at_or_none):
            return {"kind": 3, "run_at": run_at_or_none}
        case Discard(reason=reason):
            return {"kind": 4, **({} if reason is None else _error(reason))}
        case _:
            assert_never(settlement)


def _error(error: Failure) -> dict[str, Any]:
    return {"type": error.type, "message": error.message, "error": error.text}


async def extend_lease(
    session: Session, extensions: Sequence[Extension], lease_for: Micros, now: Micros
) -> list[Lease | JobError]:
    answers: dict[int, Lease | JobError] = {}
    left = list(range(len(extensions)))
    pause = 0.001
    while True:
        some = [extensions[n] for n in left]
        progress = {
            n: in_base64(one.progress) for n, one in enumerate(some, start=1) if one.progress is not None
        }
        values = [*_leases(some), to_json(progress) if progress else None, lease_for, now]
        rows = await session.rows(call("extend_lease", session.schema, len(values)), values)
        for n, code, expires_at, cancel_requested in rows:
            one = some[n - 1]
            if code == 0:
                answers[left[n - 1]] = Lease(one.job_id, one.token, expires_at, cancel_requested)
            elif code != _BUSY:
                answers[left[n - 1]] = _ERRORS[code](one.job_id)
        left = [n for n in left if n not in answers]
        if not left:
            return [answers[n] for n in range(len(extensions))]
        # Somebody is ending, cancelling or updating these at this moment.
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.05)
