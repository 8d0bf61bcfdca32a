"""Handlers in processes of their own: for work that computes, leaks or crashes, and for timeouts that really end it.

Every job that runs has a process to itself; between jobs the process waits for the next. Processes are spawned, so
nothing is inherited but a socket pair: no lock, no thread, no connection to the database. A job that times out,
is cancelled or loses its lease takes its process with it, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from typing import Any

import taskharbor.worker.child as child
from taskharbor.codec import JSON, MSGPACK, Codec, CodecRegistry
from taskharbor.errors import InvalidRequest, WorkerProcessDied
from taskharbor.handlers import Handler
from taskharbor.jobs import SECOND
from taskharbor.middleware import Job, hold_timeout, restart_timeout
from taskharbor.worker.remote import (
    RemoteDiscard,
    RemoteError,
    RemoteRetry,
    RemoteSnooze,
    RemoteUnrecoverable,
)
from taskharbor.worker.run import SHUTDOWN
from taskharbor.worker.wire import (
    Began,
    Down,
    Frames,
    Logged,
    Progress,
    Ready,
    Returned,
    Run,
    Stop,
    Stopping,
    Threw,
    decode_up,
    frame,
)

log = logging.getLogger("taskharbor.worker")

_START_SECONDS = 120.0
"""How long a process may take to import its handlers."""
_WIND_UP_SECONDS = 1.0
"""How long a handler may take to wind up when the worker shuts down: less than the worker waits for it."""
_TRIES = 3
"""How many processes may die under a job before it has begun."""
_EXIT_SECONDS = 2.0
"""How long an idle process may take to end in order."""

_spawn = multiprocessing.get_context("spawn")


class ProcessPool:
    """As many processes as jobs run at once, started when first needed. Belongs to the handlers' event loop."""

    def __init__(self, handlers: Sequence[Handler], *, codecs: CodecRegistry) -> None:
        self._codecs = codecs
        self._orders = child.Orders(
            handlers=[_wanted(handler) for handler in handlers],
            codecs=_extra_codecs(codecs),
            log_levels=_log_levels(),
            worker_pid=os.getpid(),
        )
        self._processes: dict[WorkerProcess, None] = {}
        self._idle: list[WorkerProcess] = []

    async def run(self, job: Job) -> Any:
        """Run the job's handler in a process; its result, or what it raised."""
        for _ in range(_TRIES - 1):
            try:
                return await self._run(job, await self._take(job))
            except NotBegun:
                continue  # A process that died while it was idle is no failure of this job.
        return await self._run(job, await self._take(job))

    async def _run(self, job: Job, process: WorkerProcess) -> Any:
        try:
            await process.begin(job)
            ended = await process.outcome()
        except asyncio.CancelledError:
            if not process.has_ended and job.stop_reason == SHUTDOWN:
                await process.wind_up(_WIND_UP_SECONDS)
            elif process.has_ended:
                return self._result(job, await process.outcome())  # It was quicker than whoever cancelled it.
            raise
        finally:
            await self._put_back(process)
        return self._result(job, ended)

    async def close(self) -> None:
        """End all processes and see them gone."""
        self.abandon()
        await asyncio.gather(*(process.gone.wait() for process in list(self._processes)))

    def abandon(self) -> None:
        """End all processes, without waiting."""
        self._idle.clear()
        for process in list(self._processes):
            process.end()

    # -- processes -------------------------------------------------------------------------------------------

    async def _take(self, job: Job) -> WorkerProcess:
        """An idle process or a new one. Starting one is the worker's time, not the handler's."""
        while self._idle:
            process = self._idle.pop()
            if not process.gone.is_set():
                return process
        loop = asyncio.get_running_loop()
        began = loop.time()
        hold_timeout(job)
        process = WorkerProcess(self._orders, self._gone)
        self._processes[process] = None
        try:
            await process.start()
        except asyncio.CancelledError:
            process.kill()
            raise
        job.started_at_us += round((loop.time() - began) * SECOND)
        restart_timeout(job)
        return process

    async def _put_back(self, process: WorkerProcess) -> None:
        if process.is_reusable:
            process.forget_job()
            self._idle.append(process)
            return
        # Dead before anything is written for the job: it must not run on beside its next execution.
        process.kill()
        waiting = asyncio.ensure_future(process.gone.wait())
        while not waiting.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([waiting])

    def _gone(self, process: WorkerProcess) -> None:
        self._processes.pop(process, None)
        with contextlib.suppress(ValueError):
            self._idle.remove(process)

    # -- results ---------------------------------------------------------------------------------------------

    def _result(self, job: Job, ended: Returned | Threw) -> Any:
        if isinstance(ended, Threw):
            raise _as_exception(ended)
        if ended.complaint:
            log.warning("the result of %s %s is not kept: %s", job.type, job.id, ended.complaint)
        # Decoded, so that middleware sees what a handler in this process would have given it.
        return None if ended.result is None else self._codecs.get(job.record.codec).decode(ended.result)


