"""Keeping states small: ended jobs and log rows go from a queue's tail to a segment, small segments become larger ones.

All of it happens in the background, beside the calls: a segment is written first, under a name nobody knows, and then one
change of the state puts it in the place of what it holds. Where somebody else was faster, ours is removed. A process that
dies in between leaves an object that no state knows; the next one that folds the queue removes it when it is old.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence

from taskharbor.drivers.objectstore.archive import Archive
from taskharbor.drivers.objectstore.archived import QueueState
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.building import Built, JobPiece, RowPiece, merged, segment_of
from taskharbor.drivers.objectstore.cell import Cell
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.options import Options
from taskharbor.drivers.objectstore.segments import Segment
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import SECOND, Micros

MAX_MERGED_BYTES = 32 * 1024 * 1024
"""No segment is made larger than this: whoever looks for a job in it reads all of it."""
ABANDONED_AFTER: Micros = 3600 * SECOND
"""An object that no state knows is taken for abandoned once it is that old,"""
GIVE_UP_AFTER = 600.0
"""which leaves time for one that is written but not folded in yet: after so many seconds it is given up."""

_log = logging.getLogger(__name__)


def wall_clock() -> Micros:
    """Only tells how old objects are; no job is judged by it."""
    return time.time_ns() // 1000


class Folder:
    """Folds one queue's state. One task at a time."""

    def __init__(
        self,
        blobs: Blobs,
        cell: Cell[QueueState],
        archive: Archive,
        folder: str,
        options: Options,
    ) -> None:
        self._blobs = blobs
        self._cell = cell
        self._archive = archive
        self._folder = folder
        self._options = options
        self._task: asyncio.Task[None] | None = None
        self._has_swept = False

    def consider(self, state: QueueState) -> None:
        """Begin to fold where this state, which has landed, is due for it."""
        if self._task is None and self._is_due(state):
            self._task = asyncio.get_running_loop().create_task(self._fold_all())
            self._task.add_done_callback(self._done)

    def _is_due(self, state: QueueState) -> bool:
        return (
            self._is_tail_long(state)
            or self._mergeable(state.segments) is not None
            or self._is_retirement_over(state)
        )

    def _is_tail_long(self, state: QueueState) -> bool:
        options = self._options
        return (
            len(state.tail.rows) >= options.segment_rows
            or state.ended_count >= options.segment_rows
            # What is smaller as a whole needs no counting.
            or (
                self._cell.size >= options.segment_bytes
                and state.tail.size + state.ended_bytes >= options.segment_bytes
            )
        )

    def _is_retirement_over(self, state: QueueState) -> bool:
        return bool(state.retired) and state.retired[0][1] + self._options.grace * SECOND <= wall_clock()

    async def close(self) -> None:
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def settled(self) -> None:
        """Until nothing is due any more."""
        while self._task is not None:
            await asyncio.wait((self._task,))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            # Nothing is lost: the state is as large as it was, and whoever changes it next begins anew.
            _log.warning("%s could not be folded, and will be tried again: %s", self._cell.where, error)

    async def _fold_all(self) -> None:
        # Other handles have seen the same state: who comes first spares the rest the work.
        await asyncio.sleep(random.random() * (self._options.poll or 0.0))
        try:
            if not self._has_swept:
                self._has_swept = True
                await self._sweep()
            while await self._cell.look(self._is_tail_long):
                if not await self._fold():
                    break
            while (parts := await self._cell.look(lambda state: self._mergeable(state.segments))) is not None:
                if not await self._merge(parts):
                    break
            if await self._cell.look(self._is_retirement_over):
                await self._remove_retired()
        except TaskHarborError as error:
            _log.warning("%s could not be folded, and will be tried again: %s", self._cell.where, error)

    # -- folding ------------------------------------------------------------------------------------------

    async def _fold(self) -> bool:
        queue, rows, jobs = await self._cell.look(_tail_of)
        if not rows and not jobs:
            return False
        built = await asyncio.to_thread(segment_of, self._new_name(), queue, rows, jobs)
        row_numbers = [row.number for row, _ in rows]
        job_numbers = [number for (number, _), _ in jobs]
        return await self._put_in_place(
            built, lambda state: state.fold_in(built.entry, row_numbers, job_numbers)
        )

    def _mergeable(self, segments: Sequence[SegmentEntry]) -> list[SegmentEntry] | None:
        """The first run of segments of one level that is long enough (they stay in the order of their rows), or one that is
        worth being written again for itself."""
        fan = self._options.merge
        for level in range(self._options.levels):
            run: list[SegmentEntry] = []
            for entry in segments:
                if entry.level != level:
                    run = []
                    continue
                run.append(entry)
                if len(run) == fan:
                    return run
        return next(([entry] for entry in segments if entry.is_wasteful), None)

    async def _merge(self, parts: list[SegmentEntry]) -> bool:
        while len(parts) > 2 and sum(entry.size for entry in parts) > MAX_MERGED_BYTES:
            parts = parts[:-1]
        if len(parts) > 1 and sum(entry.size for entry in parts) > MAX_MERGED_BYTES:
            return await self._cell.change(lambda state: state.leave_unmerged(parts[0]))
        read = await self._archive.read(self._folder, [entry.name for entry in parts])
        if len(read) < len(parts):
            return False
        pairs: list[tuple[SegmentEntry, Segment]] = [(entry, read[entry.name]) for entry in parts]
        queue = pairs[0][1].header.queue
        built = await asyncio.to_thread(merged, self._new_name(), queue, pairs)
        now = wall_clock()
        return await self._put_in_place(built, lambda state: state.merge_in(built.entry, parts, now))

    async def _put_in_place(self, built: Built, step: Callable[[QueueState], bool]) -> bool:
        name = f"{self._folder}/{built.entry.name}"
        loop = asyncio.get_running_loop()
        began = loop.time()

        def in_time(state: QueueState) -> bool:
            return loop.time() - began < GIVE_UP_AFTER and step(state)

        await self._blobs.put(name, built.data)
        is_in_place = await self._cell.change(in_time)
        if is_in_place:
            self._archive.keep(name, Segment(built.data, name))
        else:
            await self._blobs.delete([name])
        return is_in_place

    def _new_name(self) -> str:
        return f"{wall_clock():015x}-{secrets.token_hex(6)}"

    # -- removing -----------------------------------------------------------------------------------------

    async def _remove_retired(self) -> None:
        by = wall_clock() - round(self._options.grace * SECOND)
        names = await self._cell.look(lambda state: [name for name, at in state.retired if at <= by])
        await self._blobs.delete([f"{self._folder}/{name}" for name in names])
        await self._cell.change(lambda state: state.forget_retired(names))

    async def _sweep(self) -> None:
        """Remove what was written for this queue and never became part of it."""
        there = [name.rpartition("/")[2] for name in await self._blobs.names(self._folder)]
        by = wall_clock() - ABANDONED_AFTER
        old = [name for name in there if _made_at(name) <= by]
        if old:
            known = set(await self._cell.look(lambda state: state.known_segments()))
            await self._blobs.delete([f"{self._folder}/{name}" for name in old if name not in known])


def _tail_of(state: QueueState) -> tuple[str, list[RowPiece], list[JobPiece]]:
    tail = state.tail
    rows = list(zip(tail.rows, tail.pieces, strict=True))
    jobs = [((slot.seq, slot.record), slot.piece()) for slot in state.ended_slots()]
    return state.name, rows, jobs


def _made_at(name: str) -> Micros:
    digits = name.partition("-")[0]
    try:
        return int(digits, 16)
    except ValueError:
        # Nothing of ours.
        return 2**63
