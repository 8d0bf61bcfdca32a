"""Private stores for the time of a test, and jobs that run when they are enqueued: for tests of the effect and not of the
queue. `HarborTesting` has all of it as methods."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from taskharbor.client import AsyncClient, Client, kept_result, portal
from taskharbor.clock import Clock, FakeClock, SystemClock
from taskharbor.drivers.contract import JoinedAsyncTransaction, JoinedTransaction
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.records import Enqueued
from taskharbor.errors import InvalidRequest, WaitTimeout
from taskharbor.handlers import Lifespan
from taskharbor.harbor import Harbor, JobType
from taskharbor.jobs import JobRecord, JobState, Micros
from taskharbor.middleware import entered
from taskharbor.requests import RecordBuilder
from taskharbor.testing import assertions, draining
from taskharbor.transactions import is_async
from taskharbor.worker.decide import encode_result

LIMIT = 1000

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class PrivateDriver(MemoryDriver):
    """A memory store that belongs to a test. It stores jobs at once, those of `within` too: it cannot see a commit."""

    def within(self, transaction: object) -> JoinedTransaction | JoinedAsyncTransaction:
        if not hasattr(transaction, "commit"):
            raise InvalidRequest(f"{transaction!r} is not a transaction: give a connection or a session")
        return _StoredAtOnceAsync(self) if is_async(transaction) else _StoredAtOnce(self)


class _AtOnce:
    def __init__(self, driver: PrivateDriver) -> None:
        self._driver = driver


class _StoredAtOnce(_AtOnce, JoinedTransaction):
    def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]:
        return draining.run_here(self._driver.enqueue(records, now=now))


class _StoredAtOnceAsync(_AtOnce, JoinedAsyncTransaction):
    async def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]:
        return await self._driver.enqueue(records, now=now)


class PrivateClient(Client):
    """A client of a private store. It does not wait for what cannot happen."""

    def wait_for(self, job_id: str, *, timeout: timedelta | float | None = None) -> JobRecord:
        record = self.resolve(job_id)
        # A worker of the test has threads. Without one, nothing runs the job while this thread waits.
        others = {*threading.enumerate()} - {threading.current_thread(), portal()._thread}
        if not record.state.is_terminal and not others:
            raise WaitTimeout(
                f"job {job_id} is {record.state}, and nothing runs jobs while the test waits: call drain(harbor) before"
            )
        return super().wait_for(job_id, timeout=timeout)


@contextmanager
def memory_store(harbor: Harbor, *, clock: Clock | None = None) -> Iterator[Harbor]:
    """Give the app an empty memory store; its own store, clients and clock come back at the end.

    Time stands still at the moment of the swap, so that delays can be stepped over (`harbor.clock`, or `drain` with
    `with_scheduled`). For time that flows, pass `clock=SystemClock()`.
    """
    draining.check_app(harbor)
    ticking = FakeClock(SystemClock().now()) if clock is None else clock
    before = (harbor._driver, harbor._client, harbor._async_clients, harbor.clock, harbor._client_types)
    harbor._client_types = (PrivateClient, AsyncClient)
    harbor._async_clients = weakref.WeakKeyDictionary()
    harbor.clock = ticking
    harbor.use(PrivateDriver(clock=ticking))
    try:
        yield harbor
    finally:
        harbor.close()
        harbor._driver, harbor._client, harbor._async_clients, harbor.clock, harbor._client_types = before


def run_inline(job_type: JobType[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run one job here and now, and return its result; what the handler raises is raised.

    Arguments and result go through the codec, the call through the middleware, and the lifespan is entered: what works here
    works in a worker. No store is touched, except by what the handler itself enqueues.
    """
    return draining.run_here(run_inline_async(job_type, *args, **kwargs))