class NotBegun(WorkerProcessDied):
    """The process died before it called the handler."""


class WorkerProcess:
    """One process, seen from the worker's event loop. A thread starts it, waits for its end and says so."""

    def __init__(self, orders: child.Orders, on_gone: Callable[[WorkerProcess], None]) -> None:
        self._orders = orders
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._frames = Frames()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._lock = threading.Lock()
        self._is_doomed = False
        self._is_over = False
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[Returned | Threw] | None = None
        self._has_begun = False
        self._job: Job | None = None
        self._listening: asyncio.Task[None] | None = None
        self._patience: threading.Timer | None = None
        self.gone = asyncio.Event()
        """Set once the process is dead and reaped."""

    @property
    def has_ended(self) -> bool:
        return self._ended is not None and self._ended.done()

    @property
    def is_reusable(self) -> bool:
        return self.has_ended and not self._is_doomed and not self.gone.is_set()

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Until the process is ready for a job; WorkerProcessDied if it never is."""
        threading.Thread(target=self._keep, name="taskharbor-process-keeper", daemon=True).start()
        self._listening = self._loop.create_task(self._listen())
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.shield(self._ready)
        except TimeoutError:
            self.kill()
            raise WorkerProcessDied(f"a worker process was not ready after {_START_SECONDS:g} s") from None

    def kill(self) -> None:
        """At once, with whatever its handler has started."""
        with self._lock:
            self._is_doomed = True
            process = self._process
            if process is None or self._is_over:
                return  # Not started yet: the keeper looks before and after; or over already.
            assert process.pid is not None
            with contextlib.suppress(OSError, AttributeError):
                if os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()

    def end(self) -> None:
        """In order where it is idle: its exit handlers run. Otherwise at once."""
        is_idle = self._ready.done() and (self._ended is None or self._ended.done())
        if self._is_doomed or not is_idle:
            self.kill()
            return
        self._is_doomed = True
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_WR)
        # A thread, not the loop, counts the time: the loop may be gone by then.
        self._patience = threading.Timer(_EXIT_SECONDS, self.kill)
        self._patience.daemon = True
        self._patience.start()

    def _keep(self) -> None:
        complaint = ""
        try:
            with self._lock:
                if not self._is_doomed:
                    self._process = _started(self._theirs, self._orders)
        except BaseException as error:
            complaint = f"a worker process could not be started: {error!r}"
        finally:
            self._theirs.close()
        if self._process is not None:
            self._process.join()
            complaint = _how_it_ended(self._process.exitcode)
        with self._lock:
            self._is_over = True
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody wants to know.
            self._loop.call_soon_threadsafe(self._bury, complaint)

    def _bury(self, complaint: str) -> None:
        # What it said last may still be unread; the end of the stream may never come (a grandchild has it open too).
        with contextlib.suppress(OSError):
            while data := self._ours.recv(65536):
                self._feed(data)
        if self._listening is not None:
            self._listening.cancel()
        self._ours.close()
        if self._patience is not None:
            self._patience.cancel()
        died = WorkerProcessDied(complaint)
        if not self._ready.done():
            self._ready.set_exception(died)
            self._ready.exception()  # Somebody may have stopped waiting for it.
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(died if self._has_begun else NotBegun(complaint))
            self._ended.exception()
        self.gone.set()
        self._on_gone(self)

    # -- a job -----------------------------------------------------------------------------------------------

    async def begin(self, job: Job) -> None:
        """Send the job; NotBegun if the process turns out to be dead."""
        self._job = job
        self._has_begun = False
        self._ended = self._loop.create_future()
        try:
            await self._loop.sock_sendall(self._ours, frame(Run(job.record, job.started_at_us)))
        except OSError as error:
            raise NotBegun(f"the worker process does not listen any more: {error}") from error
        job.on_stop = lambda reason: self.tell_from_any_thread(Stop(reason))

    async def outcome(self) -> Returned | Threw:
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def wind_up(self, seconds: float) -> None:
        """Ask the handler to stop, and give it a moment."""
        assert self._ended is not None
        self.tell(Stop(SHUTDOWN, cancel=True))
        await asyncio.wait([self._ended], timeout=seconds)
        self._is_doomed = True

    def forget_job(self) -> None:
        self._job = None
        self._ended = None

    def tell(self, message: Down) -> None:
        """A few bytes, to a thread that always reads: they fit."""
        with contextlib.suppress(OSError):
            self._ours.send(frame(message))

    def tell_from_any_thread(self, message: Down) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.tell, message)

    # -- what it says ----------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._loop.sock_recv(self._ours, 65536):
                self._feed(data)

    def _feed(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._take(message)

    def _take(self, message: bytes) -> None:
        said = decode_up(message)
        job = self._job
        match said:
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(None)
            case Began():
                self._has_begun = True
            case Returned() | Threw():
                if self._ended is not None and not self._ended.done():
                    self._ended.set_result(said)
            case Progress(data):
                if job is not None:
                    _report(job, data)
            case Stopping(reason):
                if job is not None:
                    job.stop(reason)
            case Logged():
                _log_here(said)


def _report(job: Job, data: bytes) -> None:
    if job._report is not None:
        job._report(job.record, data)


def _started(theirs: socket.socket, orders: child.Orders) -> multiprocessing.process.BaseProcess:
    # Not a daemon: those may have no children, and handlers may want some.
    process = _spawn.Process(
        target=child.main, args=(theirs, orders), name="taskharbor-process", daemon=False
    )
    if not hasattr(signal, "pthread_sigmask"):
        process.start()
        return process
    resource_tracker.ensure_running()  # Here, because its own start would lift the mask again.
    # Ctrl-C must not hit the process before it is ready to leave that to us; it lifts the inherited mask itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "the worker process ended, nobody knows how"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the worker process was ended by {signal.Signals(-code).name}"
    return f"the worker process ended with exit code {code}"


def _as_exception(threw: Threw) -> Exception:
    match threw.kind:
        case "retry":
            return RemoteRetry(threw.failure, threw.delay_us, threw.at_us)
        case "snooze":
            return RemoteSnooze(threw.failure, threw.delay_us or 0)
        case "discard":
            return RemoteDiscard(threw.failure)
        case "unrecoverable":
            return RemoteUnrecoverable(threw.failure)
    return RemoteError(threw.failure)


def _wanted(handler: Handler) -> child.Wanted:
    """How the process finds the handler; checked here, where a mistake has somebody to tell."""
    assert handler.location is not None
    wanted = child.Wanted(handler.type, *handler.location, takes_job=handler.arguments is None)
    function: Any = handler.function
    module = importlib.import_module(wanted.module)
    if "." in wanted.name and hasattr(function, "__self__"):
        function = None  # A bound method: the process would find the function, without the object.
    if function is None or child.find(wanted).function is not function:
        raise InvalidRequest(
            f"{handler.type!r} runs in a process of its own, but {module.__name__}.{wanted.name} is not its "
            "handler: a process finds a handler by that name, so it must be a plain function of its module"
        )
    return wanted


def _extra_codecs(codecs: CodecRegistry) -> list[Codec]:
    return [codec for codec in codecs._codecs.values() if codec is not JSON and codec is not MSGPACK]


def _log_levels() -> dict[str, int]:
    """Levels as they are set here, so that a process sends what would be shown and no more."""
    loggers = logging.getLogger().manager.loggerDict
    levels = {
        name: logger.level
        for name, logger in loggers.items()
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {"": logging.getLogger().level, **levels}


def _log_here(said: Logged) -> None:
    logger = logging.getLogger(said.name)
    if not logger.isEnabledFor(said.level):
        return
    record = logger.makeRecord(
        said.name, said.level, said.path, said.line, said.message, (), None, said.function, said.extra
    )
    record.created = said.created
    record.msecs = (said.created % 1) * 1000
    record.threadName = said.thread
    record.processName = "taskharbor-process"
    record.exc_text = said.trace
    logger.handle(record)


__all__ = ["ProcessPool"]
