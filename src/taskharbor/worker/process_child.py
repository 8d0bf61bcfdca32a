"""The main loop of a child process: one job at a time, on the main thread. The messages between parent and child are here too.

A second thread listens to the worker. It is also what ends this process when the worker is gone, whatever the
handler is doing at that moment. Messages are msgpack over a multiprocessing connection: nothing in them is code.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

import msgspec

from taskharbor.codec import Arguments, Codec, CodecRegistry
from taskharbor.errors import InvalidRequest
from taskharbor.handlers import Handler
from taskharbor.jobs import Failure, JobRecord, Micros
from taskharbor.middleware import Call, Job, Raised, entered, function_call, set_current_job, validate
from taskharbor.signals import Cancel, HandlerSignal, Retry, Snooze, Unrecoverable, find_signal
from taskharbor.worker.decide import describe, encode_result
from taskharbor.worker.logs import JobFields, capture_warnings
from taskharbor.worker.process_setup import SIGNALS

_PR_SET_PDEATHSIG = 1

HANDLER_SIGNALS: dict[str, type[HandlerSignal]] = {
    kind.__name__: kind for kind in (Retry, Snooze, Cancel, Unrecoverable)
}
"""Exceptions by which a handler says how its job goes on."""

END = b""
"""Stands where a message would: the process is to end in order."""

is_importing = False
"""True while this process imports its handlers. Their app then refuses to enqueue and to start a worker."""


class Run(msgspec.Struct, frozen=True, tag="run"):
    record: JobRecord
    started_at_us: Micros


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """For the handler's `should_stop`; `cancel` also cancels an async handler. From the process: somebody, perhaps the handler
    itself, has asked the job to stop."""

    reason: str
    cancel: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process has imported its handlers and can take a job."""


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The handler is about to be called. A process that dies before this has not touched the job."""


class ProgressReport(msgspec.Struct, frozen=True, tag="progress"):
    data: bytes


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """The plain fields of a log record, its message already put together."""

    fields: dict[str, str | int | float | bool | None]


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The result in the record's codec, where there is one that can be kept."""

    result: bytes | None = None


class Threw(msgspec.Struct, frozen=True, tag="threw"):
    """The exception that the handler raised, as text; `kind` names the signal, if it was one."""

    failure: Failure
    kind: str = ""
    delay_us: Micros | None = None
    at_us: Micros | None = None


Down: TypeAlias = Run | Stop
Up: TypeAlias = Ready | Began | ProgressReport | Stop | Logged | Returned | Threw

encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


class Wanted(NamedTuple):
    """A handler as the worker describes it. Named by the worker's own code, never by what a store says."""

    type: str
    module: str
    name: str
    takes_job: bool
    max_result_bytes: int
    url: str | None = None
    """The store that the worker's app uses, where it has a URL."""


class Orders(NamedTuple):
    """The settings that a process starts with."""

    handlers: Sequence[Wanted]
    codecs: Sequence[Codec]
    log_levels: Mapping[str, int]
    worker_pid: int


def find(wanted: Wanted) -> tuple[Handler, Any]:
    """The code behind a job type: the function of that name, or the one declared under it with `@harbor.job`, and its app."""
    found: Any = importlib.import_module(wanted.module)
    for part in wanted.name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise InvalidRequest(
                f"{wanted.type!r}: {wanted.module}.{wanted.name} is not there in a new process; "
                "define it at the top of a module that can be imported"
            )
    declared: Any = getattr(found, "handler", None)  # A JobType stands where its function stood.
    is_declared = isinstance(declared, Handler)
    function = declared.function if is_declared else found
    handler = Handler(
        wanted.type,
        function,
        arguments=None if wanted.takes_job else Arguments(function),
        max_result_bytes=wanted.max_result_bytes,
        lifespan=declared.lifespan if is_declared else None,
    )
    return handler, found._harbor if is_declared else None


