"""A store while a handle has it open: the catalog, the shards of its queues, and where jobs were seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar
from zlib import crc32

from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers.engine import inspect, settle
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import Term
from taskharbor.drivers.objectstore.catalog import Catalog
from taskharbor.drivers.objectstore.image import Image
from taskharbor.drivers.objectstore.places import Options
from taskharbor.drivers.objectstore.segments import Segment, SegmentCache
from taskharbor.drivers.objectstore.shard import Shard
from taskharbor.drivers.waiting import Look, shared_notifications
from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor.jobs import SECOND, JobRecord, Micros

RESOLUTION: Micros = 2 * SECOND
"""Stores tell their time to a second, and after a round trip: a smaller difference says nothing."""
KEPT_FOR: Micros = 600 * SECOND
"""Two clocks that run at all stay together for that long."""
MOST_JUMP: Micros = SECOND
"""Where this machine's clock was set by more than this since, nothing is known any more."""


def _steady_us() -> Micros:
    return time.monotonic_ns() // 1000


class StoreTime:
    """This machine's time, corrected where it differs from the store's by more than can be told."""

    def __init__(self, blobs: Blobs, clock: Clock, monotonic: Callable[[], Micros] = _steady_us) -> None:
        self._blobs = blobs
        self._clock = clock
        self._monotonic = monotonic
        self._correction: Micros = 0
        self._asked_at: tuple[Micros, Micros] | None = None
        """When the store was asked last, by the steady clock and by the one that may be set."""

    async def now(self) -> Micros:
        if not self._is_known():
            theirs = await self._blobs.now()
            ours = self._clock.now()
            difference = 0 if theirs is None else theirs - ours
            self._correction = difference if abs(difference) > RESOLUTION else 0
            self._asked_at = self._monotonic(), ours
        return self._clock.now() + self._correction

    def _is_known(self) -> bool:
        if self._asked_at is None:
            return False
        steady, ours = self._asked_at
        passed = self._monotonic() - steady
        return passed < KEPT_FOR and abs(self._clock.now() - ours - passed) <= MOST_JUMP


A = TypeVar("A")

_GENERATION = 50_000
_ALL = 2**31 - 1


class Whereabouts:
    """Where jobs were seen. Forgets the oldest half when it has too many."""

    def __init__(self) -> None:
        self._young: dict[str, Shard] = {}
        self._old: dict[str, Shard] = {}

    def note(self, job_ids: Iterable[str], shard: Shard) -> None:
        if len(self._young) >= _GENERATION:
            self._old, self._young = self._young, {}
        young = self._young
        for job_id in job_ids:
            young[job_id] = shard

    def split(self, job_ids: Sequence[str]) -> tuple[dict[str, Shard], list[str]]:
        """Where they are, and of which that is not known."""
        known: dict[str, Shard] = {}
        unknown: list[str] = []
        for job_id in dict.fromkeys(job_ids):
            shard = self._young.get(job_id) or self._old.get(job_id)
            if shard is None:
                unknown.append(job_id)
            else:
                known[job_id] = shard
        return known, unknown


