"""The job or batch that a handler sees, and the calls around a handler.

Around a handler are recover, timeout, validate, and then the user's own middleware. A middleware is `async def mine(job,
call_next)`: do something, `return await call_next(job)`, do something. `chain` makes one callable of them, once per handler.
TaskHarbor's own middleware takes the inner call and returns the outer one, so a job pays one call for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeAlias

import msgspec

from taskharbor.codec import CodecRegistry
from taskharbor.errors import CodecError, InvalidRequest, JobTimeout
from taskharbor.handlers import Handler, Lifespan
from taskharbor.jobs import MAX_PROGRESS_BYTES, SECOND, JobRecord, Micros, to_datetime

log = logging.getLogger("taskharbor.worker")

TIMEOUT = "timeout"
"""The stop reason of a job whose time is up."""

_current: ContextVar[Job] = ContextVar("taskharbor_current_job")
_current_batch: ContextVar[Batch] = ContextVar("taskharbor_current_batch")
_state: ContextVar[Any] = ContextVar("taskharbor_state", default=None)
_scope: ContextVar[asyncio.Timeout] = ContextVar("taskharbor_timeout")


# -- the job ------------------------------------------------------------------------------------------------


class Stoppable:
    """Work that can be asked to stop, from any thread: a job or a batch of jobs."""

    stop_reason: str | None = None
    """The reason of the first request to stop."""
    _stop_event: threading.Event | None = None
    """Made when a thread first waits for it."""
    on_stop: Callable[[str], object] | None = None
    """Called with the reason, in the thread that asks first."""
    thread_call: Any = None
    """The worker's `ThreadCall`, where a thread runs the work."""

    @property
    def should_stop(self) -> bool:
        """True once the work was cancelled, timed out, lost its lease or the worker is shutting down."""
        return self.stop_reason is not None

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Sleep, in a thread, until `timeout` seconds have passed or the work should stop. Returns True if it should stop."""
        if self._stop_event is None:
            self._stop_event = threading.Event()
        # Checked again now that the event exists: `stop` may have been called in between.
        if self.stop_reason is not None:
            self._stop_event.set()
        return self._stop_event.wait(timeout)

    def stop(self, reason: str) -> None:
        """Ask the work to stop. The first reason stays."""
        if self.stop_reason is None:
            self.stop_reason = reason
            if self.on_stop is not None:
                self.on_stop(reason)
        if self._stop_event is not None:
            self._stop_event.set()


class Job(Stoppable):
    """The job that a handler is working on. Reading it needs no call to the backend. `progress` is sent with the
    next heartbeat."""

    arguments: Any = None
    """The decoded and validated payload, once the validate middleware has run."""

    def __init__(
        self,
        record: JobRecord,
        started_at_us: Micros,
        report: Callable[[JobRecord, bytes], object] | None = None,
    ) -> None:
        self.record = record
        self.started_at_us = started_at_us
        self._report = report

    @property
    def id(self) -> str:
        """The id of the job."""
        return self.record.id

    @property
    def type(self) -> str:
        """The name of the job type."""
        return self.record.type

    @property
    def queue(self) -> str:
        """The name of the queue."""
        return self.record.queue

    @property
    def payload(self) -> bytes:
        """The encoded payload."""
        return self.record.payload

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that the producer gave."""
        return self.record.headers

    @property
    def key(self) -> str | None:
        """The key, or None."""
        return self.record.key

    @property
    def attempt(self) -> int:
        """The number of this execution, from 1. Failures and expired leases before it count."""
        return self.record.attempts + self.record.stalls + 1

    @property
    def max_attempts(self) -> int:
        """The number of executions that the job may have."""
        return self.record.max_attempts

    @property
    def fence(self) -> int:
        """A number that grows with every lease of this job. Pass it to a resource that can refuse an older holder."""
        return self.record.fence

    @property
    def run_at(self) -> datetime:
        """The instant from which the job may run."""
        return self.record.run_at

    @property
    def created_at(self) -> datetime:
        """The instant of acceptance."""
        return self.record.created_at

    @property
    def timeout(self) -> timedelta | None:
        """The longest time for one execution, or None."""
        return self.record.timeout

    @property
    def started_at(self) -> datetime:
        """The instant at which this execution began, by the clock of the store."""
        return to_datetime(self.started_at_us)

    @property
    def deadline(self) -> datetime | None:
        """The instant at which the timeout ends the execution, or None."""
        if not self.record.timeout_us:
            return None
        return self.started_at + timedelta(microseconds=self.record.timeout_us)

    @property
    def state(self) -> Any:
        """The value of the app's `lifespan` in this process, or None."""
        return _state.get()

    def progress(self, value: Any) -> None:
        """Report the progress of the job: any small value that JSON can hold. Others see it from the next heartbeat on.

        A value that cannot be kept does not fail the job: the log warns, and the progress before it stays.
        """
        try:
            encoded = msgspec.json.encode(value)
            if len(encoded) > MAX_PROGRESS_BYTES:
                raise ValueError(f"it has {len(encoded)} bytes, and at most {MAX_PROGRESS_BYTES} are")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            log.warning("a progress of %s %s is not kept: %s", self.type, self.id, error)
            return
        if self._report is not None:
            self._report(self.record, encoded)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.type} attempt {self.attempt}/{self.max_attempts}>"


class Batch(Stoppable):
    """The jobs of one call of a batch handler. The handler can ask it whether to stop."""

    def __init__(self, records: Sequence[JobRecord]) -> None:
        self.records = records
        """The jobs in the order of their leases. A rejected row is in here and not in the frame."""

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} {self.records[0].type}>"