def main(connection: Connection, orders: Orders) -> None:
    """The life of a worker process: it leaves the terminal's signals to the worker, and does not outlive it."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpgid(0, 0)
    for number in SIGNALS:
        # A handler that does nothing, not SIG_IGN: what is ignored stays ignored in programs a handler starts.
        signal.signal(number, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # Blocked by the worker until here.
    if sys.platform == "linux":
        # The listening thread notices too, but not while C code keeps the interpreter to itself.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != orders.worker_pid:
            os._exit(1)
    Child(connection, orders).serve()


class Child:
    def __init__(self, connection: Connection, orders: Orders) -> None:
        self._connection = connection
        self._pid = os.getpid()
        """A handler may fork: the copy has the same connection, and must not speak for this process."""
        self._sending = threading.Lock()
        self._orders = orders
        self._codecs = CodecRegistry(*orders.codecs)
        self._handlers: dict[str, tuple[Handler, Call] | Threw] = {}
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._job: Job | None = None
        self._task: asyncio.Task[Any] | None = None
        self._clean_context = copy_context()
        self._runner = asyncio.Runner()

    def serve(self) -> None:
        global is_importing
        threading.Thread(target=self._listen, name="taskharbor-worker-link", daemon=True).start()
        forward = _Forward(self._send)
        forward.addFilter(JobFields())
        logging.getLogger().addHandler(forward)
        capture_warnings()
        for name, level in self._orders.log_levels.items():
            logging.getLogger(name).setLevel(level)
        is_importing = True
        for wanted in self._orders.handlers:
            try:
                handler, app = find(wanted)
                if app is not None and wanted.url not in (None, app._store):
                    app.use(wanted.url)
                call = validate(handler, self._codecs, function_call(handler))
                self._handlers[wanted.type] = (handler, call)
            except BaseException as error:  # Only the jobs of this one type suffer.
                self._handlers[wanted.type] = _threw(error)
        is_importing = False
        self._runner.run(self._enter_lifespan())
        self._send(Ready())
        while (job := self._jobs.get()) is not None:
            outcome = self._execute(job)
            if os.getpid() != self._pid:
                os._exit(0)
            if not self._send(outcome):
                # The worker must not wait for an answer that it cannot hear: a handler may have closed the connection.
                _end_group()
            del job
        self._runner.run(self._leave_lifespan())
        self._runner.close()

    # -- the app's lifespan ------------------------------------------------------------------------------------

    async def _enter_lifespan(self) -> None:
        """One task enters and leaves it, as a task group inside it requires. The contexts of jobs are copies of that task's."""
        found = [one[0].lifespan for one in self._handlers.values() if not isinstance(one, Threw)]
        lifespan = next((one for one in found if one is not None), None)
        opened, self._leaving = asyncio.Event(), asyncio.Event()

        async def live() -> None:
            async with entered(lifespan):
                opened.set()
                await self._leaving.wait()

        loop = asyncio.get_running_loop()
        self._lifespan = loop.create_task(live(), context=self._clean_context)
        self._lifespan.add_done_callback(lambda _: opened.set())
        await opened.wait()
        if self._lifespan.done():
            error = self._lifespan.exception()
            assert error is not None
            self._handlers = dict.fromkeys(self._handlers, _threw(error))

    async def _leave_lifespan(self) -> None:
        self._leaving.set()
        await asyncio.wait([self._lifespan])
        self._lifespan.exception()  # `entered` has logged it.

    # -- the worker's messages --------------------------------------------------------------------------------

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while (message := self._connection.recv_bytes()) != END:
                self._take(decode_down(message))
        # The worker let go of us. Between jobs that is an orderly end; with a handler at work nothing orderly is left.
        if self._job is not None or os.getppid() != self._orders.worker_pid:
            _end_group()
        self._jobs.put(None)

    def _take(self, order: Down) -> None:
        if isinstance(order, Run):
            job = Job(order.record, order.started_at_us, lambda _, data: self._send(ProgressReport(data)))
            job.on_stop = lambda reason: self._send(Stop(reason))
            self._job = job
            self._jobs.put(job)
            return
        running, task = self._job, self._task
        if running is not None:
            running.stop(order.reason)
        if order.cancel and task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _send(self, message: Up) -> bool:
        """False: it was not sent. Where the worker is gone, the listening thread ends us."""
        if os.getpid() == self._pid:
            with self._sending, contextlib.suppress(OSError):
                self._connection.send_bytes(encode(message))
                return True
        return False

    # -- a job --------------------------------------------------------------------------------------------------

    def _execute(self, job: Job) -> Up:
        found = self._handlers[job.type]
        try:
            if isinstance(found, Threw):
                return found
            self._send(Began())
            return Returned(encode_result(found[0], job.record, self._call(*found, job), self._codecs))
        except BaseException as error:
            return _threw(error)
        finally:
            self._job = self._task = None
            for stream in (sys.stdout, sys.stderr):
                # What a handler printed is not lost when the next one is killed.
                with contextlib.suppress(Exception):
                    stream.flush()

    def _call(self, handler: Handler, call: Call, job: Job) -> Any:
        # A context of its own: what one job binds to a context variable, the next must not see.
        context = self._clean_context.copy()
        context.run(set_current_job, job)
        if not handler.is_async:
            return context.run(call, job)
        # One event loop for all jobs of this process, so that what a handler keeps on it (a session, a pool) lives on.
        outcome = self._runner.run(self._as_task(call, job), context=context)
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome

    async def _as_task(self, call: Call, job: Job) -> Any:
        self._task = asyncio.current_task()
        try:
            return await call(job)
        except BaseException as error:  # As a value: SystemExit would break out of the loop.
            return Raised(error)


def _threw(error: BaseException) -> Threw:
    failure = describe(error)
    if isinstance(error, StopIteration):
        return Threw(Failure("RuntimeError", "the handler raised StopIteration", failure.detail))
    if (signal := find_signal(error)) is None:
        return Threw(failure)
    kind = next(name for name, one in HANDLER_SIGNALS.items() if isinstance(signal, one))
    return Threw(failure, kind, signal.delay_us, signal.at_us)


def _end_group() -> None:
    """This process and whatever its handler has started: they all worked for a worker that is no more."""
    with contextlib.suppress(OSError, AttributeError):
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


class _Forward(logging.Handler):
    """Hands log records to the worker, where the program's own logging set-up is."""

    def __init__(self, send: Callable[[Up], object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.exc_info and not record.exc_text:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
            plain = (str, int, float, bool, type(None))
            fields = {name: value for name, value in record.__dict__.items() if isinstance(value, plain)}
            self._send(Logged(fields | {"msg": record.getMessage(), "processName": "taskharbor-process"}))
        except Exception:
            self.handleError(record)
