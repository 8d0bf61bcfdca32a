"""One queue's object, or one shard's, as the driver works with it.

A step runs on the state, together with the segments it needs. What follows from a state that has landed is seen to here,
whoever wrote it: waiting workers are woken, notices of deaths are brought to their queues, a long tail goes to a segment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from taskharbor.clock import Clock
from taskharbor.drivers.objectstore.archive import Archive
from taskharbor.drivers.objectstore.archived import Brought, QueueState, SegmentsNeeded
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cell import MAX_BYTES, Cell, Term
from taskharbor.drivers.objectstore.encoding import QueueCodec
from taskharbor.drivers.objectstore.folding import Folder
from taskharbor.drivers.objectstore.naming import log_folder, state_name
from taskharbor.drivers.objectstore.options import Options
from taskharbor.drivers.waiting import Notifications
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import JobRecord

R = TypeVar("R")

_TRIES = 8
"""How often a call may find that segments of which it had read are gone: other writers merge them, but not all the time."""
_DELIVER_AGAIN = 1.0
"""Seconds after which a notice that could not be brought to its queue is tried again."""


class QueueCell:
    def __init__(
        self,
        blobs: Blobs,
        queue: str,
        shard: int,
        shards: int,
        *,
        options: Options,
        archive: Archive,
        notifications: Notifications,
        deliver: Callable[[list[JobRecord]], Awaitable[None]],
        term: Term | None = None,
        every_pass: Callable[[QueueState], None] | None = None,
        clock: Clock | None = None,
        reads_only: bool = False,
    ) -> None:
        """`deliver` brings jobs to other queues. `reads_only`: what follows from a state is left to others."""
        self._reads_only = reads_only
        self.queue = queue
        self.shard = shard
        self.cell = Cell(
            blobs,
            state_name(queue, shard),
            QueueCodec(queue, shard, shards),
            term=term,
            every_pass=every_pass,
            on_news=self._on_news,
            clock=clock,
        )
        self._archive = archive
        self._notifications = notifications
        self._notified_of = 0
        self._deliver = deliver
        self._deliveries: dict[str, asyncio.Task[None]] = {}
        """By the id of the notice that is under way."""
        self._second_try: asyncio.TimerHandle | None = None
        self._is_closing = False
        self.folder = Folder(blobs, self.cell, archive, log_folder(queue, shard), options)
        self._log_folder = log_folder(queue, shard)

    # -- asking -------------------------------------------------------------------------------------------

    async def change(self, step: Callable[[QueueState, Brought], R]) -> R:
        """The result of a step that may change the state, once it and all that follows from it for other queues has landed."""

        def noting(state: QueueState, brought: Brought) -> tuple[R, list[JobRecord]]:
            before = len(state.outbox)
            result = step(state, brought)
            return result, state.outbox[before:]

        result, notices = await self._with_segments(self.cell.change, noting)
        if notices:
            await self._delivered(notices)
        return result

    async def look(self, step: Callable[[QueueState, Brought], R]) -> R:
        return await self._with_segments(self.cell.look, step)

    async def _with_segments(
        self,
        run: Callable[[Callable[[QueueState], R]], Awaitable[R]],
        step: Callable[[QueueState, Brought], R],
    ) -> R:
        brought: Brought = self._archive.at_hand(self._log_folder)
        misses = 0
        while True:

            def complete(state: QueueState, brought: Brought = brought) -> R:
                try:
                    return step(state, brought)
                finally:
                    state.recalled.clear()

            try:
                return await run(complete)
            except SegmentsNeeded as needed:
                read = await self._archive.read(self._log_folder, needed.names)
                brought = {**brought, **read}
                missing = [name for name in needed.names if name not in read]
                if missing:
                    misses += 1
                    if misses == _TRIES:
                        raise BackendUnavailable(
                            f"{self.cell.where}: segments of its log are missing, such as {missing[0]}; if somebody removed "
                            "them, restore them"
                        ) from None
                    # Retired since, most likely: what the state says by now is what counts.
                    self.cell.must_compare()

    def refuse_when_full(self, added: int) -> None:
        if self.cell.size + added > MAX_BYTES:
            raise InvalidRequest(
                f"queue {self.queue!r} is full: its state has {self.cell.size / 2**20:.0f} MiB, and {MAX_BYTES // 2**20} MiB "
                "is the most; work it off, remove dead jobs, or make a store with more shards"
            )

    def lead(self, term: Term | None) -> None:
        self.cell.lead(term)

    async def settled(self) -> None:
        """Until nothing is going on in the background."""
        await self.folder.settled()
        await self._all_delivered()

    async def _all_delivered(self) -> None:
        while self._deliveries:
            await asyncio.wait(set(self._deliveries.values()))

    async def finish(self) -> None:
        """Stop what goes on in the background."""
        self._is_closing = True
        if self._second_try is not None:
            self._second_try.cancel()
        await self.folder.close()
        await self._all_delivered()

    async def close(self) -> None:
        await self.finish()
        await self.cell.close()

    # -- what follows -------------------------------------------------------------------------------------

    def _on_news(self, state: QueueState) -> None:
        if state.stirs != self._notified_of:
            self._notified_of = state.stirs
            self._notifications.notify((self.queue,))
        if self._reads_only:
            return
        if state.outbox:
            self._start_deliveries(state.outbox)
        self.folder.consider(state)

    def _start_deliveries(self, notices: Iterable[JobRecord]) -> None:
        fresh = [notice for notice in notices if notice.id not in self._deliveries]
        if fresh:
            task = asyncio.get_running_loop().create_task(self._bring(fresh))
            for notice in fresh:
                self._deliveries[notice.id] = task
            task.add_done_callback(lambda done: self._end_delivery(done, fresh))

    async def _bring(self, notices: list[JobRecord]) -> None:
        await self._deliver(notices)
        ids = frozenset(notice.id for notice in notices)
        await self.cell.change(lambda state: state.strike_off(ids))

    def _end_delivery(self, task: asyncio.Task[None], notices: list[JobRecord]) -> None:
        for notice in notices:
            self._deliveries.pop(notice.id, None)
        if not task.cancelled() and task.exception() is not None and not self._is_closing:
            # Whoever waits for it has the error. The notice is safe in the state, and due all the same.
            loop = asyncio.get_running_loop()
            self._second_try = loop.call_later(_DELIVER_AGAIN, self._start_deliveries, notices)

    async def _delivered(self, notices: list[JobRecord]) -> None:
        self._start_deliveries(notices)
        tasks = {self._deliveries[notice.id] for notice in notices}
        await asyncio.gather(*(asyncio.shield(task) for task in tasks))