def current_job() -> Job:
    """Return the job that this code runs for. Works in async handlers, in threads and in worker processes.

    Raises:
        RuntimeError: No job runs here.
    """
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError("no job is running here: current_job() works inside a handler only") from None


set_current_job: Callable[[Job], object] = _current.set
"""Set the job that the code of this context runs for."""


def current_batch() -> Batch:
    """Return the batch that this code runs for."""
    try:
        return _current_batch.get()
    except LookupError:
        raise RuntimeError(
            "no batch is running here: current_batch() works inside a batch handler only"
        ) from None


set_current_batch: Callable[[Batch], object] = _current_batch.set


# -- what a process has open for its jobs -------------------------------------------------------------------


@contextlib.asynccontextmanager
async def entered(lifespan: Lifespan | None) -> AsyncIterator[Any]:
    """Enter an app's lifespan. Contexts that are copied meanwhile have its value as `current_job().state`."""
    if lifespan is None:
        yield None
        return
    place = "start"
    try:
        async with contextlib.AsyncExitStack() as stack:
            manager = lifespan()
            if isinstance(manager, AbstractAsyncContextManager):
                value = await stack.enter_async_context(manager)
            elif isinstance(manager, AbstractContextManager):
                value = stack.enter_context(manager)
            else:
                raise InvalidRequest(
                    f"lifespan returned a {type(manager).__name__}: it is a function that returns a context manager, as one "
                    "with @contextlib.asynccontextmanager does"
                )
            before = _state.set(value)
            place = ""
            try:
                yield value
            finally:
                _state.reset(before)
            place = "end"
    except Exception:
        if place:  # Other errors are the caller's.
            log.exception("the lifespan %s failed at its %s", getattr(lifespan, "__name__", lifespan), place)
        raise


# -- the chain of calls -------------------------------------------------------------------------------------

Call: TypeAlias = Callable[[Job], Awaitable[Any]]
Middleware: TypeAlias = Callable[[Job, Call], Awaitable[Any]]


def chain(handler: Handler, codecs: CodecRegistry, own: Sequence[Middleware], innermost: Call) -> Call:
    """Make the call of a handler with all middleware around it. The user's own middleware is innermost."""
    call = innermost
    for layer in reversed(own):
        call = _wrap(layer, call)
    return recover(timeout(validate(handler, codecs, call)))


def _wrap(layer: Middleware, call_next: Call) -> Call:
    return lambda job: layer(job, call_next)


def function_call(handler: Handler) -> Callable[[Job], Any]:
    """Make the call of the handler's function: with the arguments in the payload, or with the `Job` itself."""
    if handler.arguments is None:
        return handler.function
    call = handler.arguments.caller(handler.function)
    return lambda job: call(job.arguments)


class Raised(msgspec.Struct, frozen=True):
    """An execution that ended with an exception."""

    error: BaseException


def recover(call: Call) -> Call:
    """Turn any exception of a handler into a value. A failing handler must never end its worker."""

    async def recovered(job: Job) -> Any:
        try:
            return await call(job)
        except (asyncio.CancelledError, GeneratorExit):
            raise  # As a rule somebody else cancelled the handler. The runner knows the reason.
        except BaseException as error:  # sys.exit() in a handler ends the job, not the worker.
            return Raised(error)

    return recovered


def timeout(call: Call) -> Call:
    """End an execution that takes longer than its job's timeout.

    On the event loop and in worker processes the execution really ends. A thread cannot be killed. It is asked to stop
    (`job.should_stop`), and its lease is kept until it has ended, or until the worker's grace is over as well.
    """
    # Not a coroutine itself, so a job without a timeout costs none.
    return lambda job: (
        limited(job, job.record.timeout_us, partial(call, job)) if job.record.timeout_us else call(job)
    )


async def limited(
    work: Stoppable, timeout_us: Micros, call: Callable[[], Awaitable[Any]], complaint: str = "took"
) -> Any:
    """Await the result of `call`, for at most `timeout_us`."""
    seconds = timeout_us / SECOND
    too_long = f"{complaint} longer than its timeout of {seconds:g} s"
    try:
        async with asyncio.timeout(seconds) as scope:
            _scope.set(scope)
            return await call()
    except TimeoutError as error:
        if not scope.expired():
            raise  # The handler raised it itself.
        work.stop(TIMEOUT)
        raise JobTimeout(too_long) from error
    except asyncio.CancelledError as error:
        # A thread past its timeout is waited for a while. A cancellation meanwhile does not change the reason.
        if scope.expired() and work.stop_reason == TIMEOUT:
            raise JobTimeout(too_long) from error
        raise


def is_overdue() -> bool:
    """Return True if the timeout has ended the execution that this code runs for."""
    scope = _scope.get(None)
    return scope is not None and scope.expired()


def reschedule_timeout(job: Job, when: float | None) -> None:
    """Let the timeout end the execution at this time of the loop; None stops it. A worker that needs time itself (a process
    starts) does not charge the handler for it."""
    if job.record.timeout_us:
        with contextlib.suppress(RuntimeError):  # The timeout has just ended the execution.
            _scope.get().reschedule(when)


class PayloadRejected(Exception):
    """The payload does not fit the handler. Not a CodecError, because a handler's own code may raise that for other reasons."""

    def __init__(self, cause: CodecError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def validate(handler: Handler, codecs: CodecRegistry, call: Call) -> Call:
    """Check payloads against the handler's types. An invalid payload is never retried: it would be invalid again."""
    if handler.arguments is None:
        return call
    payload_type = handler.arguments.type

    def validated(job: Job) -> Awaitable[Any]:
        record = job.record
        try:
            job.arguments = codecs.get(record.codec).decode(record.payload, payload_type)
        except CodecError as misfit:
            raise PayloadRejected(misfit) from misfit
        return call(job)

    return validated
