"""Claiming jobs. A claim whose answer was lost is asked for again by its own name, so nothing it leased is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskharbor.drivers.redis.leased import leased_records
from taskharbor.drivers.redis.packing import Call
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.redis.stored import encode
from taskharbor.ids import new_id, new_token
from taskharbor.jobs import JobRecord, Micros


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

    def lose_answer(self, queue: str, worker: str, token: str) -> None:
        self._unclear.setdefault((queue, worker), []).append(token)


async def reserve(
    store: Store,
    queue: str,
    limit: int,
    lease_for: Micros,
    now: Micros,
    worker: str,
    types: Sequence[str] | None,
    token: str,
    *,
    is_unclear: bool,
) -> Claimed:
    wanted = b"" if types is None else encode(list(dict.fromkeys(types)))
    failure_id = new_id()

    def make(again: int) -> tuple[Call]:
        is_again = 1 if again or is_unclear else 0
        args = (lease_for, limit, worker, token, is_again, failure_id, wanted)
        return (store.call("reserve", queue, now, *args),)

    ((untold, moves, due, *found),) = await store.connections.run(make)
    jobs = leased_records(found[::2], found[1::2], queue, worker, now)
    return Claimed(jobs, untold, moves, None if due < 0 else due)
