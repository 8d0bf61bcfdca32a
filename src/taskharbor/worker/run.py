"""Runs handlers, on the handlers' own event loop and nowhere near the backend's. A leased job is a `Hold` meanwhile.

Leased jobs come in by the batch and wait in a buffer. At most `concurrency` lanes take them from there, one after the
other: each runs a job through its middleware chain and leaves its settlement. A lane is one asyncio task, and goes on
to the next job as long as none of them had to wait: a task for each would cost more than everything else a quick
job needs, while a job that waits has its task to itself. A handler that blocks this loop delays its neighbours;
it delays no heartbeat. Batch handlers take many jobs in one call (`BatchRunner`). Plain functions run on threads
(`ThreadPool`).

A job whose lease ran out before is a suspect: it may be what killed its worker. Suspects run one at a time, in a process of
their own where they can, and otherwise alone in this one: then their next crash is charged to no other job.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from itertools import islice
from types import coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from taskharbor.codec import CodecRegistry
from taskharbor.drivers.contract import Ack, Discard, Release, Settlement
from taskharbor.errors import RemoteError
from taskharbor.handlers import Handler
from taskharbor.jobs import Failure, JobRecord, Micros
from taskharbor.middleware import (
    TIMEOUT,
    Batch,
    Call,
    Job,
    PayloadRejected,
    Raised,
    Stoppable,
    is_overdue,
    limited,
    set_current_batch,
    set_current_job,
)
from taskharbor.signals import find_signal
from taskharbor.worker.decide import decide, describe, no_handler
from taskharbor.worker.logs import log_trace

if TYPE_CHECKING:
    from taskharbor.batch_jobs import Prepared
    from taskharbor.worker.processes import SuspectPool

log = logging.getLogger("taskharbor.worker")

LEASE_LOST = "lease lost"
CANCELLED = "cancelled"
SHUTDOWN = "shutdown"

_BURST_SECONDS = 0.005
"""Seconds that a lane may run jobs that never wait. Then the rest of the loop gets a turn."""
_ENDED = object()
"""Stands for what a job waits for, where it has ended without a wait."""
MOST_LOST = 3
"""The threads that a worker may lose to handlers that do not come back. With one more it stops, for another process."""


class Hold(msgspec.Struct, eq=False):
    """One leased job in a worker's hands, from reserve to settled.

    Shared by the backend's thread and the handlers' thread; each field has one writer.

    The backend's thread owns token, expiry, `reported`, `lost` and `settling`; the handlers' thread owns `progress`,
    `job`, `task` and `settlement`.
    """

    record: JobRecord
    token: str
    expires_at_us: Micros
    progress: bytes | None = None
    reported: bytes | None = None
    """The progress the backend has already."""
    lost: bool = False
    """The lease is gone: whatever the handler does, nothing is written for it."""
    settling: bool = False
    job: Stoppable | None = None
    """The job or the batch that runs."""
    task: asyncio.Task[Any] | None = None
    """The task of a handler that waits."""
    settlement: Settlement | None = None
    """The settlement of the execution, once it has ended."""
    size: int = 1
    """The places that it takes; 0 for a suspect that runs beside them."""

    @property
    def is_on_thread(self) -> bool:
        """True while a thread runs the handler, whatever became of the call that waits for it. Any thread may ask."""
        call = None if self.job is None else self.job.thread_call
        return call is not None and not call.has_ended

    def report(self, _: JobRecord, progress: bytes) -> None:
        """Store the handler's progress; the next heartbeat sends it."""
        self.progress = progress


