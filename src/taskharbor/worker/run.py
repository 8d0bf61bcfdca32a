"""Runs handlers, on the handlers' own event loop and nowhere near the backend's.

Leased jobs come in by the batch, wait in a buffer until one of `concurrency` places is free, run through their
middleware chain, and leave with a settlement. A handler that blocks this loop delays its neighbours; it delays
no heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context

from taskharbor.codec import CodecRegistry
from taskharbor.context import Job, set_current_job
from taskharbor.drivers.contract import Discard, Release
from taskharbor.handlers import Handler
from taskharbor.jobs import Failure, JobRecord, Micros
from taskharbor.middleware import Call
from taskharbor.middleware.recover import Raised
from taskharbor.worker.decide import decide, no_handler
from taskharbor.worker.hold import Hold

log = logging.getLogger("taskharbor.worker")

LEASE_LOST = "lease lost"
CANCELLED = "cancelled"
SHUTDOWN = "shutdown"


class Runner:
    """Every method runs on the handlers' loop; the counters may be read from anywhere."""

    def __init__(
        self,
        chains: Mapping[str, tuple[Handler, Call]],
        *,
        concurrency: int,
        codecs: CodecRegistry,
        now: Callable[[], Micros],
        finished: Callable[[Hold], None],
    ) -> None:
        self._chains = chains
        self._concurrency = concurrency
        self._codecs = codecs
        self._now = now
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Hold] = deque()
        self._holds: dict[Hold, None] = {}  # A set that keeps its order.
        self._running = 0
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
        """Ask a handler to stop, and cancel it where that is possible."""
        job = hold.job
        if job is None:
            self._abort_unbegun(hold, reason)
        elif not (job.should_stop and reason == CANCELLED):
            # Every heartbeat repeats a cancel request; repeating the cancellation would break into the cleaning up.
            job.stop(reason)
            if hold.task is not None:
                hold.task.cancel()

    def _abort_unbegun(self, hold: Hold, reason: str) -> None:
        if hold.task is not None:
            # Due, but it has not run yet: a task cancelled now never does, so it could not say how it ended.
            hold.task.cancel()
        else:
            try:
                self._buffer.remove(hold)
            except ValueError:
                return  # It has left already.
        self._settle_stopped(hold, reason)
        self._leave(hold)
        self._pump()

    def release_buffered(self) -> None:
        """Give back what has not begun, and whatever still comes."""
        self._is_closing = True
        while self._buffer:
            hold = self._buffer.popleft()
            hold.settlement = Release(hold.record.id, hold.token)
            self._leave(hold)

    def abort_running(self, reason: str) -> None:
        for hold in list(self._holds):
            self.abort(hold, reason)

    def _pump(self) -> None:
        buffer = self._buffer
        while buffer and self._running < self._concurrency:
            hold = buffer.popleft()
            if hold.lost:
                self._leave(hold)
                continue
            self._running += 1
            self._holds[hold] = None
            # A context of its own: what one handler binds to a context variable, the next must not see.
            hold.task = self._loop.create_task(self._run(hold), context=self._clean_context.copy())

    async def _run(self, hold: Hold) -> None:
        record = hold.record
        entry = self._chains.get(record.type)
        try:
            now = self._now()
            if hold.lost or hold.expires_at_us <= now:
                pass  # A worker that was frozen comes to it late: by now it may run elsewhere.
            elif entry is None:
                hold.settlement = no_handler(record)
            else:
                handler, chain = entry
                job = hold.job = Job(record, now, _reporter(hold))
                set_current_job(job)
                outcome = await chain(job)
                hold.settlement = decide(record, handler, outcome, self._codecs, self._now())
        except asyncio.CancelledError as cancelled:
            self._settle_cancelled(hold, cancelled)
        except BaseException as bug:
            # Ours, not the handler's (recover catches those): the job must not be lost for it.
            log.exception("running %s %s failed inside the worker", record.type, record.id)
            hold.settlement = decide(
                record, self._chains[record.type][0], Raised(bug), self._codecs, self._now()
            )
        finally:
            self._leave(hold)
            self._pump()

    def _settle_cancelled(self, hold: Hold, cancelled: asyncio.CancelledError) -> None:
        assert hold.job is not None
        reason = hold.job.stop_reason
        if reason in (LEASE_LOST, CANCELLED, SHUTDOWN):
            self._settle_stopped(hold, reason)
        else:  # Nobody here cancelled it: the handler did so itself, which is a failure like any other.
            handler, _ = self._chains[hold.record.type]
            hold.settlement = decide(hold.record, handler, Raised(cancelled), self._codecs, self._now())

    def _settle_stopped(self, hold: Hold, reason: str | None) -> None:
        if reason == CANCELLED:
            failure = Failure("Cancelled", "cancelled while running")
            hold.settlement = Discard(hold.record.id, hold.token, failure)
        elif reason == SHUTDOWN:
            hold.settlement = Release(hold.record.id, hold.token)
        # And for a lost lease nothing is written.

    def _leave(self, hold: Hold) -> None:
        if hold in self._holds:
            del self._holds[hold]
            self._running -= 1
        hold.task = None
        self.completed += 1
        self._finished(hold)


def _reporter(hold: Hold) -> Callable[[JobRecord, bytes], None]:
    def report(_: JobRecord, progress: bytes) -> None:
        hold.progress = progress

    return report
