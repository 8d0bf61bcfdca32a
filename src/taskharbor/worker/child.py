"""What runs inside a worker process: one job at a time, on its main thread.

A second thread listens to the worker. It is also what ends this process when the worker is gone, whatever the
handler is doing at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any, NamedTuple

import taskharbor.signals as signals
from taskharbor.codec import Arguments, Codec, CodecRegistry
from taskharbor.errors import InvalidRequest
from taskharbor.handlers import Handler
from taskharbor.jobs import MAX_RESULT_BYTES, Failure, JobRecord
from taskharbor.middleware import Job, Raised, set_current_job
from taskharbor.worker.decide import describe
from taskharbor.worker.wire import (
    Began,
    Frames,
    Logged,
    Progress,
    Ready,
    Returned,
    Run,
    Stopping,
    Threw,
    Up,
    decode_down,
    frame,
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_RECORD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class Wanted(NamedTuple):
    """A handler as the worker describes it. Named by the worker's own code, never by what a store says."""

    type: str
    module: str
    name: str
    takes_job: bool


class Orders(NamedTuple):
    """What a process is started with."""

    handlers: Sequence[Wanted]
    codecs: Sequence[Codec]
    log_levels: Mapping[str, int]
    worker_pid: int


class Code(NamedTuple):
    function: Callable[..., Any]
    arguments: Arguments | None


def find(wanted: Wanted) -> Code:
    """The code behind a job type: the function of that name, or the one declared under it with `@harbor.job`."""
    found: Any = importlib.import_module(wanted.module)
    for part in wanted.name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise InvalidRequest(
                f"{wanted.type!r}: {wanted.module}.{wanted.name} is not there in a new process; "
                "define it at the top of a module that can be imported"
            )
    declared = getattr(found, "handler", None)  # A JobType stands where its function stood.
    function = declared.function if isinstance(declared, Handler) else found
    return Code(function, None if wanted.takes_job else Arguments(function))


def main(connection: socket.socket, orders: Orders) -> None:
    """The life of a worker process, from its start to the worker's end of it."""
    _detach(orders.worker_pid)
    Child(connection, orders).serve()


