"""Compaction: ended jobs and rows of the log leave an image for a segment, and small segments become larger ones.

All of it happens in the background, beside the calls. First the image notes the name of the segment that is to be made, then
the segment is written, and then one change of the image puts it in the place of what it holds. A process that dies in between
leaves a name in the image. After a while another process removes that name and the object, and from then on the segment cannot
become part of the queue, even if its writer was only asleep. So a wrong clock wastes work, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from taskharbor.drivers.engine.tables import Transaction, load, to_json
from taskharbor.drivers.objectstore.archive import JOBS, ROWS, Segment, copied, merge, pack
from taskharbor.drivers.objectstore.image import Entry, Image, entries, put_entry, retire, wall_clock
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import SECOND, Micros

if TYPE_CHECKING:
    from taskharbor.drivers.objectstore.queue import Shard

R = TypeVar("R")

MAX_MERGED_BYTES = 32 * 1024 * 1024
"""The largest size of a segment: a search for a job reads all of it."""
BUSY_FOR: Micros = 60 * SECOND
"""The time for which no other process begins work that one process has begun."""
ABANDONED_AFTER: Micros = 3600 * SECOND
"""The time after which begun work counts as abandoned."""
AT_THE_END = 5.0
"""Seconds that a closing handle waits for the work that it has begun."""
AFTER_A_FAILURE = 5.0
"""Seconds after which compaction is tried again, at the earliest."""

_SQL = load("compaction", __package__)
_OPERATE = load("operate")
_log = logging.getLogger(__name__)


class Compaction:
    """The compaction of one image. One task at a time."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._store = shard.store
        self._options = shard.store.options
        self._task: asyncio.Task[None] | None = None
        self._has_failed = False
        self._not_before = 0.0
        self._is_closed = False
        self._hurry = asyncio.Event()

    def consider(self, image: Image) -> None:
        """Begin compaction if this image, which has landed, is due for it."""
        loop = asyncio.get_running_loop()
        is_idle = self._task is None and not self._is_closed and loop.time() >= self._not_before
        if is_idle and image.look(self._due) is not None:
            self._task = loop.create_task(self._compact())
            self._task.add_done_callback(self._done)

    async def close(self) -> None:
        """Complete the work that has begun, unless the store takes too long. Otherwise processes that live for a moment each
        would let the image grow without end."""
        self._is_closed = True
        self._hurry.set()
        task = self._task
        if task is not None:
            _, unfinished = await asyncio.wait((task,), timeout=AT_THE_END)
            if unfinished:
                task.cancel()
                await asyncio.wait((task,))

    async def settled(self) -> None:
        """Wait until nothing is due any more."""
        while self._task is not None:
            await asyncio.wait((self._task,))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled() or (error := task.exception()) is None:
            self._has_failed = False
            return
        # Nothing is lost: the image keeps its size, and a later change begins compaction again.
        self._not_before = asyncio.get_running_loop().time() + AFTER_A_FAILURE
        if not isinstance(error, TaskHarborError) or not self._has_failed:
            _log.warning(
                "%s could not be compacted, and will be tried again: %s", self._shard.state.where, error
            )
        self._has_failed = True

    async def _compact(self) -> None:
        # Other handles have seen the same image: the first one saves the others the work.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), random.random() * (self._options.poll or 0.0))
        while (work := await self._shard.look(self._due)) is not None:
            if not await work():
                break

    async def _change(self, step: Callable[[Transaction], R]) -> R:
        answer, _ = await self._shard.state.change(lambda image: image.change(step), is_housekeeping=True)
        return answer

    # -- what is due --------------------------------------------------------------------------------------

    def _due(self, transaction: Transaction) -> Callable[[], Awaitable[bool]] | None:
        """Return the next piece of work. None: nothing is due, or some process has begun it lately, by any clock."""
        if not _is_busy(transaction):
            if self._is_full(transaction):
                return self._move_ended
            if (parts := self._to_merge(transaction)) is not None:
                return partial(self._merge, parts)
        return self._remove_overdue if self._overdue(transaction) else None

    def _is_full(self, transaction: Transaction) -> bool:
        rows, size = self._options.segment_rows, self._options.segment_bytes
        values = {"rows": rows, "bytes": size, "is_large": self._shard.state.size >= size}
        (is_full,) = transaction.execute(_SQL["is_full"], values).fetchone()
        return bool(is_full)

    def _to_merge(self, transaction: Transaction) -> list[Entry] | None:
        """Return the first long enough run of segments of one level (they stay in the order of their rows), or one segment that
        is worth being rewritten alone."""
        found = entries(transaction)
        for level in range(self._options.levels):
            run: list[Entry] = []
            for entry in found:
                run = [*run, entry] if entry.level == level else []
                if len(run) == self._options.merge:
                    return run
        return next(([entry] for entry in found if entry.is_wasteful), None)

    def _overdue(self, transaction: Transaction) -> list[str]:
        """Return loose segments that are to be removed."""
        now = wall_clock()
        values = (now - ABANDONED_AFTER, now - round(self._options.grace * SECOND))
        return [name for (name,) in transaction.execute(_SQL["overdue"], values)]

    # -- what is done -------------------------------------------------------------------------------------

    async def _move_ended(self) -> bool:
        def take(image: Image) -> tuple[bytes, bytes, str]:
            (numbers,) = image.connection.execute(_SQL["ended_numbers"]).fetchone()
            return copied(image.connection, ROWS), copied(image.connection, JOBS), numbers

        numbers = ""

        async def build(name: str) -> tuple[Entry, bytes]:
            nonlocal numbers
            rows, jobs, numbers = await self._shard.state.look(take)
            return await asyncio.to_thread(pack, name, 0, rows, jobs)

        def replace(transaction: Transaction, entry: Entry) -> bool:
            execute = transaction.execute
            found = execute(_SQL["taken"], (entry.last_row, numbers)).fetchone()
            if found != (entry.rows, entry.jobs):
                return False
            execute(_SQL["remove_rows"], (entry.last_row,))
            for table in ("payloads", "results", "jobs"):
                execute(_OPERATE[table], (numbers,))
            return True

        return await self._make(build, replace)

    async def _merge(self, parts: list[Entry]) -> bool:
        while len(parts) > 2 and sum(entry.size for entry in parts) > MAX_MERGED_BYTES:
            parts = parts[:-1]
        if len(parts) > 1 and sum(entry.size for entry in parts) > MAX_MERGED_BYTES:
            # It is as large as a segment may be.
            larger = msgspec.structs.replace(parts[0], level=parts[0].level + 1)
            await self._change(lambda transaction: put_entry(transaction, larger))
            return True
        read = await self._shard.read(parts)
        if len(read) < len(parts):
            return False
        sources = [(entry, read[entry.name].data) for entry in parts]

        async def build(name: str) -> tuple[Entry, bytes]:
            return await asyncio.to_thread(merge, name, self._shard.queue, sources)

        def replace(transaction: Transaction, _: Entry) -> bool:
            if not all(entry in entries(transaction) for entry in parts):
                return False
            retire(transaction, [entry.name for entry in parts])
            return True

        return await self._make(build, replace)

    async def _make(
        self,
        build: Callable[[str], Awaitable[tuple[Entry, bytes]]],
        replace: Callable[[Transaction, Entry], bool],
    ) -> bool:
        """Make a segment and put it in the place of its rows and jobs, which `replace` removes. Returns False if some of them are
        gone, or if the segment was given up."""
        name = f"{wall_clock():015x}-{secrets.token_hex(6)}"
        if not await self._change(lambda transaction: _begin(transaction, name)):
            return False
        entry, data = await build(name)

        def put_in_place(transaction: Transaction) -> bool:
            if not transaction.execute(_SQL["end"], (name,)).rowcount:
                return False
            if not replace(transaction, entry):
                retire(transaction, [name])
                return False
            put_entry(transaction, entry)
            return True

        path = f"{self._shard.log_folder}/{name}"
        await self._store.blobs.put(path, data)
        is_in_place = await self._change(put_in_place)
        if is_in_place:
            self._store.cache.keep(path, Segment(data, path, self._shard.queue))
        return is_in_place

    async def _remove_overdue(self) -> bool:
        """Remove overdue segments: first from the image, so that they cannot become part of the queue, then the objects."""

        def overdue(transaction: Transaction) -> list[str]:
            names = self._overdue(transaction)
            transaction.execute(_SQL["abandon"], (to_json(names),))
            return names

        names = await self._change(overdue)
        await self._store.blobs.delete([f"{self._shard.log_folder}/{name}" for name in names])
        forgotten = (to_json(names),)
        await self._change(lambda transaction: transaction.execute(_SQL["forget"], forgotten))
        return True


def _is_busy(transaction: Transaction) -> bool:
    """Return True if some process has begun lately, by any clock."""
    now = wall_clock()
    found = transaction.execute(_SQL["busy"], (now - BUSY_FOR, now + BUSY_FOR)).fetchone()
    return found is not None


def _begin(transaction: Transaction, name: str) -> bool:
    """Note the name of a segment before it is written, so that an abandoned one can be removed."""
    if _is_busy(transaction):
        return False
    transaction.execute(_SQL["begin"], (name, wall_clock()))
    return True
