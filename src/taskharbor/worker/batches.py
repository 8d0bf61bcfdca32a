"""Runs batch handlers, on the handlers' loop or a thread of its own: many jobs, one call, an outcome for each.

One call at a time. What is leased meanwhile waits and goes into the next: calls are small while there is little to do and
grow with the load, without a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from typing import Any

from taskharbor.batch_jobs.batch import Batch, set_current_batch
from taskharbor.batch_jobs.handler import BatchHandler
from taskharbor.batch_jobs.outcomes import per_row
from taskharbor.batch_jobs.rows import Prepared
from taskharbor.codec import CodecRegistry
from taskharbor.drivers.contract import Discard, Release
from taskharbor.errors import JobTimeout
from taskharbor.jobs import SECOND, Failure, Micros
from taskharbor.middleware import TIMEOUT, PayloadRejected, Raised
from taskharbor.signals import HandlerSignal
from taskharbor.worker.decide import RemoteError, decide, describe
from taskharbor.worker.run import CANCELLED, LEASE_LOST, SHUTDOWN, Hold
from taskharbor.worker.threads import ThreadPool

log = logging.getLogger("taskharbor.worker")

_TOO_LONG = "the batch took longer than its timeout of {:g} s"


class BatchRunner:
    """Every method runs on the handlers' loop; the counter may be read from anywhere."""

    finished: Callable[[Hold], None]
    """Takes every job that leaves. The settle loop sets it."""

    def __init__(
        self,
        handler: BatchHandler,
        *,
        threads: ThreadPool,
        codecs: CodecRegistry,
        now: Callable[[], Micros],
    ) -> None:
        self._handler = handler
        self._threads = threads
        self._codecs = codecs
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Hold] = deque()
        self._running: dict[Hold, None] = {}  # A set that keeps its order.
        self._batch = Batch(())
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._clean_context: Context = copy_context()
        self._is_closing = False
        self.completed = 0
        """Executions that have left this runner, however they ended."""

    def feed(self, holds: Sequence[Hold]) -> None:
        self._buffer.extend(holds)
        if self._is_closing:
            self.release_buffered()
        else:
            self._pump()

    def abort(self, hold: Hold, reason: str) -> None:
        """One row cannot be stopped inside a call: only what waits is taken out, and a call whose leases are all lost ends."""
        if hold in self._running:
            # A cancel request for a row that runs is honoured by the store, unless the row is done by then.
            if reason == LEASE_LOST and all(one.lost for one in self._running):
                self._stop_call(reason)
            return
        try:
            self._buffer.remove(hold)
        except ValueError:
            return  # It has left already.
        if reason == CANCELLED:
            failure = Failure("Cancelled", "cancelled before it ran")
            hold.settlement = Discard(hold.record.id, hold.token, failure)
        elif reason == SHUTDOWN:
            hold.settlement = Release(hold.record.id, hold.token)
        self._leave([hold])

    def release_buffered(self) -> None:
        """Give back what has not begun, and whatever still comes."""
        self._is_closing = True
        waiting = list(self._buffer)
        self._buffer.clear()
        for hold in waiting:
            hold.settlement = Release(hold.record.id, hold.token)
        self._leave(waiting)

    def abort_running(self, reason: str) -> None:
        self._stop_call(reason)

    def _stop_call(self, reason: str) -> None:
        # Every lost lease says so; repeating the cancellation would break into the cleaning up.
        if self._task is None or (self._batch.should_stop and reason == LEASE_LOST):
            return
        self._batch.stop(reason)
        if (
            self._has_begun
        ):  # A task that is cancelled before its first step never runs at all, nor cleans up.
            self._task.cancel()

    # -- a call -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        if self._task is None and self._buffer:
            count = min(len(self._buffer), self._handler.size)
            self._running = {self._buffer.popleft(): None for _ in range(count)}
            self._batch, self._has_begun = Batch([hold.record for hold in self._running]), False
            # A context of its own: what one call binds to a context variable, the next must not see.
            self._task = self._loop.create_task(self._run(), context=self._clean_context.copy())

    async def _run(self) -> None:
        holds, batch = list(self._running), self._batch
        self._has_begun = True
        try:
            now = self._now()
            # A worker that was frozen comes to some late: by now they may run elsewhere.
            valid = [hold for hold in holds if not hold.lost and hold.expires_at_us > now]
            batch.records = [hold.record for hold in valid]
            set_current_batch(batch)
            if batch.should_stop:
                self._settle_stopped(valid, batch.stop_reason)
            elif valid:
                await self._settle_all(valid, batch)
        except BaseException:
            # Ours, not the handler's. Nothing is written: the leases expire and the jobs run again.
            log.exception("running a batch of %s failed inside the worker", self._handler.type)
        finally:
            self._task = None
            self._running = {}
            self._leave(holds)
            self._pump()

    async def _settle_all(self, holds: Sequence[Hold], batch: Batch) -> None:
        try:
            prepared = await self._prepare(batch)
            for index, misfit in prepared.rejected:
                self._settle(holds[index], Raised(PayloadRejected(misfit)))
            kept = [holds[index] for index in prepared.kept]
            outcomes = await self._outcomes(prepared, batch) if kept else []
        except asyncio.CancelledError as cancelled:
            self._settle_stopped(holds, batch.stop_reason, cancelled)
            return
        except Exception as error:  # Not even a table could be made of it.
            kept, outcomes = list(holds), [Raised(RemoteError(describe(error)))] * len(holds)
        for hold, outcome in zip(kept, outcomes, strict=True):
            self._settle(hold, outcome)

    async def _prepare(self, batch: Batch) -> Prepared:
        def prepare() -> Prepared:
            return self._handler.rows.prepare(batch.records, self._codecs)

        # Decoding thousands of payloads takes a while, which belongs where the handler itself runs.
        prepared: Prepared = prepare() if self._handler.is_async else await self._threads.run(batch, prepare)
        return prepared

    async def _outcomes(self, prepared: Prepared, batch: Batch) -> list[Any]:
        count = len(prepared.kept)
        try:
            return per_row(await self._call(prepared, batch), count)
        except asyncio.CancelledError:
            raise
        except HandlerSignal as signal:
            return [Raised(signal)] * count
        except BaseException as error:  # sys.exit() in a handler ends the batch, not the worker.
            # Put in words once, not once per row.
            return [Raised(RemoteError(describe(error)))] * count

    async def _call(self, prepared: Prepared, batch: Batch) -> Any:
        handler = self._handler
        limits = [record.timeout_us for record in batch.records if record.timeout_us]
        seconds = min(limits) / SECOND if limits else None
        try:
            async with asyncio.timeout(seconds) as scope:
                frame = handler.view(prepared.table)
                if handler.is_async:
                    return await handler.batch_function(frame)
                return await self._threads.run(batch, lambda: handler.batch_function(frame))
        except TimeoutError as error:
            if not scope.expired():
                raise  # The handler's own.
            batch.stop(TIMEOUT)
            raise JobTimeout(_TOO_LONG.format(seconds)) from error
        except asyncio.CancelledError as error:
            # A thread past its time is waited for; whoever cancels it meanwhile does not undo that.
            if scope.expired() and batch.stop_reason == TIMEOUT:
                raise JobTimeout(_TOO_LONG.format(seconds)) from error
            raise

    def _settle(self, hold: Hold, outcome: Any) -> None:
        hold.settlement = decide(hold.record, self._handler, outcome, self._codecs, self._now())

    def _settle_stopped(
        self,
        holds: Sequence[Hold],
        reason: str | None,
        cancelled: asyncio.CancelledError | None = None,
    ) -> None:
        for hold in holds:
            if hold.settlement is not None:
                continue  # Rejected before the call began.
            if reason == SHUTDOWN:
                hold.settlement = Release(hold.record.id, hold.token)
            elif reason != LEASE_LOST and cancelled is not None:
                # Nobody here cancelled it: the handler did so itself, which is a failure like any other.
                self._settle(hold, Raised(cancelled))

    def _leave(self, holds: Sequence[Hold]) -> None:
        # Counted before any is let go: the fetch loop would otherwise lease a handful for the first few that left.
        self.completed += len(holds)
        for hold in holds:
            self.finished(hold)
