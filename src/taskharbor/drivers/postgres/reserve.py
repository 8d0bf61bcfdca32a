"""Claiming jobs, and what a claimer remembers between two claims.

The memory is a hint that the server wrote and the server alone reads (see `functions/claim.sql`). It keeps claims flat while
somebody else holds an old snapshot open: it says where the living jobs begin. It is never a source of truth; the server checks
that it still holds.
"""

from __future__ import annotations

from taskharbor.drivers.operations import Reserve
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import leased_job, text_array
from taskharbor.drivers.postgres.statements import load
from taskharbor.jobs import JobRecord
from taskharbor.requests import new_token

_HINTS = 100


class Claimer:
    """One handle's claims."""

    def __init__(self) -> None:
        self._hints: dict[tuple[str, tuple[str, ...] | None], str] = {}
        """By queue and types: where the living begin depends on both."""
        self._unclear: dict[tuple[str, str], list[tuple[str, int]]] = {}
        """Secrets of calls whose answer never came and how often they were tried, by queue and worker: the next one asks for
        their jobs first."""
        self.emptied: dict[str, str] = {}
        """Per queue, the hint of a claim that found less than it asked for: nothing older is left to be woken for."""

    async def reserve(self, session: Session, call: Reserve, secret: str, tries: int) -> list[JobRecord]:
        queue, types = call.queue, call.types
        wanted = None if types is None else text_array(list(dict.fromkeys(types)))
        place = (queue, None if types is None else tuple(types))
        if len(self._hints) >= _HINTS:
            self._hints.clear()
        hint = self._hints.pop(place, None)
        rows = await session.rows(
            load("inspect", session.schema)["claim"],
            [
                queue,
                wanted,
                call.limit,
                call.lease_for,
                call.now,
                call.worker,
                secret,
                tries + session.is_repeated,
                session.stir,
                hint,
            ],
        )
        if rows and rows[-1][0] is None:
            hint = self._hints[place] = rows.pop()[1]
            if types is None and len(rows) < call.limit:
                self.emptied[queue] = hint
        # By priority, run_at and number: they come as they lie in the table.
        rows.sort(key=lambda row: (-row[4], row[5], row[0]))
        return [leased_job(row, queue, secret, call.worker) for row in rows]

    def secret(self, queue: str, worker: str) -> tuple[str, int]:
        """The secret to claim with, and how often a call with it may have leased jobs without anybody hearing of it."""
        unclear = self._unclear.get((queue, worker))
        return unclear.pop() if unclear else (new_token(), 0)

    def lose_answer(self, queue: str, worker: str, secret: str, tries: int) -> None:
        """An outage: what comes back may be another server, with other transaction numbers."""
        self._unclear.setdefault((queue, worker), []).append((secret, tries))
        self._hints.clear()
        self.emptied.clear()
