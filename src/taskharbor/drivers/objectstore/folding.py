"""Keeping states small: ended jobs and log rows go from a queue's tail to a segment, small segments become larger ones.

All of it happens in the background, beside the calls. First the state notes the name of the segment that is to be made, then
the segment is written, and then one change of the state puts it in the place of what it holds. A process that dies in between
leaves a name in the state; after a while somebody strikes that off and removes the object, and from then on it cannot
become part of the queue, even if its writer was only asleep. So a wrong clock wastes work, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

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
BUSY_FOR: Micros = 60 * SECOND
"""So long nobody else begins what somebody has begun,"""
ABANDONED_AFTER: Micros = 3600 * SECOND
"""and after this it is given up for them."""
AT_THE_END = 5.0
"""Seconds for which a handle that is closed waits for what it has begun."""
AFTER_A_FAILURE = 5.0
"""Seconds after which folding is tried again, at the earliest."""

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
        self._has_failed = False
        self._not_before = 0.0
        self._is_closed = False
        self._hurry = asyncio.Event()

    def consider(self, state: QueueState) -> None:
        """Begin to fold where this state, which has landed, is due for it."""
        loop = asyncio.get_running_loop()
        is_idle = self._task is None and not self._is_closed and loop.time() >= self._not_before
        if is_idle and self._is_due(state):
            self._task = loop.create_task(self._fold_all())
            self._task.add_done_callback(self._done)

    def _is_due(self, state: QueueState) -> bool:
        return self._is_tail_to_fold(state) or self._to_merge(state) is not None or self._is_overdue(state)

    def _is_tail_to_fold(self, state: QueueState) -> bool:
        options = self._options
        return not _is_busy(state) and (
            len(state.tail.rows) >= options.segment_rows
            or state.ended_count >= options.segment_rows
            # What is smaller as a whole needs no counting.
            or (
                self._cell.size >= options.segment_bytes
                and state.tail.size + state.ended_bytes >= options.segment_bytes
            )
        )

    def _is_overdue(self, state: QueueState) -> bool:
        """Whether something is to be removed."""
        return bool(self._over(state.retired, round(self._options.grace * SECOND))) or bool(
            self._over(state.begun, ABANDONED_AFTER)
        )

    def _over(self, names: list[tuple[str, Micros]], after: Micros) -> list[str]:
        by = wall_clock() - after
        return [name for name, at in names if at <= by]

    async def close(self) -> None:
        """What has begun is completed, unless the store takes too long: else processes that live for a moment each would let
        the state grow without end."""
        self._is_closed = True
        self._hurry.set()
        task = self._task
        if task is not None:
            _, unfinished = await asyncio.wait((task,), timeout=AT_THE_END)
            if unfinished:
                task.cancel()
                await asyncio.wait((task,))

    async def settled(self) -> None:
        """Until nothing is due any more."""
        while self._task is not None:
            await asyncio.wait((self._task,))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._has_failed = False
            return
        # Nothing is lost: the state is as large as it was, and whoever changes it after a while begins anew.
        self._not_before = asyncio.get_running_loop().time() + AFTER_A_FAILURE
        if not isinstance(error, TaskHarborError) or not self._has_failed:
            _log.warning("%s could not be folded, and will be tried again: %s", self._cell.where, error)
        self._has_failed = True

    async def _fold_all(self) -> None:
        # Other handles have seen the same state: who comes first spares the rest the work.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), random.random() * (self._options.poll or 0.0))
        while await self._cell.look(self._is_tail_to_fold):
            if not await self._fold():
                break
        while (parts := await self._cell.look(self._to_merge)) is not None:
            if not await self._merge(parts):
                break
        if await self._cell.look(self._is_overdue):
            await self._remove_retired()

    # -- folding ------------------------------------------------------------------------------------------

    async def _fold(self) -> bool:
        name = _new_name()

        def begin(state: QueueState) -> tuple[str, list[RowPiece], list[JobPiece]]:
            if _is_busy(state):
                return state.name, [], []
            rows, jobs = _tail_of(state)
            if rows or jobs:
                state.begin(name, wall_clock())
            return state.name, rows, jobs

        queue, rows, jobs = await self._cell.change(begin, is_housekeeping=True)
        if not rows and not jobs:
            return False
        built = await asyncio.to_thread(segment_of, name, queue, rows, jobs)
        row_numbers = [row.number for row, _ in rows]
        job_numbers = [number for (number, _), _ in jobs]
        return await self._put_in_place(
            built, lambda state: state.fold_in(built.entry, row_numbers, job_numbers)
        )

    def _to_merge(self, state: QueueState) -> list[SegmentEntry] | None:
        """The first run of segments of one level that is long enough (they stay in the order of their rows), or one that is
        worth being written again for itself."""
        if _is_busy(state):
            return None
        fan, segments = self._options.merge, state.segments
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
            return await self._cell.change(lambda state: state.leave_unmerged(parts[0]), is_housekeeping=True)
        read = await self._archive.read(self._folder, [entry.name for entry in parts])
        if len(read) < len(parts):
            return False
        pairs: list[tuple[SegmentEntry, Segment]] = [(entry, read[entry.name]) for entry in parts]
        name, queue = _new_name(), pairs[0][1].header.queue

        def begin(state: QueueState) -> bool:
            is_free = not _is_busy(state)
            if is_free:
                state.begin(name, wall_clock())
            return is_free

        if not await self._cell.change(begin, is_housekeeping=True):
            return False
        built = await asyncio.to_thread(merged, name, queue, pairs)
        return await self._put_in_place(built, lambda state: state.merge_in(built.entry, parts, wall_clock()))

    async def _put_in_place(self, built: Built, step: Callable[[QueueState], bool]) -> bool:
        name = built.entry.name

        def step_or_abandon(state: QueueState) -> bool:
            is_in_place = step(state)
            if not is_in_place:
                # Nobody knows it, so nobody is reading it: it may go at once.
                state.abandon(name, 0)
            return is_in_place

        await self._blobs.put(f"{self._folder}/{name}", built.data)
        is_in_place = await self._cell.change(step_or_abandon, is_housekeeping=True)
        if is_in_place:
            self._archive.keep(self._folder, name, Segment(built.data, name))
        return is_in_place

    async def _remove_retired(self) -> None:
        """And what was abandoned: first nobody can make it part of the queue any more, then it is removed."""

        def over(state: QueueState) -> list[str]:
            for name in self._over(state.begun, ABANDONED_AFTER):
                state.abandon(name, 0)
            return self._over(state.retired, round(self._options.grace * SECOND))

        names = await self._cell.change(over, is_housekeeping=True)
        await self._blobs.delete([f"{self._folder}/{name}" for name in names])
        await self._cell.change(lambda state: state.forget_retired(names), is_housekeeping=True)


def _is_busy(state: QueueState) -> bool:
    """Whether somebody has begun lately, by whatever clock."""
    now = wall_clock()
    return any(abs(now - at) < BUSY_FOR for _, at in state.begun)


def _new_name() -> str:
    return f"{wall_clock():015x}-{secrets.token_hex(6)}"


def _tail_of(state: QueueState) -> tuple[list[RowPiece], list[JobPiece]]:
    tail = state.tail
    rows = list(zip(tail.rows, tail.pieces, strict=True))
    jobs = [((slot.seq, slot.record), slot.piece()) for slot in state.ended_slots()]
    return rows, jobs
