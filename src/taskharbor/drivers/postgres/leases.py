"""Leases: claims jobs, ends and extends leases, hundreds in one round trip.

A claimer keeps a hint between two claims. Only the server writes and reads it (see `functions/claim.sql`). The hint says where
the waiting jobs begin, so claims stay flat while another transaction holds an old snapshot open. The server checks that the hint
still holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from taskharbor.drivers.contract import Ack, Extension, Settlement
from taskharbor.drivers.operations import Reserve
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import (
    are_headers,
    escaped_texts,
    int_array,
    leased_job,
    text_array,
    to_json,
    token_parts,
)
from taskharbor.errors import JobError, JobNotFound, JobNotInflight, LeaseExpired, LeaseMismatch
from taskharbor.jobs import JobRecord, Lease, Micros
from taskharbor.requests import new_token

log = logging.getLogger("taskharbor.drivers")

_HINTS = 100
_BUSY = 5
_ERRORS: dict[int, type[JobError]] = {1: JobNotFound, 2: JobNotInflight, 3: LeaseMismatch, 4: LeaseExpired}


class Claimer:
    """One handle's claims."""

    def __init__(self) -> None:
        self._hints: dict[tuple[str, tuple[str, ...] | None], str] = {}
        """Hints by queue and types. The place of the first waiting jobs depends on both."""
        self._unclear: dict[tuple[str, str], list[tuple[str, int]]] = {}
        """Secrets of calls whose answer never came, with the number of tries, by queue and worker. The next claim asks for their
        jobs first."""
        self.emptied: dict[str, str] = {}
        """The hint of a claim that found less than it asked for, by queue. Older changes need not wake anybody."""

    async def reserve(self, session: Session, call: Reserve, secret: str, tries: int) -> list[JobRecord]:
        queue, types = call.queue, call.types
        wanted = None if types is None else text_array(list(dict.fromkeys(types)))
        place = (queue, None if types is None else tuple(types))
        if len(self._hints) >= _HINTS:
            self._hints.clear()
        hint = self._hints.pop(place, None)
        bounds = (call.limit, call.lease_for, call.now, call.worker)
        tried = tries + session.is_repeated
        rows = await session.named(
            "inspect", "claim", queue, wanted, *bounds, secret, tried, session.stir, hint
        )
        if rows and rows[-1][0] is None:
            hint = self._hints[place] = rows.pop()[1]
            if types is None and len(rows) < call.limit:
                self.emptied[queue] = hint
        # By priority, run_at and number. They come in the order of the table.
        rows.sort(key=lambda row: (-row[4], row[5], row[0]))
        try:
            return [leased_job(row, queue, secret, call.worker) for row in rows]
        except (ValueError, LookupError):
            damaged = await set_aside(session, call.now)
        return [leased_job(row, queue, secret, call.worker) for row in rows if row[1] not in damaged]

    def secret(self, queue: str, worker: str) -> tuple[str, int]:
        """Return the secret to claim with, and the number of calls with it that may have leased jobs without an answer."""
        unclear = self._unclear.get((queue, worker))
        return unclear.pop() if unclear else (new_token(), 0)

    def lose_answer(self, queue: str, worker: str, secret: str, tries: int) -> None:
        """Note a claim without an answer. After an outage the server may be another one, with other transaction numbers."""
        self._unclear.setdefault((queue, worker), []).append((secret, tries))
        self._hints.clear()
        self.emptied.clear()


async def set_aside(session: Session, now: Micros, *, ended_too: bool = False) -> dict[str, str]:
    """Mend jobs that no call can load. Those that have not ended are dead then. Returns what was found, by id."""
    found: dict[str, str] = {}
    for job_id, queue, headers, is_wrong in await session.named("inspect", "suspect", ended_too):
        if is_wrong or not are_headers(headers):
            found[job_id] = (
                f"job {job_id[:200]!r} of queue {queue!r} has damaged values: it is dead, or was mended"
            )
            log.error("%s", found[job_id])
    if found:
        await session.call("set_aside", escaped_texts(found), now, session.stir)
    return found


async def settle(session: Session, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
    others: dict[int | str, Any] = {
        n: one for n, one in enumerate(settlements, start=1) if type(one) is not Ack or one.result is not None
    }
    if len({one.job_id for one in settlements}) < len(settlements):
        others["in_order"] = True
    given = to_json(others) if others else None
    answers: list[int] | None = await session.call(
        "settle", *_leases(settlements), given, now, session.stir, session.is_repeated
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


async def extend_lease(
    session: Session, extensions: Sequence[Extension], lease_for: Micros, now: Micros
) -> list[Lease | JobError]:
    answers: dict[int, Lease | JobError] = {}
    left = list(range(len(extensions)))
    pause = 0.001
    while True:
        some = [extensions[n] for n in left]
        progress = {n: one.progress for n, one in enumerate(some, start=1) if one.progress is not None}
        given = to_json(progress) if progress else None
        rows = await session.named("inspect", "extend_lease", *_leases(some), given, lease_for, now)
        for n, code, expires_at, cancel_requested in rows:
            one = some[n - 1]
            if code == 0:
                answers[left[n - 1]] = Lease(one.job_id, one.token, expires_at, cancel_requested)
            elif code != _BUSY:
                answers[left[n - 1]] = _ERRORS[code](one.job_id)
        left = [n for n in left if n not in answers]
        if not left:
            return [answers[n] for n in range(len(extensions))]
        # Another call is ending, cancelling or updating these at this moment.
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.05)
