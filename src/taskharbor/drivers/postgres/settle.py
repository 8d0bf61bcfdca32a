"""Ending and extending leases, hundreds in one round trip."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeVar, assert_never

from taskharbor.drivers.contract import Ack, Discard, Extension, Fail, Release, Retry, Settlement
from taskharbor.drivers.postgres import arrays
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import in_base64, to_json, token_parts
from taskharbor.drivers.postgres.statements import load
from taskharbor.errors import JobError, JobNotFound, JobNotInflight, LeaseExpired, LeaseMismatch
from taskharbor.jobs import Failure, Lease, Micros

T = TypeVar("T")

_BUSY = 5
_ERRORS: dict[int, type[JobError]] = {1: JobNotFound, 2: JobNotInflight, 3: LeaseMismatch, 4: LeaseExpired}


async def settle(
    session: Session, schema: str, settlements: Sequence[Settlement], now: Micros, stir: int, again: bool
) -> list[JobError | None]:
    order = _lock_order(settlements)
    if order is not None:
        sorted_answers = await settle(session, schema, [settlements[n] for n in order], now, stir, again)
        return _put_back(order, sorted_answers)
    times = Counter([one.job_id for one in settlements])
    is_each_once = len(times) == len(settlements)
    others = {
        n: _other(one) | ({} if times[one.job_id] == 1 else {"again": True})
        for n, one in enumerate(settlements, start=1)
        if type(one) is not Ack or one.result is not None or not is_each_once
    }
    values = [*_leases(settlements), to_json(others) if others else None, now, stir, again]
    answers: list[int] | None = await session.value(load("work", schema)["settle"], values)
    if answers is None:
        return [None] * len(settlements)
    return [
        None if code == 0 else _ERRORS[code](one.job_id)
        for one, code in zip(settlements, answers, strict=True)
    ]


def _lock_order(items: Sequence[Settlement]) -> list[int] | None:
    """The places of the items by the numbers of their jobs; None where they are in that order already.

    Whoever locks several jobs does it in this order, so that no two calls wait for each other. A job that is there twice
    keeps the order it was given in.
    """
    if len({one.job_id for one in items}) < len(items):
        return None
    seqs = [token_parts(one.token)[1] for one in items]
    order = sorted(range(len(seqs)), key=seqs.__getitem__)
    return None if order == list(range(len(seqs))) else order


def _put_back(order: Sequence[int], answers: Sequence[T]) -> list[T]:
    return [answer for _, answer in sorted(zip(order, answers, strict=True), key=itemgetter(0))]


def _leases(items: Sequence[Settlement] | Sequence[Extension]) -> tuple[str, str, str]:
    parts = [token_parts(one.token) for one in items]
    return (
        arrays.int_array([seq for _, seq in parts]),
        arrays.text_array([one.job_id for one in items]),
        arrays.text_array([secret for secret, _ in parts]),
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
    session: Session, schema: str, extensions: Sequence[Extension], lease_for: Micros, now: Micros
) -> list[Lease | JobError]:
    answers = await _extend_once(session, schema, extensions, lease_for, now)
    pause = 0.001
    while busy := [n for n, answer in enumerate(answers) if answer is None]:
        # Somebody is ending, cancelling or updating these at this moment.
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.05)
        again = await _extend_once(session, schema, [extensions[n] for n in busy], lease_for, now)
        for n, answer in zip(busy, again, strict=True):
            answers[n] = answer
    return [answer for answer in answers if answer is not None]


async def _extend_once(
    session: Session, schema: str, extensions: Sequence[Extension], lease_for: Micros, now: Micros
) -> list[Lease | JobError | None]:
    """None for a job that another call is changing at that very moment."""
    progress = {
        str(n): in_base64(one.progress)
        for n, one in enumerate(extensions, start=1)
        if one.progress is not None
    }
    values = [*_leases(extensions), to_json(progress) if progress else None, lease_for, now]
    rows = await session.rows(load("work", schema)["extend"], values)
    return [
        Lease(one.job_id, one.token, expires_at, cancel_requested)
        if code == 0
        else None
        if code == _BUSY
        else _ERRORS[code](one.job_id)
        for one, (_, code, expires_at, cancel_requested) in zip(extensions, rows, strict=True)
    ]
