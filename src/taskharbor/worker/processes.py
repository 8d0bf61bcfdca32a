"""Handlers in processes of their own: for work that computes, leaks or crashes, and for timeouts that really end it.

Every job that runs has a process to itself; between jobs the process waits for the next. Processes are spawned, so
nothing is inherited but a connection: no lock, no thread, no connection to the database. A job that times out,
is cancelled or loses its lease takes its process with it, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from taskharbor.codec import JSON, MSGPACK, CodecRegistry, decode_result
from taskharbor.errors import InvalidRequest, RemoteError, WorkerProcessDied
from taskharbor.handlers import Handler
from taskharbor.jobs import SECOND
from taskharbor.middleware import Call, Job, reschedule_timeout
from taskharbor.retry import ExponentialBackoff, FixedDelays
from taskharbor.signals import Snooze
from taskharbor.worker import process_child
from taskharbor.worker.process_child import Ready, Returned, Run, Stop, Threw
from taskharbor.worker.process_setup import SIGNALS, exit_reason
from taskharbor.worker.run import SHUTDOWN

log = logging.getLogger("taskharbor.worker")

_START_SECONDS = 120.0
"""Seconds that a process has to import its handlers."""
_WIND_UP_SECONDS = 1.0
"""Seconds that a handler has to finish when the worker shuts down: fewer than the worker waits for it."""
_TRIES = 3
"""Number of processes that may die under a job before it has begun."""
_EXIT_SECONDS = 2.0
"""Seconds that an idle process has to exit by itself."""
_LOOK_SECONDS = 1.0
"""Seconds between checks that a process lives. It is needed only where one that died has forked another, which keeps open what
would otherwise tell us."""

_spawn = multiprocessing.get_context("spawn")


class ProcessPool:
    """As many processes as jobs run at once, started when first needed. Belongs to the handlers' event loop."""

    def __init__(self, handlers: Sequence[Handler], *, codecs: CodecRegistry) -> None:
        self._codecs = codecs
        self._orders = process_child.Orders(
            handlers=[_wanted(handler) for handler in handlers],
            codecs=[codec for codec in codecs._codecs.values() if codec is not JSON and codec is not MSGPACK],
            log_levels=_log_levels(),
            worker_pid=os.getpid(),
        )
        self._processes: dict[WorkerProcess, None] = {}
        self._idle: list[WorkerProcess] = []
        self._has_begun = False
        """True if the last process called the handler of its job."""

    async def run(self, job: Job) -> Any:
        """Run the job's handler in a process; its result, or what it raised."""
        for _ in range(_TRIES - 1):
            try:
                return await self._run(job, await self._take(job))
            except NotBegun:
                continue  # A process that died while it was idle is no failure of this job.
        return await self._run(job, await self._take(job))

    async def _run(self, job: Job, process: WorkerProcess) -> Any:
        process.begin(job)
        try:
            ended = await process.outcome()
        except asyncio.CancelledError:
            if not process.has_answered and job.stop_reason == SHUTDOWN:
                await process.wind_up(_WIND_UP_SECONDS)
            elif process.has_answered:  # It ended before the cancellation took effect.
                return self._result(job, await process.outcome())
            raise
        finally:
            self._has_begun = process.has_begun
            await self._put_back(process)
        return self._result(job, ended)

    async def close(self) -> None:
        """End all processes and see them gone."""
        self._idle.clear()
        for process in list(self._processes):
            process.end()
        await asyncio.gather(*(process.gone.wait() for process in list(self._processes)))

    # -- processes -------------------------------------------------------------------------------------------

    async def _take(self, job: Job) -> WorkerProcess:
        """An idle process or a new one. Starting one is the worker's time, not the handler's."""
        while self._idle:
            process = self._idle.pop()
            if not process.gone.is_set():
                return process
        loop = asyncio.get_running_loop()
        began = loop.time()
        reschedule_timeout(job, None)
        process = WorkerProcess(self._orders, lambda process: self._processes.pop(process, None))
        self._processes[process] = None
        try:
            await process.start()
        except asyncio.CancelledError:
            process.kill()
            raise
        job.started_at_us += round((loop.time() - began) * SECOND)
        reschedule_timeout(job, loop.time() + job.record.timeout_us / SECOND)
        return process

    async def _put_back(self, process: WorkerProcess) -> None:
        if process.finish_job():
            self._idle.append(process)
            return
        # Dead before anything is written for the job: it must not run on beside its next execution.
        process.kill()
        waiting = asyncio.ensure_future(process.gone.wait())
        while not waiting.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([waiting])

    # -- results ---------------------------------------------------------------------------------------------

    def _result(self, job: Job, ended: Returned | Threw) -> Any:
        if isinstance(ended, Threw):
            raise _as_exception(ended)
        # Decoded, so that middleware sees what a handler in this process would have given it.
        return decode_result(self._codecs.get(job.record.codec), ended.result)