def _detach(worker_pid: int) -> None:
    """Leave the terminal's signals to the worker, and do not outlive it."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpgid(0, 0)
    for number in _SIGNALS:
        # A handler that does nothing, not SIG_IGN: what is ignored stays ignored in programs a handler starts.
        signal.signal(number, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # Blocked by the worker until here.
    if sys.platform == "linux":
        # The listening thread notices too, but not while C code keeps the interpreter to itself.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != worker_pid:
            os._exit(1)


class _ChildJob(Job):
    """A job whose stop requests travel to the worker as well."""

    def __init__(self, run: Run, tell: Callable[[Up], None]) -> None:
        super().__init__(run.record, run.started_at_us, self._report_up)
        self._tell = tell

    def _report_up(self, _: JobRecord, data: bytes) -> None:
        self._tell(Progress(data))

    def stop(self, reason: str) -> None:
        super().stop(reason)
        self._tell(Stopping(reason))

    def stop_from_above(self, reason: str) -> None:
        super().stop(reason)


class Child:
    def __init__(self, connection: socket.socket, orders: Orders) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._orders = orders
        self._codecs = CodecRegistry(*orders.codecs)
        self._code: dict[str, Code | Threw] = {}
        self._runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._job: _ChildJob | None = None
        self._task: asyncio.Task[Any] | None = None
        self._clean_context: Context = copy_context()
        self._runner = asyncio.Runner()

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="taskharbor-worker-link", daemon=True).start()
        _forward_logs(self._orders.log_levels, self._send)
        for wanted in self._orders.handlers:
            try:
                self._code[wanted.type] = find(wanted)
            except BaseException as error:  # Only the jobs of this one type suffer.
                self._code[wanted.type] = _threw(error)
        self._send(Ready())
        while (run := self._runs.get()) is not None:
            self._send(self._execute(run))
            del run
        self._runner.close()

    # -- the worker's messages --------------------------------------------------------------------------------

    def _listen(self) -> None:
        frames = Frames()
        with contextlib.suppress(OSError):
            while data := self._connection.recv(65536):
                for message in frames.feed(data):
                    self._take(message)
        # The worker let go of us. Between jobs that is an orderly end; with a handler at work nothing orderly is left.
        if self._job is not None or os.getppid() != self._orders.worker_pid:
            _end_group()
        self._runs.put(None)

    def _take(self, message: bytes) -> None:
        order = decode_down(message)
        if isinstance(order, Run):
            self._job = _ChildJob(order, self._send)
            self._runs.put(order)
            return
        job, task = self._job, self._task
        if job is not None:
            job.stop_from_above(order.reason)
        if order.cancel and task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _send(self, message: Up) -> None:
        # A worker that is gone hears nothing; the listening thread ends us for it.
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(frame(message))

    # -- a job --------------------------------------------------------------------------------------------------

    def _execute(self, run: Run) -> Up:
        job, code = self._job, self._code[run.record.type]
        assert job is not None
        if isinstance(code, Threw):
            self._job = None
            return code
        self._send(Began())
        try:
            if code.arguments is not None:
                codec = self._codecs.get(run.record.codec)
                job.arguments = code.arguments.decode(codec, run.record.payload)
            ended: Up = self._returned(run.record, self._call(code, job))
        except BaseException as error:
            ended = _threw(error)
        finally:
            self._job = self._task = None
            for stream in (sys.stdout, sys.stderr):
                # What a handler printed is not lost when the next one is killed.
                with contextlib.suppress(Exception):
                    stream.flush()
        return ended

    def _call(self, code: Code, job: Job) -> Any:
        # A context of its own: what one job binds to a context variable, the next must not see.
        context = self._clean_context.copy()
        context.run(set_current_job, job)
        if not inspect.iscoroutinefunction(code.function):
            return context.run(_call, code, job)
        # One event loop for all jobs of this process, so that what a handler keeps on it (a session, a pool) lives on.
        outcome = self._runner.run(self._as_task(code, job), context=context)
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome

    async def _as_task(self, code: Code, job: Job) -> Any:
        self._task = asyncio.current_task()
        try:
            return await _call(code, job)
        except BaseException as error:  # As a value: SystemExit would break out of the loop.
            return Raised(error)

    def _returned(self, record: JobRecord, result: Any) -> Returned:
        if result is None:
            return Returned()
        try:
            encoded = self._codecs.get(record.codec).encode(result)
        except Exception as misfit:
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(
                    "the handler returned a coroutine nobody awaited: make it 'async def'"
                ) from None
            return Returned(complaint=str(misfit))
        if len(encoded) > MAX_RESULT_BYTES:
            return Returned(complaint=f"{len(encoded)} bytes, at most {MAX_RESULT_BYTES}")
        return Returned(encoded)


def _call(code: Code, job: Job) -> Any:
    if code.arguments is None:
        return code.function(job)
    return code.arguments.caller(code.function)(job.arguments)


def _threw(error: BaseException) -> Threw:
    failure = describe(error)
    match error:
        case signals.Retry():
            return Threw(failure, "retry", error.delay_us, error.at_us)
        case signals.Snooze():
            return Threw(failure, "snooze", error.delay_us)
        case signals.Discard():
            return Threw(failure, "discard")
        case signals.Unrecoverable():
            return Threw(failure, "unrecoverable")
        case StopIteration():
            return Threw(Failure("RuntimeError", "the handler raised StopIteration", failure.detail))
    return Threw(failure)


def _end_group() -> None:
    """This process and whatever its handler has started: they all worked for a worker that is no more."""
    with contextlib.suppress(OSError, AttributeError):
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


# -- logging --------------------------------------------------------------------------------------------------------


class _Forward(logging.Handler):
    """Hands log records to the worker, where the program's own logging set-up is."""

    def __init__(self, send: Callable[[Up], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            trace = record.exc_text
            if trace is None and record.exc_info:
                trace = logging.Formatter().formatException(record.exc_info)
            extra = {
                name: value
                for name, value in record.__dict__.items()
                if name not in _RECORD_FIELDS and isinstance(value, (str, int, float, bool, type(None)))
            }
            self._send(
                Logged(
                    record.name,
                    record.levelno,
                    record.getMessage(),
                    record.created,
                    record.pathname,
                    record.lineno,
                    record.funcName or "",
                    record.threadName or "",
                    trace,
                    extra,
                )
            )
        except Exception:
            self.handleError(record)


def _forward_logs(levels: Mapping[str, int], send: Callable[[Up], None]) -> None:
    logging.getLogger().addHandler(_Forward(send))
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
