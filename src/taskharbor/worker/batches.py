"""Runs batch handlers, on the handlers' loop or a thread of its own: many jobs, one call, an outcome for each.

One call at a time. What is leased meanwhile waits and goes into the next: calls are small while there is little to do and
grow with the load, without a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from taskharbor.batch_jobs.rows import Prepared, per_row
from taskharbor.codec import CodecRegistry
from taskharbor.handlers import Handler
from taskharbor.jobs import Micros
from taskharbor.middleware import Batch, PayloadRejected, Raised, limited, set_current_batch
from taskharbor.signals import HandlerSignal
from taskharbor.worker.decide import RemoteError, describe
from taskharbor.worker.run import LEASE_LOST, SHUTDOWN, BufferedRunner, Hold, ThreadPool

log = logging.getLogger("taskharbor.worker")


class BatchRunner(BufferedRunner):
    def __init__(
        self,
        handler: Handler,
        *,
        threads: ThreadPool,
        codecs: CodecRegistry,
        now: Callable[[], Micros],
    ) -> None:
        super().__init__(codecs=codecs, now=now)
        assert handler.batch is not None
        self._handler = handler
        self._call = handler.batch
        self._threads = threads
        self._running: dict[Hold, None] = {}  # A set that keeps its order.
        self._batch = Batch(())
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False

    def abort(self, hold: Hold, reason: str) -> None:
        """One row cannot be stopped inside a call: only what waits is taken out, and a call whose leases are all lost ends."""
        if hold not in self._running:
            self._abort_unbegun(hold, reason)
        elif reason == LEASE_LOST and all(one.lost for one in self._running):
            # A cancel request for a row that runs is honoured by the store, unless the row is done by then.
            self.abort_running(reason)

    def abort_running(self, reason: str) -> None:
        # Every lost lease says so; repeating the cancellation would break into the cleaning up.
        if self._task is None or (self._batch.should_stop and reason == LEASE_LOST):
            return
        self._batch.stop(reason)
        if self._has_begun:
            # A task that is cancelled before its first step never runs at all, nor cleans up.
            self._task.cancel()

    def _pump(self) -> None:
        if self._task is None and self._buffer:
            count = min(len(self._buffer), self._call.size)
            self._running = {self._buffer.popleft(): None for _ in range(count)}
            self._batch, self._has_begun = Batch([hold.record for hold in self._running]), False
            # A context of its own: what one call binds to a context variable, the next must not see.
            self._task = self._loop.create_task(self._run(), context=self._clean_context.copy())

    # -- a call -------------------------------------------------------------------------------------------------

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
                self._settle_all_stopped(valid, batch.stop_reason)
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
            # Decoding thousands of payloads takes a while, which belongs where the handler itself runs.
            prepared: Prepared = await self._where_it_runs(
                batch, lambda: self._call.rows.prepare(batch.records, self._codecs)
            )
            for index, misfit in prepared.rejected:
                self._settle(holds[index], self._handler, Raised(PayloadRejected(misfit)))
            kept = [holds[index] for index in prepared.kept]
            outcomes = await self._outcomes(prepared, batch) if kept else []
        except asyncio.CancelledError as cancelled:
            self._settle_all_stopped(holds, batch.stop_reason, cancelled)
            return
        except Exception as error:  # Not even a table could be made of it.
            kept, outcomes = list(holds), [Raised(RemoteError(describe(error)))] * len(holds)
        for hold, outcome in zip(kept, outcomes, strict=True):
            self._settle(hold, self._handler, outcome)

    async def _outcomes(self, prepared: Prepared, batch: Batch) -> list[Any]:
        count = len(prepared.kept)
        timeouts = [record.timeout_us for record in batch.records if record.timeout_us]

        async def call() -> Any:
            returned = await self._where_it_runs(batch, lambda: self._call(prepared.table))
            return await returned if self._handler.is_async else returned

        try:
            work = limited(batch, min(timeouts), call, "the batch took") if timeouts else call()
            return per_row(await work, count)
        except asyncio.CancelledError:
            raise
        except HandlerSignal as signal:
            return [Raised(signal)] * count
        except BaseException as error:  # sys.exit() in a handler ends the batch, not the worker.
            # Put in words once, not once per row.
            return [Raised(RemoteError(describe(error)))] * count

    async def _where_it_runs(self, batch: Batch, function: Callable[[], Any]) -> Any:
        return function() if self._handler.is_async else await self._threads.run(batch, function)

    def _settle_all_stopped(
        self,
        holds: Sequence[Hold],
        reason: str | None,
        cancelled: asyncio.CancelledError | None = None,
    ) -> None:
        for hold in holds:
            if hold.settlement is not None:
                continue  # Rejected before the call began.
            if reason == SHUTDOWN:
                self._settle_stopped(hold, reason)
            elif reason != LEASE_LOST and cancelled is not None:
                # Nobody here cancelled it: the handler did so itself, which is a failure like any other.
                self._settle(hold, self._handler, Raised(cancelled))
