"""One execution, by the worker's own rules and without a worker: same middleware, same decision, no loops, no threads.

Handlers run in the calling thread whatever their isolation says, and their exceptions are kept as they were raised. A worker
puts plain functions on threads. A test wants them here, so that what is bound to the test's thread (a database connection, a
context variable, a debugger) is what the handler sees.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from taskharbor.client import AsyncClient
from taskharbor.drivers.contract import Fail, Retry, Settlement
from taskharbor.errors import HandlerMissing
from taskharbor.handlers import Handler
from taskharbor.harbor import Harbor
from taskharbor.jobs import JobRecord, Micros, Outcome
from taskharbor.middleware import Call, Job, PayloadRejected, Raised, chain, function_call, set_current_job
from taskharbor.worker.decide import decide, no_handler

T = TypeVar("T")


class Executed(msgspec.Struct, frozen=True):
    """An execution that has ended."""

    record: JobRecord
    """The job as the handler saw it."""
    outcome: Outcome
    error: BaseException | None = None
    """What made it fail, as it was raised. A snooze or a discard is not a failure."""

    @property
    def type(self) -> str:
        return self.record.type

    def __str__(self) -> str:
        reason = "" if self.error is None else f": {type(self.error).__name__}: {self.error}"
        return f"{self.record.type} {self.record.id} {self.outcome}{reason}"


async def execute(harbor: Harbor, client: AsyncClient, record: JobRecord) -> Executed:
    """Run a leased job and settle it."""
    settlement, error = await _run(harbor, client, record)
    (refused,) = await client.driver.settle([settlement], now=await client.now())
    if refused is not None:
        raise refused
    # What the backend made of it: a job that was cancelled meanwhile is not retried, whatever the handler did.
    outcome = (await client.driver.job_attempts(record.id))[-1].outcome
    return Executed(record, outcome, error if isinstance(settlement, (Retry, Fail)) else None)


async def _run(
    harbor: Harbor, client: AsyncClient, record: JobRecord
) -> tuple[Settlement, BaseException | None]:
    handler = harbor.handlers.get(record.type)
    if handler is None:
        settlement = no_handler(record)
        return settlement, HandlerMissing(f"no handler for type {record.type!r}")
    outcome = await call(harbor, handler, record, await client.now())
    settlement = decide(record, handler, outcome, harbor.codecs, await client.now())
    return settlement, error_of(outcome)


async def call(harbor: Harbor, handler: Handler, record: JobRecord, now: Micros) -> Any:
    """The handler's result, or `Raised`: through the whole chain, in a context of its own."""
    job = Job(record, now)

    async def in_context() -> Any:
        set_current_job(job)
        return await chain(handler, harbor.codecs, harbor.middleware, _innermost(handler))(job)

    task = asyncio.ensure_future(in_context())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError as cancelled:
        if task.done():  # The handler cancelled itself, which is a failure like any other.
            return Raised(cancelled)
        task.cancel()
        raise


def error_of(outcome: Any) -> BaseException | None:
    if not isinstance(outcome, Raised):
        return None
    error = outcome.error
    return error.cause if isinstance(error, PayloadRejected) else error


def _innermost(handler: Handler) -> Call:
    call_function = function_call(handler)
    if handler.is_async:
        return call_function

    async def in_this_thread(job: Job) -> Any:
        with outside_the_loop():
            return call_function(job)

    return in_this_thread


# -- between synchronous and asynchronous code in one thread ----------------------------------------------


@contextmanager
def outside_the_loop() -> Iterator[None]:
    """Plain code called from a coroutine: for its duration no event loop runs in this thread."""
    outer = _get_running_loop()
    _set_running_loop(None)
    try:
        yield
    finally:
        _set_running_loop(outer)


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in this thread, on a loop of its own that nobody else ever sees."""
    with outside_the_loop():
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(work)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