class BufferedRunner(abc.ABC):
    """Takes leased jobs in by the batch, runs them by and by, and lets each go exactly once.

    Every other method than `call` runs on the handlers' loop; the counter may be read from anywhere.
    """

    finished: Callable[[Sequence[Hold]], None]
    """Takes the jobs that leave. The settle loop sets it."""

    def __init__(
        self, *, codecs: CodecRegistry, now: Callable[[], Micros], in_process: Iterable[str] = ()
    ) -> None:
        self.in_process = frozenset(in_process)
        """The types whose handlers run in this process: a job of another type cannot take it down."""
        self.isolated: dict[str, tuple[Handler, Call]] = {}
        """Handlers whose suspects run in a process of their own, with their chains. Suspects of the others run alone in this
        one."""
        self._codecs = codecs
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Hold] = deque()
        self._suspects: deque[Hold] = deque()
        """Suspects that wait for the process of suspects."""
        self._parked: deque[Hold] = deque()
        """The suspect that waits until nothing else runs."""
        self._clean_context: Context = copy_context()
        self._is_closing = False
        self.completed = 0
        """Places of the executions that have left this runner, however they ended."""

    def call(self, method: Callable[..., object], *arguments: Any) -> None:
        """From any thread: call this on the handlers' loop."""
        self._loop.call_soon_threadsafe(method, *arguments)

    def feed(self, holds: Sequence[Hold], suspects: Sequence[Hold] = ()) -> None:
        self._buffer.extend(holds)
        self._suspects.extend(suspects)
        if self._is_closing:
            self.release_buffered()
        else:
            self._pump()

    def release_buffered(self) -> None:
        """Give back what has not begun, and whatever still comes."""
        self._is_closing = True
        self._release_waiting()

    def give_way(self, holds: Sequence[Hold] = (), suspects: Sequence[Hold] = ()) -> None:
        """Give back what has not begun, these included. Only the suspect waits, if there is one."""
        self._buffer.extend(holds)
        self._release_waiting()
        self._parked.extend(suspects)
        if self._is_closing:
            self._release_waiting()

    def begin_alone(self, suspect: Hold) -> None:
        """Begin it, unless it was asked to stop while it waited."""
        if suspect in self._parked:
            self._parked.clear()
            self._buffer.append(suspect)
            self._pump()

    def _release_waiting(self) -> None:
        waiting = [*self._buffer, *self._suspects, *self._parked]
        for line in (self._buffer, self._suspects, self._parked):
            line.clear()
        self._release(waiting)

    def _release(self, holds: Sequence[Hold]) -> None:
        for hold in holds:
            hold.settlement = Release(hold.record.id, hold.token)
        self._leave(holds)

    @abc.abstractmethod
    def abort(self, hold: Hold, reason: str) -> None:
        """Ask the execution of one job to stop."""

    @abc.abstractmethod
    def abort_running(self, reason: str) -> None:
        """Ask all executions that have begun to stop."""

    @abc.abstractmethod
    def _pump(self) -> None:
        """Begin what is in the buffer, as far as there is room."""

    def _abort_unbegun(self, hold: Hold, reason: str) -> None:
        for line in (self._buffer, self._suspects, self._parked):
            if hold in line:  # Or it has left already.
                line.remove(hold)
                self._settle_stopped(hold, reason)
                self._leave([hold])

    def _settle(self, hold: Hold, handler: Handler, outcome: Any) -> None:
        hold.settlement = decide(hold.record, handler, outcome, self._codecs, self._now())

    def _settle_stopped(self, hold: Hold, reason: str | None) -> None:
        if reason == CANCELLED:
            when = "before it ran" if hold.job is None else "while running"
            hold.settlement = Discard(hold.record.id, hold.token, Failure("Cancelled", f"cancelled {when}"))
        elif reason == SHUTDOWN:
            hold.settlement = Release(hold.record.id, hold.token)
        # And for a lost lease nothing is written.

    def _leave(self, holds: Sequence[Hold]) -> None:
        # Counted before any is let go: the fetch loop would otherwise lease a handful for the first few that left.
        self.completed += sum([hold.size for hold in holds])
        self.finished(holds)