class OpenStore:
    trusts_notifications = False

    def __init__(
        self,
        blobs: Blobs,
        options: Options,
        clock: Clock | None,
        deliver: Callable[[OpenStore, list[JobRecord]], Awaitable[object]],
        *,
        reads_only: bool = False,
    ) -> None:
        """`deliver` brings jobs to their failure queues."""
        self.blobs = blobs
        self.reads_only = reads_only
        self.row_segments: dict[str, Segment] = {}
        """Segments, or their beginnings, that rows of the log were read from lately."""
        self.options = options
        self.catalog = Catalog(blobs, shards=options.shards, clock=clock)
        self.notifications = shared_notifications(blobs.identity)
        self.time = StoreTime(blobs, SystemClock() if clock is None else clock)
        self.whereabouts = Whereabouts()
        self.term: Term | None = None
        self.every_pass_at: Callable[[], Micros] | None = None
        """Where given, leases that are over by this clock end with every write."""
        self._cache = SegmentCache(blobs)
        self._clock = clock
        self._deliver = deliver
        self._shards: dict[tuple[str, int], Shard] = {}
        self.turn = 0
        """Which shard a reservation begins with."""

    async def open(self) -> None:
        if self.reads_only and await self.catalog.cell.look(lambda state: state.entries) is None:
            raise BackendUnavailable(
                f"{self.blobs.place}: there is no such store; it is made when the first job is enqueued"
            )
        await self.catalog.open()

    async def close(self) -> None:
        # Notices that are under way end up in shards of other queues, so those are closed after.
        await asyncio.gather(*(shard.finish() for shard in list(self._shards.values())))
        await asyncio.gather(*(shard.close() for shard in self._shards.values()))
        await self.catalog.close()
        await self.blobs.close()

    async def settled(self) -> None:
        """Until nothing is going on in the background."""
        for shard in list(self._shards.values()):
            await shard.settled()

    # -- shards -------------------------------------------------------------------------------------------

    def _shard(self, queue: str, number: int) -> Shard:
        shard = self._shards.get((queue, number))
        if shard is None:
            shard = self._shards[queue, number] = Shard(
                self.blobs,
                queue,
                number,
                options=self.options,
                cache=self._cache,
                notifications=self.notifications,
                deliver=self._bring,
                term=self.term,
                every_pass=self._expire,
                clock=self._clock,
                reads_only=self.reads_only,
            )
        return shard

    def shard_of(self, record: JobRecord) -> Shard:
        """Jobs that must know of each other are in one shard: by key, else by idempotency key, else anywhere."""
        name = record.key or record.idempotency_key or record.id
        return self._shard(record.queue, crc32(name.encode()) % self.catalog.shards)

    def shards_of(self, queue: str) -> list[Shard]:
        return [self._shard(queue, number) for number in range(self.catalog.shards)]

    async def all_shards(self) -> list[Shard]:
        return [shard for queue in await self.catalog.queues() for shard in self.shards_of(queue)]

    async def for_each(self, shards: Iterable[Shard], step: Callable[[Shard], Awaitable[None]]) -> None:
        """One after the other. A shard whose object is damaged or does not answer keeps nobody from the others: its error is
        raised at the end."""
        errors: list[TaskHarborError] = []
        for shard in shards:
            try:
                await step(shard)
            except TaskHarborError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def lead(self, term: Term | None) -> None:
        self.term = term
        self.catalog.lead(term)
        for shard in self._shards.values():
            shard.cell.lead(term)

    def compare_soon(self) -> None:
        for shard in self._shards.values():
            shard.cell.must_compare()

    def _expire(self, image: Image) -> None:
        if self.every_pass_at is not None:
            now = self.every_pass_at()
            image.change(lambda transaction: settle.reclaim(transaction, now, None, _ALL))

    async def _bring(self, notices: list[JobRecord]) -> None:
        await self._deliver(self, notices)

    # -- waiting (see `waiting.Source`) --------------------------------------------------------------------

    def listen(self, queues: Sequence[str]) -> float | None:
        """Other processes notify nobody: their changes are seen in the queue's object, by a conditional read."""
        return self.options.poll

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        shards = [shard for queue in queues for shard in self.shards_of(queue)]
        looks = await asyncio.gather(
            *(
                shard.look(lambda transaction, shard=shard: inspect.watch(transaction, [shard.queue], since))  # type: ignore[misc]
                for shard in shards
            )
        )
        due = min((due for _, due in looks if due is not None), default=None)
        return Look.at((sum(versions.values()) for versions, _ in looks), version, due)

    # -- by id --------------------------------------------------------------------------------------------

    async def ask_who_has(self, job_ids: Sequence[str], shards: Sequence[Shard]) -> dict[str, Shard]:
        """A shard that cannot be asked is an error only if a job is found nowhere else."""
        found: dict[str, Shard] = {}
        answers = await asyncio.gather(*(shard.known(job_ids) for shard in shards), return_exceptions=True)
        errors: list[BaseException] = []
        for shard, known in zip(shards, answers, strict=True):
            if isinstance(known, BaseException):
                errors.append(known)
                continue
            self.whereabouts.note(known, shard)
            found.update(dict.fromkeys(known, shard))
        if errors and len(found) < len(set(job_ids)):
            raise errors[0]
        return found

    async def by_home(
        self,
        job_ids: Sequence[str],
        ask: Callable[[Shard, list[int]], Awaitable[Sequence[A]]],
        is_unknown: Callable[[A], bool],
    ) -> list[A | None]:
        """Ask for each job where it is; `ask` gets the positions of those that one shard has. None: nobody has it.

        All that one shard has is asked for at once: a batch is one step there. Only where a job was seen that has been removed
        since, and whose id another queue may have accepted anew, its part comes after.
        """
        answers: list[A | None] = [None] * len(job_ids)
        known, unknown = self.whereabouts.split(job_ids)
        homes = {**known, **await self._located(unknown)} if unknown else known
        await self._ask_homes(job_ids, homes, ask, answers)
        lost = [
            job_id
            for at, job_id in enumerate(job_ids)
            if job_id in known and is_unknown(answers[at])  # type: ignore[arg-type]
        ]
        if lost:
            found = await self._located(list(dict.fromkeys(lost)))
            moved = {job_id: shard for job_id, shard in found.items() if shard is not known[job_id]}
            await self._ask_homes(job_ids, moved, ask, answers)
        return answers

    async def _located(self, job_ids: Sequence[str]) -> dict[str, Shard]:
        shards = await self.all_shards()
        if len(shards) == 1:
            # If anybody has them, this one does.
            return dict.fromkeys(job_ids, shards[0])
        return await self.ask_who_has(job_ids, shards)

    async def _ask_homes(
        self,
        job_ids: Sequence[str],
        homes: dict[str, Shard],
        ask: Callable[[Shard, list[int]], Awaitable[Sequence[A]]],
        answers: list[A | None],
    ) -> None:
        positions: dict[Shard, list[int]] = {}
        for at, job_id in enumerate(job_ids):
            home = homes.get(job_id)
            if home is not None:
                positions.setdefault(home, []).append(at)
        parts = await asyncio.gather(*(ask(home, at) for home, at in positions.items()))
        for at_all, part in zip(positions.values(), parts, strict=True):
            for at, answer in zip(at_all, part, strict=True):
                answers[at] = answer
