"""One shard of a queue: its image in an object of the store, and its segments. A queue without shards is one.

A shard acts on every image that has landed, by whatever process it was written: it wakes waiting workers, brings jobs to the
failure queue, and begins compaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar
from zlib import crc32

import msgspec

from taskharbor.clock import Clock
from taskharbor.drivers.engine.tables import Transaction, load, to_json
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import MAX_BYTES, Cell, Term
from taskharbor.drivers.objectstore.catalog import log_folder, state_name
from taskharbor.drivers.objectstore.compaction import Compaction
from taskharbor.drivers.objectstore.image import Image, ImageCodec
from taskharbor.drivers.objectstore.places import Options
from taskharbor.drivers.objectstore.segments import Entry, Segment, SegmentCache, holding_jobs
from taskharbor.drivers.waiting import Notifications
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import Attempt, JobRecord

R = TypeVar("R")
Loaded = Mapping[str, Segment]
"""Segments by name."""

MARKS = 2**15
_TRIES = 8
"""How often a call may find that segments it needs are gone: other writers merge them, but not all the time."""
_DELIVER_AGAIN = 1.0
"""Seconds after which a job that could not be brought to its failure queue is tried again."""
_SQL = load("image", __package__)


class Shard:
    def __init__(
        self,
        blobs: Blobs,
        queue: str,
        number: int,
        *,
        options: Options,
        cache: SegmentCache,
        notifications: Notifications,
        deliver: Callable[[list[JobRecord]], Awaitable[None]],
        term: Term | None = None,
        every_pass: Callable[[Image], object] | None = None,
        clock: Clock | None = None,
        reads_only: bool = False,
    ) -> None:
        """`deliver` brings jobs to other queues. `every_pass` runs before the steps of each write. `reads_only`: what follows
        from an image is left to others."""
        self.queue = queue
        self.number = number
        self.name = f"{number}:{queue}"
        self.log_folder = log_folder(queue, number)
        self._mark = crc32(self.name.encode()) % MARKS
        self._reads_only = reads_only
        name = state_name(queue, number)
        self.cell: Cell[Image] = Cell(
            blobs,
            name,
            ImageCodec(blobs.where(name), queue),
            term=term,
            every_pass=every_pass,
            on_news=self._on_news,
            clock=clock,
        )
        self._cache = cache
        self._notifications = notifications
        self._notified_of = 0
        self._deliver = deliver
        self._deliveries: dict[str, asyncio.Task[None]] = {}
        """By the id of the job that is under way to its failure queue."""
        self._second_try: asyncio.TimerHandle | None = None
        self._is_closing = False
        self.compaction = Compaction(blobs, self.cell, cache, self.log_folder, queue, options)

    # -- numbers of rows of the log: two shards count alike, and to readers each row of a store has one of its own --

    def public_number(self, number: int) -> int:
        return number * MARKS + self._mark if number else 0

    def own_number(self, public: int) -> int:
        """The last one that is not after it."""
        return (public - self._mark) // MARKS

    def public_rows(self, rows: Iterable[Attempt]) -> list[Attempt]:
        return [msgspec.structs.replace(row, seq=self.public_number(row.seq)) for row in rows]

    # -- asking -------------------------------------------------------------------------------------------

    async def change(self, step: Callable[[Transaction], R]) -> R:
        """The answer of a step that may change the image, once it and all that follows from it for other queues has landed. A
        step may run several times, on different images."""
        answer, notices = await self.cell.change(lambda image: image.change(step))
        if notices:
            await self._delivered(notices)
        return answer

    async def look(self, step: Callable[[Transaction], R]) -> R:
        """The answer of a step that changes nothing."""
        return await self.cell.look(lambda image: image.look(step))

    async def change_with(
        self, needs: Callable[[Transaction], list[Entry]], step: Callable[[Transaction, Loaded], R]
    ) -> R:
        """As `change`, for a step that needs segments. They are read first."""
        return await self._with_segments(self.change, needs, step)

    async def look_with(
        self, needs: Callable[[Transaction], list[Entry]], step: Callable[[Transaction, Loaded], R]
    ) -> R:
        return await self._with_segments(self.look, needs, step)

    async def _with_segments(
        self,
        run: Callable[
            [Callable[[Transaction], tuple[list[Entry], list[R]]]], Awaitable[tuple[list[Entry], list[R]]]
        ],
        needs: Callable[[Transaction], list[Entry]],
        step: Callable[[Transaction, Loaded], R],
    ) -> R:
        loaded: dict[str, Segment] = {}

        def run_if_loaded(transaction: Transaction) -> tuple[list[Entry], list[R]]:
            missing = [entry for entry in needs(transaction) if entry.name not in loaded]
            return missing, [] if missing else [step(transaction, loaded)]

        misses = 0
        while True:
            missing, answers = await run(run_if_loaded)
            if not missing:
                return answers[0]
            found = await self._cache.read(self.log_folder, self.queue, [entry.name for entry in missing])
            loaded.update(found)
            if len(found) < len(missing):
                # Merged since, most likely: what the image says by now is what counts.
                misses += 1
                self.cell.must_compare()
            if misses == _TRIES:
                gone = next(entry.name for entry in missing if entry.name not in found)
                raise BackendUnavailable(
                    f"{self.cell.where}: segments of its log are missing, such as {gone}; if somebody removed them, restore them"
                )

    async def archived(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        """The jobs that segments have, by id."""
        return await self.look_with(
            lambda transaction: holding_jobs(transaction, job_ids),
            lambda transaction, loaded: {
                job_id: record
                for job_id, (_, _, record) in find_archived(transaction, loaded, job_ids).items()
            },
        )

    async def known(self, job_ids: Sequence[str]) -> set[str]:
        """The ids that this shard has, in its image or in a segment."""
        here = await self.look(lambda transaction: known_ids(transaction, job_ids))
        missing = [job_id for job_id in job_ids if job_id not in here]
        return here | (await self.archived(missing)).keys() if missing else here

    def refuse_when_full(self, added: int) -> None:
        if self.cell.size + added > MAX_BYTES:
            raise InvalidRequest(
                f"queue {self.queue!r} is full: its state has {self.cell.size / 2**20:.0f} MiB, and {MAX_BYTES // 2**20} MiB "
                "is the most; work it off, remove dead jobs, or make a store with more shards"
            )

    async def settled(self) -> None:
        """Until nothing is going on in the background."""
        await self.compaction.settled()
        await self._all_delivered()

    async def finish(self) -> None:
        """Stop what goes on in the background."""
        self._is_closing = True
        if self._second_try is not None:
            self._second_try.cancel()
        await self.compaction.close()
        await self._all_delivered()

    async def close(self) -> None:
        await self.finish()
        await self.cell.close()

    # -- what follows -------------------------------------------------------------------------------------

    def _on_news(self, image: Image) -> None:
        version = image.version()
        if version != self._notified_of:
            self._notified_of = version
            self._notifications.notify((self.queue,))
        if not self._reads_only:
            self._start_deliveries(image.outbox())
            self.compaction.consider(image)

    def _start_deliveries(self, notices: Iterable[JobRecord]) -> None:
        fresh = [notice for notice in notices if notice.id not in self._deliveries]
        if fresh:
            task = asyncio.get_running_loop().create_task(self._bring(fresh))
            for notice in fresh:
                self._deliveries[notice.id] = task
            task.add_done_callback(lambda done: self._end_delivery(done, fresh))

    async def _bring(self, notices: list[JobRecord]) -> None:
        await self._deliver(notices)
        ids = to_json([notice.id for notice in notices])
        await self.change(
            lambda transaction: transaction.connection.execute(_SQL["remove_notices"], (ids,)).rowcount
        )

    def _end_delivery(self, task: asyncio.Task[None], notices: list[JobRecord]) -> None:
        for notice in notices:
            self._deliveries.pop(notice.id, None)
        if not task.cancelled() and task.exception() is not None and not self._is_closing:
            # Whoever waits for it has the error. The job is safe in the image, and due all the same.
            loop = asyncio.get_running_loop()
            self._second_try = loop.call_later(_DELIVER_AGAIN, self._start_deliveries, notices)

    async def _delivered(self, notices: list[JobRecord]) -> None:
        self._start_deliveries(notices)
        tasks = {self._deliveries[notice.id] for notice in notices}
        await asyncio.gather(*(asyncio.shield(task) for task in tasks))

    async def _all_delivered(self) -> None:
        while self._deliveries:
            await asyncio.wait(set(self._deliveries.values()))


def known_ids(transaction: Transaction, job_ids: Sequence[str]) -> set[str]:
    """The ids that the image has."""
    rows = transaction.connection.execute(_SQL["known_ids"], (to_json(list(job_ids)),))
    return {job_id for (job_id,) in rows}


def find_archived(
    transaction: Transaction, loaded: Loaded, job_ids: Sequence[str]
) -> dict[str, tuple[Entry, int, JobRecord]]:
    """The jobs that segments have, by id, each with the segment's entry and its number."""
    found: dict[str, tuple[Entry, int, JobRecord]] = {}
    for entry in holding_jobs(transaction, job_ids):
        for job_id, (number, record) in loaded[entry.name].jobs(entry, job_ids).items():
            # An id that was removed and accepted anew may be in two segments: the later job counts.
            if job_id not in found or number > found[job_id][1]:
                found[job_id] = (entry, number, record)
    return found