async def run_inline_async(job_type: JobType[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """As `run_inline`, with an `async def` handler on the calling event loop."""
    if not isinstance(job_type, JobType):
        raise TypeError(f"{job_type!r}: give a job that @harbor.job declared, and then its arguments")
    harbor = job_type._harbor
    harbor.load()
    now = (harbor.clock or SystemClock()).now()
    builder = RecordBuilder(harbor.defaults, harbor.codecs)
    (record,) = builder.build([job_type.request(*args, **kwargs)], now)
    leased = msgspec.structs.replace(record, state=JobState.INFLIGHT, token="inline", fence=1)
    async with entered(harbor.lifespan):
        outcome = await draining.call(harbor, job_type.handler, leased, now)
    error = draining.error_of(outcome)
    if error is not None:
        raise error
    codec = harbor.codecs.get(record.codec)
    encoded = encode_result(job_type.handler, leased, outcome, harbor.codecs)
    result: R = kept_result(codec, leased, encoded, job_type._result_type)
    return result


@contextmanager
def inline(harbor: Harbor, *, raise_errors: bool = True) -> Iterator[Harbor]:
    """In this block every enqueue runs its job before it returns; handles have their results at once.

    The app is on a private store meanwhile: the one it has from `memory_store` or a fixture, or a new one.
    A failure of the handler comes out of the enqueue, `Retry` and `Unrecoverable` too, when failure handlers have run; of
    several, the first. `Cancel` and `Snooze` are no failures: the job is cancelled, or runs again at once. With
    `raise_errors=False` the job is retried at once instead, until it is done or dead, and `handle.result()` tells which. A
    job with a delay waits: `drain(harbor, with_scheduled=True)`.
    """
    draining.check_app(harbor)
    harbor.load()

    async def run_all() -> None:
        # A pool belongs to the loop on which it was made, so another loop gets a value of its own.
        is_home = asyncio.get_running_loop() is home
        async with entered((lambda: nullcontext(state)) if is_home else harbor.lifespan):
            await _run_all(harbor, raise_errors)

    def then_run(method: Callable[Concatenate[Client, P], T]) -> Callable[Concatenate[Client, P], T]:
        """Make an enqueue whose jobs have run when it returns, in the caller's thread."""

        @functools.wraps(method)
        def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
            accepted = method(self, *args, **kwargs)
            if home.is_running():  # A handler enqueues.
                draining.run_here(run_all())
            else:
                with draining.outside_the_loop():
                    runner.run(run_all(), context=copy_context())
            return accepted

        return call

    class InlineClient(PrivateClient):
        enqueue_batch = then_run(Client.enqueue_batch)
        enqueue_many = then_run(Client.enqueue_many)
        enqueue_like = then_run(Client.enqueue_like)

    class InlineAsyncClient(AsyncClient):
        async def _send(self, records: list[JobRecord], now: Micros, chunk: int) -> list[Enqueued]:
            accepted = await super()._send(records, now, chunk)
            await run_all()
            return accepted

    own_store = nullcontext() if isinstance(harbor._driver, PrivateDriver) else memory_store(harbor)
    with own_store, _living(harbor.lifespan) as (runner, state):
        home = runner.get_loop()
        before = (harbor._client, harbor._async_clients, harbor._client_types)
        harbor._client, harbor._async_clients = None, weakref.WeakKeyDictionary()
        harbor._client_types = (InlineClient, InlineAsyncClient)
        try:
            yield harbor
        finally:
            harbor.close()
            harbor._client, harbor._async_clients, harbor._client_types = before


@contextmanager
def _living(lifespan: Lifespan | None) -> Iterator[tuple[asyncio.Runner, Any]]:
    """Enter the lifespan on a loop of its own. Gives the loop's runner and the lifespan's value."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()
    value, leaving = loop.create_future(), loop.create_future()

    async def live() -> None:  # One task enters and leaves: a task group demands it.
        async with entered(lifespan) as state:
            value.set_result(state)
            await leaving

    life = loop.create_task(live())
    try:
        with draining.outside_the_loop():
            runner.run(asyncio.wait((life, value), return_when=asyncio.FIRST_COMPLETED))
        if value.done():
            yield runner, value.result()
    finally:
        with draining.outside_the_loop(), runner:
            leaving.set_result(None)
            runner.run(asyncio.wait((life,)))
        life.result()  # Raises what the lifespan raised.


async def _run_all(harbor: Harbor, raise_errors: bool) -> None:
    """Run all runnable jobs. All earlier jobs have been run already, so these are the jobs that were just enqueued."""
    first: BaseException | None = None
    async with AsyncClient(harbor.driver(), clock=harbor.clock) as client:
        await draining.declare_queues(harbor, client, None)
        for _ in range(LIMIT):
            executed = await draining.run_next(harbor, client, None)
            if executed is None:
                if first is not None:
                    raise first
                return
            # The retry of a job that an earlier enqueue raised for says nothing about this one.
            if executed.error is not None and raise_errors and not executed.record.attempts:
                first = first or executed.error
                continue
            record = await client.get(executed.record.id)
            clock = harbor.clock
            if record.state is JobState.SCHEDULED and isinstance(clock, FakeClock):
                clock.advance(timedelta(microseconds=record.run_at_us - clock.now()))
        raise RuntimeError(
            f"{LIMIT} executions for one enqueue; does a job snooze or enqueue itself for ever?"
        )


# -- the app under test as one object ----------------------------------------------------------------------


def _on_harbor(function: Callable[Concatenate[Harbor, P], T]) -> Callable[Concatenate[HarborTesting, P], T]:
    """Make a method of a function whose first argument is the app under test."""

    @functools.wraps(function)
    def call(self: HarborTesting, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(self.harbor, *args, **kwargs)

    return call


class HarborTesting:
    """An app on a private store, with this package's functions as methods: the object that the pytest fixtures give to a test."""

    def __init__(self, harbor: Harbor) -> None:
        self.harbor = harbor

    @property
    def clock(self) -> FakeClock:
        """The clock that stands still."""
        return draining.clock_of(self.harbor)

    def advance(self, by: timedelta | float) -> None:
        """Let time pass, by a timedelta or by seconds."""
        self.clock.advance(by)

    drain = _on_harbor(draining.drain)
    drain_async = _on_harbor(draining.drain_async)
    inline = _on_harbor(inline)
    enqueued = _on_harbor(assertions.enqueued)
    assert_enqueued = _on_harbor(assertions.assert_enqueued)
    refute_enqueued = _on_harbor(assertions.refute_enqueued)
