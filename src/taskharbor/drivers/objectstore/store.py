"""What a handle has of a store while it is open: the catalog, the queues' objects, and where jobs were seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers.objectstore.archive import Archive
from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.catalog import Catalog
from taskharbor.drivers.objectstore.cell import Term
from taskharbor.drivers.objectstore.locating import Place, Whereabouts, shard_of
from taskharbor.drivers.objectstore.numbers import take_stamps
from taskharbor.drivers.objectstore.options import Options
from taskharbor.drivers.objectstore.queue_cell import QueueCell
from taskharbor.drivers.objectstore.segments import Segment
from taskharbor.drivers.waiting import Look, shared_notifications
from taskharbor.errors import BackendUnavailable
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


R = TypeVar("R")
A = TypeVar("A")


class OpenStore:
    trusts_notifications = False

    def __init__(
        self, blobs: Blobs, options: Options, clock: Clock | None, *, reads_only: bool = False
    ) -> None:
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
        self._archive = Archive(blobs)
        self._clock = clock
        self._cells: dict[Place, QueueCell] = {}
        self.turn = 0
        """Which shard a reservation begins with."""

    async def open(self) -> None:
        if self.reads_only and await self.catalog.cell.look(lambda state: state.entries) is None:
            raise BackendUnavailable(
                f"{self.blobs.place}: there is no such store; it is made when the first job is enqueued"
            )
        await self.catalog.open()

    async def close(self) -> None:
        # Notices that are under way end up in cells of other queues, so those are closed after.
        cells = list(self._cells.values())
        await asyncio.gather(*(cell.finish() for cell in cells))
        await asyncio.gather(*(cell.close() for cell in self._cells.values()))
        await self.catalog.close()
        await self.blobs.close()

    async def settled(self) -> None:
        """Until nothing is going on in the background."""
        for cell in list(self._cells.values()):
            await cell.settled()

    # -- cells --------------------------------------------------------------------------------------------

    def cell(self, queue: str, shard: int = 0) -> QueueCell:
        place = (queue, shard)
        cell = self._cells.get(place)
        if cell is None:
            cell = self._cells[place] = QueueCell(
                self.blobs,
                queue,
                shard,
                self.catalog.shards,
                options=self.options,
                archive=self._archive,
                notifications=self.notifications,
                deliver=self.deliver,
                term=self.term,
                every_pass=self._expire,
                clock=self._clock,
                reads_only=self.reads_only,
            )
        return cell

    def shards_of(self, queue: str) -> list[QueueCell]:
        return [self.cell(queue, shard) for shard in range(self.catalog.shards)]

    def cells_of(self, queues: Iterable[str]) -> list[QueueCell]:
        return [cell for queue in queues for cell in self.shards_of(queue)]

    async def all_cells(self) -> list[QueueCell]:
        return self.cells_of(await self.catalog.queues())

    def lead(self, term: Term | None) -> None:
        self.term = term
        self.catalog.lead(term)
        for cell in self._cells.values():
            cell.lead(term)

    def compare_soon(self) -> None:
        for cell in self._cells.values():
            cell.cell.must_compare()

    def _expire(self, state: QueueState) -> None:
        if self.every_pass_at is not None:
            state.expire(self.every_pass_at())

    # -- jobs for other queues ----------------------------------------------------------------------------

    async def deliver(self, notices: list[JobRecord]) -> None:
        """Bring each to its queue. One that is there already, or was there and has ended, changes nothing."""
        by_cell: dict[Place, list[JobRecord]] = {}
        for notice in notices:
            place = (notice.queue, shard_of(notice, self.catalog.shards))
            by_cell.setdefault(place, []).append(notice)
        await self.catalog.add_queues(queue for queue, _ in by_cell)
        await asyncio.gather(
            *(
                self.cell(*place).change(
                    lambda state, brought, batch=batch: state.enqueue_known(  # type: ignore[misc]
                        batch, range(take_stamps(len(batch)), 2**62), batch[0].created_at_us, brought
                    )
                )
                for place, batch in by_cell.items()
            )
        )

    # -- waiting (see `waiting.Source`) --------------------------------------------------------------------

    def listen(self, queues: Sequence[str]) -> float | None:
        """Other processes notify nobody: their changes are seen in the queue's object, by a conditional read."""
        return self.options.poll

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        def step(state: QueueState, brought: Brought) -> tuple[str, Micros | None]:
            return f"{state.stirs}.{state.promotions}", state.next_due((state.name,), since)

        looks = await asyncio.gather(*(cell.look(step) for cell in self.cells_of(queues)))
        due = min((due for _, due in looks if due is not None), default=None)
        return Look.at((text for text, _ in looks), version, due)

    # -- by id --------------------------------------------------------------------------------------------

    async def ask_who_has(self, job_ids: Sequence[str], cells: Iterable[QueueCell]) -> dict[str, Place]:
        found: dict[str, Place] = {}
        asked = list(cells)
        answers = await asyncio.gather(
            *(cell.look(lambda state, brought: state.knows(job_ids, brought)) for cell in asked)
        )
        for cell, known in zip(asked, answers, strict=True):
            place = (cell.queue, cell.shard)
            self.whereabouts.note(known, place)
            found.update(dict.fromkeys(known, place))
        return found

    async def by_home(
        self,
        job_ids: Sequence[str],
        ask: Callable[[QueueCell, list[int]], Awaitable[Sequence[A]]],
        is_unknown: Callable[[A], bool],
    ) -> list[A | None]:
        """Ask for each job where it is; `ask` gets the positions of those that one cell has. None: nobody has it.

        All that one cell has is asked for at once: a batch is one step there. Only where a job was seen that has been removed
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
            moved = {job_id: place for job_id, place in found.items() if place != known[job_id]}
            await self._ask_homes(job_ids, moved, ask, answers)
        return answers

    async def _located(self, job_ids: Sequence[str]) -> dict[str, Place]:
        cells = await self.all_cells()
        if len(cells) == 1:
            # If anybody has them, this one does.
            return dict.fromkeys(job_ids, (cells[0].queue, cells[0].shard))
        return await self.ask_who_has(job_ids, cells)

    async def _ask_homes(
        self,
        job_ids: Sequence[str],
        homes: dict[str, Place],
        ask: Callable[[QueueCell, list[int]], Awaitable[Sequence[A]]],
        answers: list[A | None],
    ) -> None:
        positions: dict[Place, list[int]] = {}
        for at, job_id in enumerate(job_ids):
            home = homes.get(job_id)
            if home is not None:
                positions.setdefault(home, []).append(at)
        parts = await asyncio.gather(*(ask(self.cell(*home), at) for home, at in positions.items()))
        for at_all, part in zip(positions.values(), parts, strict=True):
            for at, answer in zip(at_all, part, strict=True):
                answers[at] = answer