class SuspectPool(ProcessPool):
    """The process of suspects. It takes those whose handlers an import makes as they are here."""

    def __init__(self, handlers: Sequence[Handler], *, codecs: CodecRegistry) -> None:
        self.handlers = [handler for handler in handlers if _is_portable(handler)]
        super().__init__(self.handlers, codecs=codecs)
        self.chains: dict[str, tuple[Handler, Call]] = {}
        """By type, the handler and the chain around `run`."""

    async def run(self, job: Job) -> Any:
        """Run the job's handler in the process. If that cannot begin it, the job goes back, and its type leaves `chains`."""
        self._has_begun = False
        try:
            return await super().run(job)
        except Exception as error:
            if self._has_begun:
                raise
            del self.chains[job.type]
            text = "%s cannot run in a process of its own (%s): its suspects run alone instead"
            log.warning(text, job.type, error)
            raise Snooze(run_at=job.run_at) from None


class NotBegun(WorkerProcessDied):
    """The process died before it called the handler."""


class WorkerProcess:
    """One process, seen from the worker's event loop. One thread starts it, listens to it and sees its end; one writes to it."""

    def __init__(self, orders: process_child.Orders, on_gone: Callable[[WorkerProcess], object]) -> None:
        self._orders = orders
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._ours, self._theirs = _spawn.Pipe()
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._lock = threading.Lock()
        self._must_end = False
        self._is_over = threading.Event()
        self._answer: asyncio.Future[Ready | Returned | Threw] = self._loop.create_future()
        """That it is ready, at first; then how each job ended."""
        self.has_begun = True
        self._job: Job | None = None
        self.gone = asyncio.Event()
        """Set once the process is dead and reaped."""

    @property
    def has_answered(self) -> bool:
        return self._answer.done()

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Until the process is ready for a job; WorkerProcessDied if it never is."""
        threading.Thread(target=self._keep, name="taskharbor-process-keeper", daemon=True).start()
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.shield(self._answer)
        except TimeoutError:
            self.kill()
            raise WorkerProcessDied(f"a worker process was not ready after {_START_SECONDS:g} s") from None

    def kill(self) -> None:
        """At once, with whatever its handler has started."""
        with self._lock:
            self._must_end = True
            process = self._process
            if process is None or self._is_over.is_set():
                return  # Not started yet: the keeper looks before it starts it; or over already.
            assert process.pid is not None
            with contextlib.suppress(OSError, AttributeError):
                if os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()

    def end(self) -> None:
        """In order where it is idle: its exit handlers run. Otherwise at once."""
        if self._must_end or not self.has_answered:
            self.kill()
        else:
            self._must_end = True
            self._outbox.put(process_child.END)

    def _keep(self) -> None:
        """The life of the process, on the keeper's thread."""
        complaint = ""
        writer = threading.Thread(target=self._write, name="taskharbor-process-writer", daemon=True)
        try:
            with self._lock:
                if not self._must_end:
                    self._process = _started(self._theirs, self._orders)
        except BaseException as error:
            complaint = f"a worker process could not be started: {error!r}"
        finally:
            self._theirs.close()
        writer.start()
        if self._process is not None:
            self._listen(self._process)
            self._process.join()
            complaint = f"the worker process ended with {exit_reason(self._process.exitcode)}"
        with self._lock:
            self._is_over.set()
        self._on_loop(self._note_end, complaint)
        self._outbox.put(process_child.END)
        writer.join()
        self._ours.close()

    def _listen(self, process: multiprocessing.process.BaseProcess) -> None:
        """Until it has said all it will say. One that says what nobody understands is ended."""
        try:
            while True:
                ready = wait([self._ours, process.sentinel], _LOOK_SECONDS)
                if self._ours in ready:
                    self._on_loop(self._take, process_child.decode_up(self._ours.recv_bytes()))
                elif ready or not process.is_alive():
                    return
        except (EOFError, OSError):
            pass
        except msgspec.MsgspecError:
            self.kill()

    def _write(self) -> None:
        """Until the process is told to end, or does not listen any more; then it has to go."""
        message = None
        with contextlib.suppress(OSError):
            while message != process_child.END:
                message = self._outbox.get()
                self._ours.send_bytes(message)
        if not self._is_over.wait(_EXIT_SECONDS):
            self.kill()

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody wants to know.
            self._loop.call_soon_threadsafe(call, *arguments)

    def _note_end(self, complaint: str) -> None:
        if not self._answer.done():
            kind = WorkerProcessDied if self.has_begun else NotBegun
            self._answer.set_exception(kind(complaint))
            self._answer.exception()  # Somebody may have stopped waiting for it.
        self.gone.set()
        self._on_gone(self)

    # -- a job -----------------------------------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        """Send the job. Its outcome is NotBegun if the process turns out to be dead."""
        self._job = job
        self.has_begun = False
        self._answer = self._loop.create_future()
        if self.gone.is_set():
            self._note_end("the worker process does not listen any more")
        self._tell(Run(job.record, job.started_at_us))
        job.on_stop = lambda reason: self._tell(Stop(reason))

    async def outcome(self) -> Returned | Threw:
        answer = await asyncio.shield(self._answer)
        assert not isinstance(answer, Ready)
        return answer

    async def wind_up(self, seconds: float) -> None:
        """Ask the handler to stop, and give it a moment."""
        self._tell(Stop(SHUTDOWN, cancel=True))
        await asyncio.wait([self._answer], timeout=seconds)
        self._must_end = True

    def finish_job(self) -> bool:
        """Forget the job. Returns False if the process cannot take another."""
        if not self.has_answered or self._must_end or self.gone.is_set():
            return False
        assert self._job is not None
        self._job.on_stop = None  # A later request to stop is not for the next job of this process.
        self._job = None
        return True

    def _tell(self, message: process_child.Down) -> None:
        """From any thread."""
        self._outbox.put(process_child.encode(message))

    def _take(self, said: process_child.Up) -> None:
        job = self._job
        match said:
            case process_child.Began():
                self.has_begun = True
            case Ready() | Returned() | Threw():
                if not self._answer.done():
                    self._answer.set_result(said)
            case process_child.ProgressReport(data):
                if job is not None and job._report is not None:
                    job._report(job.record, data)
            case Stop(reason):
                if job is not None:
                    job.stop(reason)
            case process_child.Logged(fields):
                record = logging.makeLogRecord(fields)
                logger = logging.getLogger(record.name)
                if logger.isEnabledFor(record.levelno):
                    logger.handle(record)