class Runner(BufferedRunner):
    """Runs jobs one by one, on `concurrency` places. They begin in the order of their leases: one that needs more places than are
    free waits for them, and so do those behind it."""

    def __init__(
        self,
        chains: Mapping[str, tuple[Handler, Call]],
        *,
        concurrency: int,
        codecs: CodecRegistry,
        now: Callable[[], Micros],
        in_process: Iterable[str] = (),
        suspects: SuspectPool,
    ) -> None:
        super().__init__(codecs=codecs, now=now, in_process=in_process)
        self._chains = chains
        self._pool = suspects
        self.isolated = suspects.chains
        self._suspect: asyncio.Task[None] | None = None
        self._concurrency = concurrency
        self._waiting: dict[Hold, None] = {}
        """Executions that wait for something, oldest first. All others end within one turn of the loop."""
        self._lanes = 0
        """Places of the lanes that are under way."""

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

    def abort_running(self, reason: str) -> None:
        for hold in list(self._waiting):
            self.abort(hold, reason)

    def _pump(self) -> None:
        free = self._concurrency - self._lanes
        for size in [hold.size for hold in islice(self._buffer, free)]:
            if self._lanes + size > self._concurrency:
                break
            self._lanes += size
            self._loop.create_task(self._lane(size), context=self._clean_context.copy())
        while self._suspects and self._suspect is None:
            hold = self._suspects.popleft()
            if hold.record.type in self.isolated:
                run = self._run_suspect(hold)
                self._suspect = self._loop.create_task(run, context=self._clean_context.copy())
            else:  # Its process could not start. The next claim finds that it has to run alone.
                self._release([hold])

    async def _lane(self, size: int) -> None:
        """Run the jobs in the buffer one after the other, as long as none of them has to wait or is of another size."""
        task = asyncio.current_task()
        assert task is not None
        buffer, chains, time = self._buffer, self._chains, self._loop.time
        yield_at = time() + _BURST_SECONDS
        try:
            # A cancellation that a handler left behind strikes at the next wait: not in the next job.
            while buffer and not task.cancelling():
                if time() >= yield_at:
                    await asyncio.sleep(0)
                    yield_at = time() + _BURST_SECONDS
                    continue
                hold = buffer.popleft()
                if hold.size != size:
                    buffer.appendleft(hold)
                    return
                # A context of its own: what one handler binds to a context variable, the next must not see.
                context = self._clean_context.copy()
                steps = self._execute(hold, chains).__await__()
                awaited = context.run(next, steps, _ENDED)
                if awaited is not _ENDED:
                    hold.task = task
                    self._waiting[hold] = None
                    await _continue(steps, context, awaited)
                    # Things are bound to the task of a job that waited (scoped sessions, a cancellation that strikes
                    # late), and none of that is the next job's business: a new lane goes on.
                    return
        finally:
            self._lanes -= size
            self._pump()

    async def _run_suspect(self, hold: Hold) -> None:
        """Run it in the process of suspects. With the last of them the process ends."""
        hold.task = asyncio.current_task()
        self._waiting[hold] = None
        try:
            await self._execute(hold, self.isolated)
            if not self._suspects:
                await self._pool.close()
        finally:
            self._suspect = None
            self._pump()

    async def _execute(self, hold: Hold, chains: Mapping[str, tuple[Handler, Call]]) -> None:
        """Run one job and leave its settlement. The whole of it happens in the job's context."""
        record = hold.record
        try:
            now = self._now()
            entry = chains.get(record.type)
            if hold.lost or hold.expires_at_us <= now:
                pass  # A worker that was frozen comes to it late: by now it may run elsewhere.
            elif entry is None:
                hold.settlement = no_handler(record)
            else:
                handler, chain = entry
                job = hold.job = Job(record, now, hold.report)
                set_current_job(job)
                outcome = await chain(job)
                if outcome is None:
                    hold.settlement = Ack(record.id, hold.token)
                else:
                    self._settle(hold, handler, outcome)
        except asyncio.CancelledError as cancelled:
            assert hold.job is not None
            reason = hold.job.stop_reason
            if reason in (LEASE_LOST, CANCELLED, SHUTDOWN):
                self._settle_stopped(hold, reason)
            else:  # Nobody here cancelled it: the handler did so itself, which is a failure like any other.
                self._settle(hold, self._chains[record.type][0], Raised(cancelled))
        except BaseException as bug:
            # Ours, not the handler's (recover catches those): the job must not be lost for it.
            log.exception("running %s %s failed inside the worker", record.type, record.id)
            self._settle(hold, self._chains[record.type][0], Raised(bug))
        finally:
            if hold.task is not None:
                del self._waiting[hold]
                hold.task = None
            self.completed += hold.size
            self.finished((hold,))


@coroutine
def _continue(steps: Generator[Any, Any, None], context: Context, awaited: Any) -> Generator[Any, Any, None]:
    """Await the rest of an execution in a context that is not the awaiting task's, step by step."""
    run, send, throw = context.run, steps.send, steps.throw
    with suppress(StopIteration):
        while True:
            try:
                value = yield awaited
            except BaseException as thrown:
                awaited = run(throw, thrown)
            else:
                awaited = run(send, value)


# -- batches -----------------------------------------------------------------------------------------------


