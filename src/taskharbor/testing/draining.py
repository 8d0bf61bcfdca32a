"""Runs everything that can run, one job after the other, and says what came of it.

Deterministic: by queue name, then in the order a worker would claim. Ends when nothing is runnable, including what handlers
enqueued meanwhile. Executions follow the worker's own rules without a worker: same middleware, same decision, no loops, no
threads. Handlers run in the calling thread whatever their isolation says, so that what is bound to the test's thread (a database
connection, a context variable, a debugger) is what the handler sees. Their exceptions are kept as they were raised.

The app is set up as a worker does it: its modules are imported, its declared queues applied, its lifespan is entered.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop, _set_running_loop
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec

from taskharbor.client import AsyncClient, refuse_in_loop
from taskharbor.clock import FakeClock
from taskharbor.drivers.records import Fail, JobFilter, RetryAt
from taskharbor.drivers.validation import listed
from taskharbor.errors import HandlerMissing, RemoteError
from taskharbor.failures import served_queues
from taskharbor.handlers import Handler
from taskharbor.harbor import Harbor
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros, Outcome
from taskharbor.middleware import (
    Call,
    Job,
    PayloadRejected,
    Raised,
    chain,
    entered,
    function_call,
    set_current_job,
)
from taskharbor.requests import as_duration, as_instant
from taskharbor.schedules import QUEUE as SCHEDULES
from taskharbor.schedules.declarations import put_declared
from taskharbor.schedules.ticking import tick
from taskharbor.worker.decide import decide, no_handler

T = TypeVar("T")

# Long enough for a test that stops in a debugger.
LEASE: Micros = 3600 * SECOND
NAME = "taskharbor-drain"
# Executions of one job that are no endless loop yet; a tenth of the limit if that is more.
RUNS_OF_ONE = 1000


class Executed(msgspec.Struct, frozen=True):
    """An execution that has ended.

    Attributes:
        record: The job as the handler saw it.
        outcome: How it ended.
        error: The exception that made it fail. A snooze or a discard is not a failure.
    """

    record: JobRecord
    outcome: Outcome
    error: BaseException | None = None

    @property
    def type(self) -> str:
        """The job's type."""
        return self.record.type

    def __str__(self) -> str:
        reason = "" if self.error is None else f": {type(self.error).__name__}: {self.error}"
        return f"{self.record.type} {self.record.id} {self.outcome}{reason}"


class DrainReport:
    """Executions in order, counted by how they ended. An execution that was retried counts, and so does its retry."""

    def __init__(self, executed: Sequence[Executed]) -> None:
        self.executed = list(executed)
        self.counts: Counter[Outcome] = Counter(one.outcome for one in executed)

    @property
    def total(self) -> int:
        """All executions."""
        return len(self.executed)

    @property
    def done(self) -> int:
        """Executions that succeeded."""
        return self.counts[Outcome.DONE]

    @property
    def retried(self) -> int:
        """Executions that failed and wait for another attempt."""
        return self.counts[Outcome.RETRIED]

    @property
    def dead(self) -> int:
        """Executions after which the job was dead."""
        return self.counts[Outcome.DEAD]

    @property
    def cancelled(self) -> int:
        """Executions after which the job was cancelled."""
        return self.counts[Outcome.CANCELLED]

    @property
    def released(self) -> int:
        """Executions that were snoozed."""
        return self.counts[Outcome.RELEASED]

    @property
    def errors(self) -> list[BaseException]:
        """The exceptions of handlers, with their tracebacks."""
        return [one.error for one in self.executed if one.error is not None]

    def raise_errors(self) -> None:
        """Raise the exceptions of handlers: the exception itself, or a group if there are several."""
        errors = self.errors
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} executions failed", errors)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items()))
        lines = [f"<DrainReport {counts or 'nothing to do'}>"]
        lines += [f"  {one}" for one in self.executed if one.error is not None]
        return "\n".join(lines)


def drain(
    harbor: Harbor,
    queues: Sequence[str] | None = None,
    *,
    with_scheduled: bool = False,
    until: datetime | timedelta | float | None = None,
    limit: int = 10_000,
) -> DrainReport:
    """Run what is runnable in all queues, or in these. From async code: `await drain_async(...)`.

    First the app's declared schedules are stored, and the jobs of all ticks are made that are due.

    Args:
        harbor: The app.
        queues: The queues. None: all.
        with_scheduled: Also run what is due later, retries included: the app's fake clock moves from one due time to the next.
            No ticks are made on the way: they never end.
        until: The same up to this time, with each tick at its instant. The clock then stands there. Seconds and timedeltas count
            from now.
        limit: More executions are taken for an endless loop, and so are more than 1,000 of one job (a tenth of the limit, if that
            is more).

    A handler's exception ends its job as it would in production and is found in the report (`report.errors`,
    `report.raise_errors()`), and the failure handlers of a dead job run too.
    """
    refuse_in_loop("drain()", "await drain_async(...)")
    return run_here(drain_async(harbor, queues, with_scheduled=with_scheduled, until=until, limit=limit))


