"""What readers see of a store: its logs, each as its queue's state says it is. Nothing is written here, not even a catalog.

A log is that of one queue, or of one shard of it. What was read of a state is kept and compared with the object the next
time, so that a stream that looks for news every second moves no bytes where there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from taskharbor.bulk.contract import HistoryGone
from taskharbor.drivers.objectstore.blobs import Blob, Blobs, Unchanged, Version
from taskharbor.drivers.objectstore.catalog import Catalog
from taskharbor.drivers.objectstore.encoding import Head, opened
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.envelope import unseal
from taskharbor.drivers.objectstore.locating import Place
from taskharbor.drivers.objectstore.naming import log_folder, state_name
from taskharbor.drivers.objectstore.segments import Segment, size_with_rows
from taskharbor.errors import BackendUnavailable

_AT_ONCE = 32
"""Objects that are read at the same time."""
_LARGE = 256 * 1024
"""Bytes of a segment from which on two requests for a part of it cost less than one for all."""
_BEGINNING = 64 * 1024
"""Enough for nearly every header."""

A = TypeVar("A")
R = TypeVar("R")


class Log(NamedTuple):
    """One log at one moment."""

    queue: str
    shard: int
    segments: Sequence[SegmentEntry]
    tail: bytes
    """The rows that are in no segment, as they stand in the state."""
    last: int
    """The number of the last row that was ever written."""
    trimmed: int
    """The greatest number of a row that retention removed."""


class QueueDocument(NamedTuple):
    """A queue's state, unpacked no further than to its parts."""

    queue: str
    shard: int
    body: bytes
    head: Head
    jobs: memoryview
    rows: memoryview


class Logs:
    def __init__(self, blobs: Blobs, shards: int | None = None) -> None:
        self.blobs = blobs
        self.catalog = Catalog(blobs, shards=shards)
        self._kept: dict[Place, tuple[Version, Log]] = {}

    async def open(self) -> None:
        if await self.catalog.cell.look(lambda state: state.entries) is None:
            raise BackendUnavailable(
                f"{self.blobs.place}: there is no such store; it is made when the first job is enqueued"
            )
        await self.catalog.open()

    async def close(self) -> None:
        await self.catalog.close()
        await self.blobs.close()

    async def places(self, queue: str | None = None) -> list[Place]:
        """Where logs can be: of all queues, or of one."""
        queues = [name for name in await self.catalog.queues() if queue in (None, name)]
        return [(name, shard) for name in queues for shard in range(self.catalog.shards)]

    # -- states -------------------------------------------------------------------------------------------

    async def all(self, queue: str | None = None) -> list[Log]:
        """Those that are there."""
        found = await together(await self.places(queue), self.log)
        return [log for log in found if log is not None]

    async def log(self, place: Place) -> Log | None:
        """None: nobody has used the queue yet."""
        name = state_name(*place)
        kept = self._kept.get(place)
        blob: Blob | Unchanged | None
        if kept is None:
            blob = await self.blobs.read(name)
        else:
            blob = await self.blobs.read_if_changed(name, kept[0])
            if isinstance(blob, Unchanged):
                return kept[1]
        document = self._document(place, blob)
        if blob is None or document is None:
            return None
        head = document.head
        log = Log(*place, head.segments, bytes(document.rows), head.last_row, head.trimmed)
        self._kept[place] = (blob.version, log)
        return log

    async def document(self, place: Place) -> QueueDocument | None:
        return self._document(place, await self.blobs.read(state_name(*place)))

    def _document(self, place: Place, blob: Blob | None) -> QueueDocument | None:
        if blob is None:
            return None
        _, body = unseal(blob.data, f"{self.blobs.place}/{state_name(*place)}")
        if not body:
            return None
        head, jobs, rows = opened(body, place[0])
        return QueueDocument(*place, body, head, memoryview(jobs), memoryview(rows))

    # -- segments -----------------------------------------------------------------------------------------

    async def segment(self, place: Place, entry: SegmentEntry) -> Segment:
        where = self._where(place, entry)
        return Segment(await self._start_of(place, entry, entry.size), where)

    async def segment_of_rows(self, place: Place, entry: SegmentEntry) -> Segment:
        """Of a large one only its beginning, which has all its rows: jobs with their payloads may be most of it."""
        where = self._where(place, entry)
        size = _BEGINNING if entry.jobs and entry.size > _LARGE else entry.size
        while True:
            data = await self._start_of(place, entry, size)
            size = size_with_rows(data, where)
            if size <= len(data) or entry.size <= len(data):
                return Segment(data, where)

    async def _start_of(self, place: Place, entry: SegmentEntry, size: int) -> bytes:
        data = await self.blobs.read_start(f"{log_folder(*place)}/{entry.name}", size)
        if data is None:
            raise HistoryGone(
                f"{self._where(place, entry)} was there when this read was planned, and is gone: it was replaced, and the read "
                "took longer than replaced segments are kept. Read again (start a stream's query again: it goes on where it "
                "was), with more parallelism"
            )
        return data

    def _where(self, place: Place, entry: SegmentEntry) -> str:
        return f"{self.blobs.place}/{log_folder(*place)}/{entry.name}"


async def together(items: Iterable[A], work: Callable[[A], Awaitable[R]]) -> list[R]:
    """The results of all, in order, with a bounded number under way."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(item: A) -> R:
        async with room:
            return await work(item)

    return list(await asyncio.gather(*map(one, items)))
