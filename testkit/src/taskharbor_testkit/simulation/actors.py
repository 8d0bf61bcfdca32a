"""The processes of a simulated fleet: workers with their handlers, clients and an operator, all of them the real code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import msgspec

from taskharbor.client import AsyncClient
from taskharbor.clock import BackendClock
from taskharbor.codec import Arguments
from taskharbor.drivers.contract import FAILURE_TYPE
from taskharbor.errors import BackendUnavailable
from taskharbor.handlers import Handler
from taskharbor.jobs import JobRecord, JobRequest, Micros
from taskharbor.middleware import Job, current_job
from taskharbor.requests import RecordBuilder
from taskharbor.retry import RetryPolicy
from taskharbor.signals import Cancel, Retry, Snooze, Unrecoverable
from taskharbor.worker import Worker
from taskharbor_testkit.simulation.backend import Backend
from taskharbor_testkit.simulation.ledger import Ledger
from taskharbor_testkit.simulation.scenario import TYPED, WORK, Order, Submission
from taskharbor_testkit.simulation.scheduler import Process, Scheduler

RETURNED = "returned"

WINDING_UP = 0.3
"""Seconds a stubborn handler takes after it was cancelled."""


class WorkPayload(msgspec.Struct):
    acts: list[tuple[str, float]]


_decode = msgspec.json.Decoder(WorkPayload).decode


async def _typed(seconds: float) -> None:
    """The signature of the handler whose payload is validated."""


_TYPED_ARGUMENTS = Arguments(_typed)
"""Once for all workers: building it costs as much as a tenth of a run."""


class HandlerFailed(Exception):
    """Raised by failing handlers."""


class Handlers(msgspec.Struct):
    """The handlers of one worker, which record their executions in the ledger."""

    process: Process
    ledger: Ledger
    scheduler: Scheduler

    def register(self, worker: Worker, retry: RetryPolicy) -> None:
        worker.register(WORK, self.work, retry=retry)
        worker.register(FAILURE_TYPE, self.failure, retry=retry)
        worker.add_handler(Handler(TYPED, self.typed, retry=retry, arguments=_TYPED_ARGUMENTS))

    async def work(self, job: Job) -> int:
        with self._recorded(job):
            acts = _decode(job.payload).acts
            act, seconds = acts[min(job.fence, len(acts)) - 1]
            await self._spend(act, seconds)
            errors: dict[str, BaseException] = {
                "raise": HandlerFailed(f"attempt {job.attempt}"),
                "retry": Retry("again", delay=seconds / 2),
                "snooze": Snooze(seconds),
                "give_up": Unrecoverable("hopeless"),
                "discard": Cancel("pointless"),
                "quit": asyncio.CancelledError(),
            }
            if act in errors:
                raise errors[act]
            return job.fence

    async def _spend(self, act: str, seconds: float) -> None:
        if act == "block":
            self.process.had_blocking_handlers = True
            self.process.loops[0].block(seconds)
            seconds = 0
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if act != "stubborn":
                raise
            await asyncio.sleep(WINDING_UP)

    async def typed(self, seconds: float) -> None:
        with self._recorded(current_job()):
            current_job().progress({"slept": seconds})
            await asyncio.sleep(seconds)

    async def failure(self, job: Job) -> None:
        with self._recorded(job):
            await asyncio.sleep(0)

    @contextmanager
    def _recorded(self, job: Job) -> Iterator[None]:
        name = f"{job.id}#{job.fence}"
        execution = self.ledger.begin(job.id, job.fence, self.process.name)
        self.scheduler.tell(self.process.name, f"runs {name}")
        result = RETURNED
        try:
            yield
        except BaseException as error:
            result = type(error).__name__
            raise
        finally:
            if not self.ledger.is_closed:
                execution.result, execution.ended_us = result, self.scheduler.now_us
                self.scheduler.tell(self.process.name, f"ran {name}: {result}")


class SimulatedWorker(Worker):
    """One incarnation of a worker: handlers on one simulated loop, the backend's side on another."""

    process: Process
    task: asyncio.Task[None]

    def start(self, process: Process) -> None:
        self.process = process
        self.task = process.loops[0].create_task(self._run_on_two_loops(), name=process.name)

    async def _run_on_two_loops(self) -> None:
        """As `run_async` does it, with a simulated loop in the place of a thread."""
        _, backend_loop = self.process.loops
        with self._assignments() as assignments:
            serving = self._serve(assignments)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(serving, backend_loop))

    @property
    def has_ended(self) -> bool:
        return self.process.is_dead or self.task.done()


class _NumberedBuilder(RecordBuilder):
    """Gives jobs ids from a counter, because a simulation must not draw them at random."""

    def __init__(self, numbers: count[int]) -> None:
        super().__init__()
        self._numbers = numbers

    def build(self, requests: Sequence[JobRequest], now: Micros) -> list[JobRecord]:
        return [self._record(request, f"j{next(self._numbers)}", now) for request in requests]


def make_client(backend: Backend, process: Process, numbers: count[int]) -> AsyncClient:
    driver = backend.driver(process)
    client = AsyncClient(driver)
    client.builder = _NumberedBuilder(numbers)
    client._backend_clock = BackendClock(driver.time, process.loops[0].monotonic_us)
    return client


async def submit(client: AsyncClient, submissions: Sequence[Submission]) -> None:
    """A client: sends each batch at its time, and again where it gets no answer."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for submission in submissions:
        await asyncio.sleep(began + submission.at - loop.time())
        left = submission.times
        while left:
            try:
                await client.enqueue_batch(submission.requests)
                left -= 1
            except BackendUnavailable:
                await asyncio.sleep(0.3)


async def operate(client: AsyncClient, orders: Sequence[Order], ledger: Ledger) -> None:
    """An operator: cancels, requeues, pauses and limits, and goes on where the backend does not answer."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for order in orders:
        await asyncio.sleep(began + order.at - loop.time())
        try:
            await _carry_out(client, order, list(ledger.accepted))
        except BackendUnavailable:
            pass


async def _carry_out(client: AsyncClient, order: Order, job_ids: list[str]) -> None:
    if order.verb in ("cancel", "requeue"):
        first = int(order.which * len(job_ids))
        change = client.cancel_many if order.verb == "cancel" else client.requeue_many
        await change(job_ids[first : first + 3])
        return
    if order.verb == "limit":
        await client.configure(order.queue, create=True, max_inflight=1 + int(order.which * 3))
    else:
        await client.configure(order.queue, create=True, paused=order.verb == "pause")