async def drain_async(
    harbor: Harbor,
    queues: Sequence[str] | None = None,
    *,
    with_scheduled: bool = False,
    until: datetime | timedelta | float | None = None,
    limit: int = 10_000,
) -> DrainReport:
    """As `drain`, with handlers on the calling event loop."""
    check_app(harbor)
    harbor.load()
    queues = None if queues is None else listed("queues", queues)
    end: Micros | None = None
    if until is not None:
        is_instant, with_scheduled = isinstance(until, datetime), True
        end = (
            as_instant("until", until) if is_instant else clock_of(harbor).now() + as_duration("until", until)
        )
    if with_scheduled:
        clock_of(harbor)  # Complain before anything runs.
    executed: list[Executed] = []
    runs: Counter[str] = Counter()
    async with AsyncClient(harbor.driver(), clock=harbor.clock) as client, entered(harbor.lifespan):
        queues = await declare_queues(harbor, client, queues)
        await put_declared(harbor, client.driver, await client.now())
        await _make_ticks(client)
        while True:
            one = await run_next(harbor, client, queues)
            if one is not None:
                executed.append(one)
                runs[one.record.id] += 1
                if len(executed) > limit or runs[one.record.id] > max(limit // 10, RUNS_OF_ONE):
                    raise RuntimeError(
                        f"{len(executed)} executions, {runs[one.record.id]} of them of one job, and still not empty; is a "
                        f"job enqueueing itself, or snoozing for ever? If not, give a limit above {limit}. The last one was {one}"
                    )
            elif not with_scheduled or not await _step_to_next(harbor, client, queues, end):
                return DrainReport(executed)
            elif end is not None:
                await _make_ticks(client)


async def _make_ticks(client: AsyncClient) -> None:
    while await tick(client.driver, await client.now(), NAME):
        pass


def check_app(app: object) -> None:
    """Refuse what is not an app."""
    if not isinstance(app, Harbor):
        raise TypeError(f"{app!r} is not an app: give the Harbor itself")


async def declare_queues(
    harbor: Harbor, client: AsyncClient, queues: Sequence[str] | None
) -> Sequence[str] | None:
    """Apply the app's declared queues, as a worker of these queues or of all does. Returns them with their failure queues."""
    if harbor.failure_handlers:
        present = await _queues(client)
        served = served_queues(harbor, [*harbor.queues, *present] if queues is None else queues)
        queues = None if queues is None else list(served)
    await harbor._declare_queues(client.driver, await client.now())
    return queues


async def _queues(client: AsyncClient) -> list[str]:
    """Return the queues whose jobs run: all but the one of the schedules."""
    return [stats.queue for stats in await client.stats() if stats.queue != SCHEDULES]


async def run_next(harbor: Harbor, client: AsyncClient, queues: Sequence[str] | None) -> Executed | None:
    """Run the next runnable job, if there is one."""
    for queue in await _queues(client) if queues is None else queues:
        now = await client.now()
        leased = await client.driver.reserve(queue, limit=1, lease_for=LEASE, now=now, worker=NAME)
        if leased:
            return await execute(harbor, client, leased[0])
    return None


def clock_of(harbor: Harbor) -> FakeClock:
    """The app's fake clock. Raises RuntimeError where it has none."""
    if not isinstance(harbor.clock, FakeClock):
        raise RuntimeError(
            "what is scheduled can only be reached with a clock that can be moved: "
            "use memory_store(harbor), or give the app a FakeClock"
        )
    return harbor.clock


async def _step_to_next(
    harbor: Harbor, client: AsyncClient, queues: Sequence[str] | None, end: Micros | None
) -> bool:
    """Move the clock to the due time of the next scheduled job. With an end, at most to this, and ticks count too. Returns False
    if there is nothing more."""
    clock, now = clock_of(harbor), await client.now()
    running = {stats.queue for stats in await client.stats() if not stats.settings.paused}
    wanted = running if queues is None else running.intersection([*queues, SCHEDULES])
    if end is None:
        # A schedule never ends, so it is no work to wait for.
        wanted -= {SCHEDULES}
    scheduled = JobFilter(states=frozenset({JobState.SCHEDULED}))
    page = await client.list_jobs(scheduled, limit=1000)
    due = [job.run_at_us for job in page.jobs if job.queue in wanted]
    while page.cursor is not None:
        page = await client.list_jobs(scheduled, limit=1000, cursor=page.cursor)
        due += [job.run_at_us for job in page.jobs if job.queue in wanted]
    at = min(due if end is None else [*due, end], default=now)
    if at <= now:
        return False
    clock.advance(timedelta(microseconds=at - now))
    return True


# -- one execution ----------------------------------------------------------------------------------------


async def execute(harbor: Harbor, client: AsyncClient, record: JobRecord) -> Executed:
    """Run a leased job and settle it."""
    handler = harbor.handlers.get(record.type)
    settlement = no_handler(record)
    error: BaseException | None = HandlerMissing(f"no handler for type {record.type!r}")
    if handler is not None:
        result = await call(harbor, handler, record, await client.now())
        settlement = decide(record, handler, result, harbor.codecs, await client.now())
        error = error_of(result)
        if error is None and isinstance(settlement, (RetryAt, Fail)):  # A coroutine that nobody awaited.
            error = RemoteError(settlement.error)
    (refused,) = await client.driver.settle([settlement], now=await client.now())
    if refused is not None:
        raise refused
    # The backend's own outcome: a job that was cancelled meanwhile is not retried, whatever the handler did.
    state = (await client.get(record.id)).state
    back = Outcome.RETRIED if isinstance(settlement, RetryAt) else Outcome.RELEASED
    outcome = Outcome(state) if state.is_terminal else back
    return Executed(record, outcome, error if isinstance(settlement, (RetryAt, Fail)) else None)


async def call(harbor: Harbor, handler: Handler, record: JobRecord, now: Micros) -> Any:
    """Return the handler's result, or `Raised`. The call goes through the whole chain, in its own context."""
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
    """Return the exception of the handler; None if it returned."""
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
    """Run plain code that a coroutine called. Meanwhile no event loop runs in this thread."""
    outer = _get_running_loop()
    _set_running_loop(None)
    try:
        yield
    finally:
        _set_running_loop(outer)


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in this thread, on a separate loop."""
    with outside_the_loop(), asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)