def _started(theirs: Connection, orders: process_child.Orders) -> multiprocessing.process.BaseProcess:
    # Not a daemon: those may have no children, and handlers may want some.
    process = _spawn.Process(
        target=process_child.main, args=(theirs, orders), name="taskharbor-process", daemon=False
    )
    if not hasattr(signal, "pthread_sigmask"):
        process.start()
        return process
    resource_tracker.ensure_running()  # Here, because its own start would lift the mask again.
    # Ctrl-C must not hit the process before it is ready to leave that to us; it lifts the inherited mask itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _as_exception(threw: Threw) -> Exception:
    """Make the exception that stands for one that the child raised. The exception itself does not cross over (that would take
    pickle); its type, message and traceback do, and a signal stays a signal, with its times."""
    if not threw.kind:
        return RemoteError(threw.failure)
    kind = process_child.HANDLER_SIGNALS[threw.kind]
    signal = kind.__new__(kind, threw.failure.message)  # Its constructor takes other values than it keeps.
    signal.__dict__.update(delay_us=threw.delay_us, at_us=threw.at_us, failure=threw.failure)
    return signal


def _wanted(handler: Handler) -> process_child.Wanted:
    """The path by which the child finds the handler. Checked in the parent, which can report a mistake."""
    assert handler.location is not None
    takes_job, most = handler.arguments is None, handler.max_result_bytes
    wanted = process_child.Wanted(handler.type, *handler.location, takes_job, most)
    found, app = process_child.find(wanted)
    if found.function is not handler.function:
        raise InvalidRequest(
            f"{handler.type!r} runs in a process of its own, but {wanted.module}.{wanted.name} is not its "
            "handler: a process finds a handler by that name, so it must be a plain function of its module"
        )
    store = getattr(app, "_store", None)
    return wanted._replace(url=store) if isinstance(store, str) else wanted


def _is_portable(handler: Handler) -> bool:
    """True if the handler is the same in another process: one of an app that has a store with a URL. A retry policy of its own is
    meant for the exception itself, which stays in the process."""
    is_plain = handler.batch is None and handler.location is not None
    if not is_plain or not isinstance(handler.retry, (type(None), ExponentialBackoff, FixedDelays)):
        return False
    try:
        return _wanted(handler).url is not None
    except (InvalidRequest, ImportError):
        return False


def _log_levels() -> dict[str, int]:
    """Levels as they are set here, so that a process sends what would be shown and no more."""
    root = logging.getLogger()
    named = {name: one for name, one in root.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    return {"": root.level} | {name: one.level for name, one in named.items() if one.level}
