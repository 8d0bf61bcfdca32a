"""What the worker's tests share: a store with a client on it, workers that run beside a test, and drivers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from logging.handlers import BufferingHandler
from typing import Any, NoReturn, TypeVar

from records import present
from taskharbor import AsyncClient, BackendUnavailable, Job, JobRecord, JobRequest, JobState, Worker
from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.operations import Operation
from taskharbor.jobs import SECOND, Attempt, Micros, Outcome

A = TypeVar("A")
T = TypeVar("T")

PATIENCE = 30.0
"""An upper bound for what should take milliseconds, on a machine that does something else as well."""


class Stage:
    """One store, seen from outside the workers on it."""

    def __init__(self, driver: Driver | None = None, clock: Clock | None = None) -> None:
        self.driver = driver or MemoryDriver()
        self.client = AsyncClient(self.driver.clone(), clock=clock)

    def again(self) -> Stage:
        """The same store, for another event loop."""
        return Stage(self.driver)

    async def enqueue(self, type: str = "work", payload: Any = None, **options: Any) -> str:
        return (await self.client.enqueue(JobRequest(type=type, payload=payload, **options))).id

    async def enqueue_many(self, count: int, type: str = "work", **options: Any) -> list[str]:
        requests = [JobRequest(type=type, payload=n, **options) for n in range(count)]
        return [one.id for one in await self.client.enqueue_many(requests)]

    async def get(self, job_id: str) -> JobRecord:
        return await self.client.get(job_id)

    async def state(self, job_id: str) -> JobState:
        return (await self.get(job_id)).state

    async def ended(self, job_id: str) -> JobRecord:
        return await self.client.wait_for(job_id, timeout=PATIENCE)

    async def until(self, job_id: str, condition: Callable[[JobRecord], bool]) -> None:
        """Until this holds for the job."""

        async def holds() -> bool:
            return condition(await self.get(job_id))

        await eventually(holds)

    async def log(self, job_id: str) -> list[Attempt]:
        return await self.client.job_attempts(job_id)

    async def outcomes(self, job_id: str) -> list[Outcome]:
        return [attempt.outcome for attempt in await self.log(job_id)]

    async def pause(self, queue: str = "default") -> None:
        await self.client.pause(queue)

    async def take_away(self, job_id: str, *, limit: int = 1000) -> int:
        """End the leases of the job's queue as if their time were over, without waiting for it; how many."""
        record = await self.get(job_id)
        # Also where a heartbeat comes between the two calls.
        over = present(record.expires_at_us) + 10 * SECOND
        return await self.client.driver.reclaim(now=over, queue=record.queue, limit=limit)

    def worker(self, handler: Callable[[Job], Any] | None = None, **options: Any) -> Worker:
        """A worker with one handler, for jobs of type `work`."""
        worker = Worker(self.driver.clone(), **{"concurrency": 4, "grace": PATIENCE, **options})
        if handler is not None:
            worker.register("work", handler)
        return worker

    async def drain(self, handler: Callable[[Job], Any] | None = None, **options: Any) -> Worker:
        """Run a worker until nothing is left to do."""
        await finish((worker := self.worker(handler, **{"until_empty": True, **options})).run_async())
        return worker


@contextlib.asynccontextmanager
async def stage(driver: Driver | None = None, clock: Clock | None = None) -> AsyncIterator[Stage]:
    here = Stage(driver, clock)
    try:
        yield here
    finally:
        await here.client.close()


@contextlib.asynccontextmanager
async def running(*workers: Worker) -> AsyncIterator[None]:
    """The workers run beside the block; after it they are stopped and must end."""
    tasks = [asyncio.ensure_future(worker.run_async()) for worker in workers]
    try:
        yield
        for worker in workers:
            worker.stop()
        await finish(asyncio.gather(*tasks))
    finally:
        for worker, task in zip(workers, tasks, strict=True):
            if not task.done():
                worker.stop(now=True)
        await asyncio.gather(*tasks, return_exceptions=True)


async def finish(work: Awaitable[T]) -> T:
    """What comes of the work, which must end by itself: one that ends only when cancelled, however it does, fails the test."""
    try:
        async with asyncio.timeout(PATIENCE) as limit:
            return await work
    finally:
        assert not limit.expired(), f"did not end within {PATIENCE:g} s"


