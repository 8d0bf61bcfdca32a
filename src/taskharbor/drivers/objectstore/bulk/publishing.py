"""Publishing a bulk write: decided by one change of the store's `writes`, then carried out portion by portion.

A portion is one change of each queue's object, together with the note that it was made (`published`), so it is made once,
however many try. A write becomes visible in steps of up to `PORTION` jobs; once it is decided all of them follow, by whoever
published it or by the next who publishes anything. Ids are made by the tasks that stage, so they are known nowhere else, and
other queues are not asked for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from taskharbor.bulk.contract import StagingLost
from taskharbor.bulk.write_ids import series_of
from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.bulk.staging import (
    PORTION,
    ends_of,
    forget_staged,
    staged_jobs,
    sweep,
)
from taskharbor.drivers.objectstore.bulk.writes import Mark, Plan, Staged, WritesState, writes_cell
from taskharbor.drivers.objectstore.cell import Cell
from taskharbor.drivers.objectstore.folding import wall_clock
from taskharbor.drivers.objectstore.locating import Place, shard_of
from taskharbor.drivers.objectstore.numbers import take_stamps
from taskharbor.drivers.objectstore.published import Published, noted
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import SECOND, JobRecord, Micros

LEFT_BEHIND: Final[Micros] = 60 * SECOND
"""After so long others take it that a publisher died. Should it be wrong, nothing is done twice."""


class Publisher:
    """Publishes writes of one store."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._writes: Cell[WritesState] = writes_cell(store.blobs)

    async def close(self) -> None:
        await self._writes.close()

    async def is_over(self, write: str) -> bool:
        """Published, or given up: nothing that is staged for it is wanted any more."""
        return await self._writes.look(lambda state: state.mark_of(write)) is not None

    async def publish(self, write: str, tasks: Sequence[str], now: Micros) -> int:
        """How many jobs the write added, now or when it was published before. Raises StagingLost."""
        await self._finish_left_behind(now, except_for=write)
        mark, plan = await self._writes.look(lambda state: (state.mark_of(write), state.plan_of(write)))
        if mark is None and plan is None:
            made = await self._planned(write, list(dict.fromkeys(tasks)))
            mark, plan = await self._writes.change(lambda state: state.decide(made))
        if plan is not None:
            return await self._finish(plan, now)
        assert mark is not None
        await forget_staged(self._store.blobs, write)
        return _told_by(mark, write)

    async def abandon(self, write: str) -> None:
        """Forget what was staged. What somebody has begun to publish is published."""
        now = wall_clock()
        plan = await self._writes.change(lambda state: state.abandon(write, now))
        if plan is not None:
            await self._finish(plan, now)
        else:
            await forget_staged(self._store.blobs, write)

    # -- deciding ---------------------------------------------------------------------------------------------

    async def _planned(self, write: str, tasks: list[str]) -> Plan:
        store = self._store
        ends = await ends_of(store.blobs, write, tasks)
        lost = [task for task in tasks if task not in ends]
        if lost and not await self.is_over(write):
            raise StagingLost(
                f"{store.blobs.place}: what the tasks {', '.join(lost)} of {write} had staged is gone, or they never came to "
                "their end: nothing was published, write it again"
            )
        sizes: dict[str, int] = {}
        for end in ends.values():
            for queue, size in end.sizes.items():
                sizes[queue] = sizes.get(queue, 0) + size
        await self._refuse_when_full(sizes)
        staged = [one for task in tasks if task in ends for one in ends[task].staged]
        return Plan(write, wall_clock(), staged)

    async def _refuse_when_full(self, sizes: dict[str, int]) -> None:
        """All that a queue will have in the end must have room in its state, before the first step is taken."""
        shards = self._store.catalog.shards
        for queue, size in sizes.items():
            for cell in self._store.shards_of(queue):
                await cell.look(_nothing)
                cell.refuse_when_full(size // shards)

    async def _finish_left_behind(self, now: Micros, *, except_for: str) -> None:
        latest = wall_clock() - LEFT_BEHIND
        plans = await self._writes.look(lambda state: list(state.content.plans.values()))
        for plan in plans:
            if plan.write != except_for and plan.begun_at <= latest:
                await self._finish(plan, now)

    # -- carrying out -------------------------------------------------------------------------------------------

    async def _finish(self, plan: Plan, now: Micros) -> int:
        added: dict[Place, int] = {}
        lost = 0
        portions = list(_portions(plan.staged))
        reading = asyncio.ensure_future(self._read(portions[0])) if portions else None
        try:
            for ordinal, portion in enumerate(portions, 1):
                assert reading is not None
                jobs = await reading
                following = portions[ordinal : ordinal + 1]
                # The next ones come while these are written.
                reading = asyncio.ensure_future(self._read(following[0])) if following else None
                if len(jobs) < sum(one.jobs for one in portion):
                    mark = await self._writes.look(lambda state: state.mark_of(plan.write))
                    if mark is not None:
                        # Another one was faster, and has cleaned up.
                        return _told_by(mark, plan.write)
                    lost += sum(one.jobs for one in portion) - len(jobs)
                added.update(await self._add(plan.write, ordinal, jobs, now))
        finally:
            if reading is not None:
                reading.cancel()
        return await self._close(plan, sum(added.values()), lost)

    async def _read(self, portion: Sequence[Staged]) -> list[JobRecord]:
        found = await asyncio.gather(*(staged_jobs(self._store.blobs, one.name) for one in portion))
        return [job for jobs in found if jobs is not None for job in jobs]

    async def _add(
        self, write: str, ordinal: int, jobs: Sequence[JobRecord], now: Micros
    ) -> dict[Place, int]:
        """By queue and shard, how many jobs the write has added to it so far."""
        store = self._store
        shards = store.catalog.shards
        first = take_stamps(max(1, len(jobs)))
        batches: dict[Place, tuple[list[JobRecord], list[int]]] = {}
        for at, job in enumerate(jobs):
            records, stamps = batches.setdefault((job.queue, shard_of(job, shards)), ([], []))
            records.append(job)
            stamps.append(first + at)
        await store.catalog.add_queues(queue for queue, _ in batches)
        totals = await asyncio.gather(
            *(
                store.cell(*place).change(_step(write, ordinal, records, stamps, now))
                for place, (records, stamps) in batches.items()
            )
        )
        return dict(zip(batches, totals, strict=True))

    async def _close(self, plan: Plan, added: int, lost: int) -> int:
        blobs, write = self._store.blobs, plan.write
        at = wall_clock()
        was_over = await self.is_over(write)
        mark, kept = await self._writes.change(
            lambda state: (state.close(write, added, at), list(state.content.plans))
        )
        await forget_staged(blobs, write)
        await sweep(blobs, kept, at)
        if lost and not was_over:
            raise TaskHarborError(
                f"{blobs.place}: {lost} jobs of {write} were lost after it was decided to publish them: somebody removed what "
                f"was staged; the other {added} are jobs now, so do not write all of them again"
            )
        return _told_by(mark, write)


class _step:
    """One portion for one queue, as a step on its state."""

    def __init__(
        self, write: str, ordinal: int, records: list[JobRecord], stamps: list[int], now: Micros
    ) -> None:
        self._series, self._number = series_of(write)
        self._ordinal = ordinal
        self._records = records
        self._stamps = stamps
        self._now = now

    def __call__(self, state: QueueState, brought: Brought) -> int:
        """How many jobs the write has added here so far."""
        before = 0
        mark = state.published.get(self._series)
        if mark is not None:
            if mark.number > self._number:
                # A later write of the series was begun, so this one was over.
                return 0
            if mark.number == self._number:
                if mark.portions >= self._ordinal:
                    return mark.added
                before = mark.added
        answers = state.enqueue_known(self._records, self._stamps, self._now, brought)
        added = before + sum(not answer.existed for answer in answers)
        mark = Published(self._number, self._ordinal, added)
        state.published = noted(state.published, self._series, mark)
        state.touched = True
        return added


def _portions(staged: Sequence[Staged]) -> Iterator[list[Staged]]:
    """The same ones for everybody who has the plan."""
    portion: list[Staged] = []
    jobs = 0
    for one in staged:
        if portion and jobs + one.jobs > PORTION:
            yield portion
            portion, jobs = [], 0
        portion.append(one)
        jobs += one.jobs
    if portion:
        yield portion


def _told_by(mark: Mark, write: str) -> int:
    return mark.added if mark.number == series_of(write)[1] else 0


def _nothing(state: QueueState, brought: Brought) -> None:
    pass
