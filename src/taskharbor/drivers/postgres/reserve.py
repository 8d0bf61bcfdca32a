"""Claiming jobs, and what a claimer remembers between two claims.

The memory (see `0005_reserve.sql`) is what keeps claims flat while somebody else holds an old snapshot open: it says where
the living jobs begin. It is never a source of truth; the server checks that it still holds.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from taskharbor.drivers.operations import Reserve
from taskharbor.drivers.postgres import arrays
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.prepared import Row
from taskharbor.drivers.postgres.rows import leased_job
from taskharbor.drivers.postgres.statements import load
from taskharbor.jobs import JobRecord
from taskharbor.requests import new_token

_claim_order = itemgetter(2, 3, 1)
"""rank, run_at, seq: rows come as they lie in the table."""


class Hint:
    """Where the living begin, and the snapshot in which that was true, as the server wrote it down."""

    def __init__(self, said: str, uses: int) -> None:
        self.values = [text or None for text in said.split("/")[:_PARTS]]
        self.uses = uses
        """Claims since the server last looked where the living begin."""

    @property
    def seen(self) -> str:
        snapshot = self.values[1]
        assert snapshot is not None
        return snapshot


_PARTS = 7
_USES = 16
"""Short claims that one look serves: to find out where the living begin costs as much as the rest of such a claim."""
_HINTS = 100
_NO_HINT = [*[None] * _PARTS, True]


class Claimer:
    """One handle's claims."""

    def __init__(self, schema: str) -> None:
        self._statement = load("work", schema)["reserve"]
        self._hints: dict[tuple[str, tuple[str, ...] | None], Hint] = {}
        """By queue and types: where the living begin depends on both."""
        self._unclear: dict[tuple[str, str], list[tuple[str, int]]] = {}
        """Secrets of calls whose answer never came and how often they were tried, by queue and worker: the next one asks for
        their jobs first."""
        self.emptied: dict[str, str] = {}
        """Per queue, the snapshot of a claim that found less than it asked for: nothing older is left to be woken for."""

    async def reserve(
        self, session: Session, call: Reserve, stir: int, secret: str, number: int
    ) -> list[JobRecord]:
        queue, limit, types, worker = call.queue, call.limit, call.types, call.worker
        wanted = None if types is None else arrays.text_array(list(dict.fromkeys(types)))
        place = (queue, None if types is None else tuple(types))
        if len(self._hints) >= _HINTS:
            self._hints.clear()
        hint = self._hints.pop(place, None)
        known = _NO_HINT if hint is None else [*hint.values, hint.uses >= _USES]
        values: list[Any] = [
            queue, wanted, limit, call.lease_for, call.now, worker, secret, number, stir, *known
        ]  # fmt: skip
        rows: list[Row] = await session.rows(self._statement, values)
        if rows and rows[-1][0] is not None:
            said = rows.pop()[0]
            # A trailing stroke says that the server has looked.
            uses = 0 if hint is None or said.endswith("/") else hint.uses + 1
            hint = self._hints[place] = Hint(said, uses)
            if types is None and len(rows) < limit:
                self.emptied[queue] = hint.seen
        rows.sort(key=_claim_order)
        return [leased_job(row, queue, secret, worker) for row in rows]

    def secret(self, queue: str, worker: str) -> tuple[str, int]:
        """The secret to claim with, and how often a call with it may have leased jobs without anybody hearing of it."""
        unclear = self._unclear.get((queue, worker))
        return unclear.pop() if unclear else (new_token(), 0)

    def lose_answer(self, queue: str, worker: str, secret: str, tries: int) -> None:
        """An outage: what comes back may be another server, with other transaction numbers."""
        self._unclear.setdefault((queue, worker), []).append((secret, tries))
        self._hints.clear()
        self.emptied.clear()