class Gate:
    """Handlers that tell when they have begun and wait until they may go on. Who is asked to stop keeps the reason."""

    def __init__(self, result: Any = None) -> None:
        self._began, self.go_on = threading.Event(), threading.Event()
        self.calls, self._result = 0, result
        self.reasons: list[str | None] = []

    async def began(self) -> None:
        await eventually(self._began.is_set)

    async def on_loop(self, job: Job) -> Any:
        self._began.set()
        try:
            await eventually(self.go_on.is_set)
        except asyncio.CancelledError:
            self.reasons.append(job.stop_reason)
            raise
        return self._result

    def on_thread(self, work: Any) -> Any:
        """For a job or a batch."""
        self.calls += 1
        self._began.set()
        assert self.go_on.wait(PATIENCE)
        return self._result

    def until_stopped(self, job: Job) -> str:
        """On a thread."""
        self._began.set()
        assert job.wait_for_stop(PATIENCE)
        self.reasons.append(job.stop_reason)
        return "half of it"


async def begun(worker: Worker, gate: Gate) -> asyncio.Task[None]:
    """The worker's run, once a handler stands at the gate."""
    task = asyncio.create_task(worker.run_async())
    await gate.began()
    return task


async def never() -> NoReturn:
    """Wait for a cancellation."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")


async def eventually(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Until the condition holds; fails the test if it never does."""
    async with asyncio.timeout(PATIENCE):
        while True:
            holds = condition()
            if not isinstance(holds, bool):
                holds = await holds
            if holds:
                return
            await asyncio.sleep(0.005)


class Trouble:
    """Which calls fail, and how. Shared by all handles on a store."""

    def __init__(self) -> None:
        self.before: set[str] = set()
        """Operations that fail without having happened."""
        self.after: set[str] = set()
        """Operations that happen and then say they failed."""
        self.refused: list[str] = []
        self.refuse: Callable[[Operation[Any]], Exception | None] = lambda call: None
        """Returns the error with which a driver refuses a call."""
        self.hang: set[str] = set()
        self.hanging = 0


EVERYTHING = frozenset({"open", "time", "reserve", "extend_lease", "settle", "stats", "wait", "reclaim"})


class TroubledDriver(MemoryDriver):
    """A memory store whose connection fails on demand."""

    def __init__(self, store: Any = None, *, clock: Any = None, trouble: Trouble | None = None) -> None:
        super().__init__(store, clock=clock)
        self.trouble = trouble or Trouble()

    def clone(self) -> TroubledDriver:
        return TroubledDriver(self._store, clock=self._clock, trouble=self.trouble)

    async def _through(self, name: str, call: Coroutine[Any, Any, T]) -> T:
        trouble = self.trouble
        if name in trouble.hang:
            call.close()
            trouble.hanging += 1
            await asyncio.Event().wait()
        if name in trouble.before:
            call.close()
            trouble.refused.append(name)
            raise BackendUnavailable(f"{name}: no connection")
        answer = await call
        if name in trouble.after:
            trouble.refused.append(name)
            raise BackendUnavailable(f"{name}: connection lost")
        return answer

    async def open(self) -> None:
        await self._through("open", super().open())

    async def time(self) -> Micros:
        return await self._through("time", super().time())

    def run(self, call: Operation[A]) -> Coroutine[Any, Any, A]:
        refusal = self.trouble.refuse(call)
        if refusal is not None:
            raise refusal
        return self._through(call.name, super().run(call))


@contextlib.asynccontextmanager
async def troubled_stage(trouble: Trouble) -> AsyncIterator[Stage]:
    """Workers have this trouble with the store; whoever looks at it from outside has none."""
    driver = TroubledDriver(trouble=trouble)
    async with stage(MemoryDriver(driver._store)) as here:
        here.driver = driver
        yield here


class Calls(BufferingHandler):
    """Collects what a logger is told."""

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.buffer]

    def count(self, text: str) -> int:
        return sum(text in message for message in self.messages)


@contextlib.contextmanager
def logged(name: str = "taskharbor.worker", level: int = logging.INFO) -> Iterator[Calls]:
    logger, calls = logging.getLogger(name), Calls(sys.maxsize)
    before = logger.level
    logger.addHandler(calls)
    logger.setLevel(level)
    try:
        yield calls
    finally:
        logger.removeHandler(calls)
        logger.setLevel(before)