class BatchRunner(BufferedRunner):
    """Runs a batch handler: many jobs, one call, an outcome for each. On the handlers' loop, or on a thread.

    One call at a time. Jobs that are leased meanwhile wait and go into the next: calls are small while there is little to do and
    grow with the load, without a timer.
    """

    def __init__(
        self, handler: Handler, *, threads: ThreadPool, codecs: CodecRegistry, now: Callable[[], Micros]
    ) -> None:
        super().__init__(codecs=codecs, now=now, in_process=[handler.type])
        assert handler.batch is not None
        self._handler = handler
        self._call = handler.batch
        self._threads = threads
        self._running: dict[Hold, None] = {}  # A set that keeps its order.
        self._batch = Batch(())
        self._task: asyncio.Task[None] | None = None
        """The task of the call, once it has begun: one that is cancelled before its first step never runs, nor cleans up."""

    def abort(self, hold: Hold, reason: str) -> None:
        """One row cannot be stopped inside a call: only what waits is taken out, and a call whose leases are all lost ends."""
        if hold not in self._running:
            self._abort_unbegun(hold, reason)
        elif reason == LEASE_LOST and all(one.lost for one in self._running):
            # A cancel request for a row that runs is honoured by the store, unless the row is done by then.
            self.abort_running(reason)

    def abort_running(self, reason: str) -> None:
        # Every lost lease says so; repeating the cancellation would break into the cleaning up.
        if not self._running or (self._batch.should_stop and reason == LEASE_LOST):
            return
        self._batch.stop(reason)
        if self._task is not None:
            self._task.cancel()

    def _pump(self) -> None:
        if self._buffer and not self._running:
            count = min(len(self._buffer), self._call.size)
            self._running = {self._buffer.popleft(): None for _ in range(count)}
            self._batch = Batch([hold.record for hold in self._running])
            for hold in self._running:
                hold.job = self._batch
            # A context of its own: what one call binds to a context variable, the next must not see.
            self._loop.create_task(self._run(), context=self._clean_context.copy())

    # -- a call -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        holds, batch, self._task = list(self._running), self._batch, asyncio.current_task()
        began = self._loop.time()
        log.debug("%s starts with %d jobs", self._handler.type, len(holds))
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
            seconds = self._loop.time() - began
            log.debug("%s ended with %d jobs after %.3f s", self._handler.type, len(holds), seconds)
            self._leave(holds)
            self._pump()

    async def _settle_all(self, holds: Sequence[Hold], batch: Batch) -> None:
        kept = list(holds)
        try:
            # Decoding thousands of payloads takes a while, which belongs where the handler itself runs.
            prepared: Prepared = await self._where_it_runs(
                batch, lambda: self._call.rows.prepare(batch.records, self._codecs)
            )
            for index, misfit in prepared.rejected:
                self._settle(holds[index], self._handler, Raised(PayloadRejected(misfit)))
            kept = [holds[index] for index in prepared.kept]
            outcomes = (
                self._call.outcomes(await self._returned(prepared.table, batch), len(kept)) if kept else []
            )
        except asyncio.CancelledError as cancelled:
            self._settle_all_stopped(holds, batch.stop_reason, cancelled)
            return
        except BaseException as error:  # sys.exit() in a handler ends the batch, not the worker.
            # A failure is put in words once, not once per row.
            outcomes = [Raised(error if find_signal(error) else RemoteError(describe(error)))] * len(kept)
        for hold, outcome in zip(kept, outcomes, strict=True):
            if outcome is None:
                hold.settlement = Ack(hold.record.id, hold.token)
            else:
                self._settle(hold, self._handler, outcome)

    async def _returned(self, table: Any, batch: Batch) -> Any:
        timeouts = [record.timeout_us for record in batch.records if record.timeout_us]

        async def call() -> Any:
            returned = await self._where_it_runs(batch, lambda: self._call(table))
            return await returned if self._handler.is_async else returned

        return await (limited(batch, min(timeouts), call, "the batch took") if timeouts else call())

    async def _where_it_runs(self, batch: Batch, function: Callable[[], Any]) -> Any:
        return function() if self._handler.is_async else await self._threads.run(batch, function)

    def _settle_all_stopped(
        self, holds: Sequence[Hold], reason: str | None, cancelled: asyncio.CancelledError | None = None
    ) -> None:
        for hold in holds:
            if hold.settlement is not None:
                continue  # Rejected before the call began.
            if reason == SHUTDOWN:
                self._settle_stopped(hold, reason)
            elif reason != LEASE_LOST and cancelled is not None:
                # Nobody here cancelled it: the handler did so itself, which is a failure like any other.
                self._settle(hold, self._handler, Raised(cancelled))


# -- plain functions ----------------------------------------------------------------------------------------


