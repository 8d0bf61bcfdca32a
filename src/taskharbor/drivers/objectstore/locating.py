"""Which queue, and which shard of it, has a job: remembered for what a handle brought or took, asked for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias
from zlib import crc32

from taskharbor.jobs import JobRecord

Place: TypeAlias = tuple[str, int]
"""A queue and the number of a shard."""

_GENERATION = 50_000


def shard_of(record: JobRecord, shards: int) -> int:
    """Jobs that must know of each other are in one shard: by key, else by idempotency key, else anywhere."""
    if shards == 1:
        return 0
    name = record.key
    if name is None:
        name = record.id if record.idempotency_key is None else record.idempotency_key
    return crc32(name.encode()) % shards


class Whereabouts:
    """Where jobs were seen. Forgets the oldest half when it has too many."""

    def __init__(self) -> None:
        self._young: dict[str, Place] = {}
        self._old: dict[str, Place] = {}

    def note(self, job_ids: Iterable[str], place: Place) -> None:
        if len(self._young) >= _GENERATION:
            self._old, self._young = self._young, {}
        young = self._young
        for job_id in job_ids:
            young[job_id] = place

    def of(self, job_id: str) -> Place | None:
        return self._young.get(job_id) or self._old.get(job_id)

    def split(self, job_ids: Sequence[str]) -> tuple[dict[str, Place], list[str]]:
        """Where they are, and of which that is not known."""
        known: dict[str, Place] = {}
        unknown: list[str] = []
        for job_id in dict.fromkeys(job_ids):
            place = self.of(job_id)
            if place is None:
                unknown.append(job_id)
            else:
                known[job_id] = place
        return known, unknown