class ThreadCall(msgspec.Struct, eq=False, gc=False):
    """The state of a call on a thread. The thread writes it. It refers to nothing of the call, so a job may keep it."""

    thread: int = 0
    """The thread that runs it; 0: none yet."""
    has_ended: bool = False


_Queued: TypeAlias = "tuple[ThreadCall, asyncio.Future[Any], Context, Callable[[], Any]]"


class ThreadPool:
    """Runs plain functions on threads of the worker's own, which start as they are needed, up to `size`.

    Leaner than an executor: a job costs one queue put and its share of one wake-up of the loop. A thread cannot be killed, so a
    cancelled call asks its handler to stop and is over only when the thread is, or when its job's timeout has passed and then
    `grace` seconds. Such a thread is lost: it runs on, another takes its place, and `on_lost` gets the number of lost threads.
    Threads are daemons: a stuck handler cannot keep a process alive.
    """

    def __init__(self, size: int, *, grace: float, on_lost: Callable[[int], object]) -> None:
        self._size = size
        self._grace = grace
        self._on_lost = on_lost
        self._calls: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0
        """Threads that run a function, lost ones too."""
        self._lost = 0
        self._ended: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._notified = False
        self._closed = False

    async def run(self, work: Stoppable, function: Callable[[], Any]) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._busy += 1
        if self._threads < min(self._busy, self._size + self._lost):
            name = f"taskharbor-handler-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
            self._threads += 1
        work.thread_call = call = ThreadCall()
        self._calls.put((call, future, copy_context(), function))
        cancelled: asyncio.CancelledError | None = None
        last_wait: asyncio.TimerHandle | None = None
        try:
            while not future.done():
                try:
                    await asyncio.shield(future)
                except asyncio.CancelledError as error:
                    if future.done():
                        break  # The thread ended before it could be asked to stop, or raised this itself; or it is lost.
                    # A cancellation by hand sets the reason first; without one it was the timeout.
                    work.stop(TIMEOUT)
                    cancelled = error
                    if self._closed:
                        raise  # The worker is gone and the process goes: nobody waits for the thread any more.
                    if last_wait is None and (work.stop_reason == TIMEOUT or is_overdue()):
                        _warn(work, call, "is overdue, and asked to stop")
                        last_wait = self._loop.call_later(self._grace, self._give_up, work, call, future)
        finally:
            if last_wait is not None:
                last_wait.cancel()
            if not future.cancelled():
                self._busy -= 1
        if cancelled is not None:
            # What came of it does not count: a handler that was asked to stop may have returned half-way.
            raise cancelled
        result, raised = future.result()
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # Its traceback holds this frame.
        return result

    def close(self) -> None:
        self._closed = True
        self._calls.put(None)

    def _give_up(self, work: Stoppable, call: ThreadCall, future: asyncio.Future[Any]) -> None:
        if future.cancel():
            self._lost += 1
            _warn(work, call, f"did not stop within {self._grace:g} s of its timeout; its thread is lost")
            self._on_lost(self._lost)

    def _work(self) -> None:
        ident = threading.get_ident()
        while (queued := self._calls.get()) is not None:
            call, future, context, function = queued
            call.thread = ident
            result: Any = None
            error: BaseException | None = None
            try:
                result = context.run(function)
            except StopIteration as stop:
                # A coroutine cannot raise StopIteration.
                error = RuntimeError(f"the handler raised StopIteration({stop.value!r})")
                error.__traceback__ = stop.__traceback__
            except BaseException as raised:
                error = raised
            call.has_ended = True
            self._ended.append((future, result, error))
            del queued, call, future, context, function, result, error
            if not self._notified:
                self._notified = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    return  # The loop is closed, and the worker is gone.
        self._calls.put(None)  # For the next thread.

    def _deliver(self) -> None:
        # Cleared before draining: an append after the drain then notifies again.
        self._notified = False
        while self._ended:
            future, result, error = self._ended.popleft()
            if future.cancelled():
                self._lost -= 1
                self._busy -= 1
                continue
            # Never as the future's exception: asyncio would throw it into the waiting task, and StopIteration,
            # GeneratorExit and KeyboardInterrupt mean something else there.
            future.set_result((result, error))


def _warn(work: Stoppable, call: ThreadCall, what: str) -> None:
    """With the stack of the thread: files, lines and functions, no values."""
    frame = sys._current_frames().get(call.thread)
    trace = "".join(["Stack of its thread:\n", *traceback.format_stack(frame)]) if frame else ""
    log_trace(log, logging.WARNING, "%r %s", work, what, trace=trace)
