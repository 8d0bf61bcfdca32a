"""The processes of a simulated fleet: workers, clients and an operator, all of them the real code on simulated loops."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec

from taskharbor.client import AsyncClient
from taskharbor.clock import BackendClock
from taskharbor.drivers.contract import Driver
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import JobRecord, JobRequest, Micros
from taskharbor.requests import RecordBuilder
from taskharbor.worker import Worker
from taskharbor_testkit.simulation.ledger import Ledger
from taskharbor_testkit.simulation.loop import SimulatedLoop
from taskharbor_testkit.simulation.process import Process
from taskharbor_testkit.simulation.scenario import Order, Submission


class SimulatedWorker(Worker):
    """A worker whose two threads are two simulated loops."""

    async def run_beside(self, backend: SimulatedLoop) -> None:
        """As `run_async` does it, with a simulated loop in the place of a thread."""
        handlers_loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = handlers_loop.create_future()

        def report(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(error)

        with self._place() as crews:

            async def serve() -> None:
                error: BaseException | None = None
                try:
                    await self._serve(crews, handlers_loop.call_soon_threadsafe)
                except BaseException as raised:
                    error = raised
                handlers_loop.call_soon_threadsafe(report, error)

            backend.create_task(serve())
            error = await ended
            if error is not None:
                raise error


class WorkerProcess:
    """One incarnation of a worker: handlers on one loop, the backend's side on another."""

    def __init__(self, process: Process, worker: SimulatedWorker) -> None:
        self.process = process
        self.worker = worker
        self.handlers_loop, self.backend_loop = process.loops
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self.handlers_loop.create_task(self.worker.run_beside(self.backend_loop))

    @property
    def has_ended(self) -> bool:
        return self.process.is_dead or (self._task is not None and self._task.done())

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the worker, where it ended by itself."""
        if self.process.is_dead or self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()


class _NumberedBuilder(RecordBuilder):
    """Records with ids from a counter: what production draws at random, a simulation must not."""

    def __init__(self, numbers: count[int]) -> None:
        super().__init__()
        self._numbers = numbers

    def build(self, requests: Sequence[JobRequest], now: Micros) -> list[JobRecord]:
        return [self._record(request, f"j{next(self._numbers)}", now) for request in requests]


def make_client(driver: Driver, loop: SimulatedLoop, numbers: count[int]) -> AsyncClient:
    client = AsyncClient(driver)
    client.builder = _NumberedBuilder(numbers)
    client._backend_clock = BackendClock(driver.time, loop.monotonic_us)
    return client


async def submit(client: AsyncClient, submissions: Sequence[Submission]) -> None:
    """A client: sends each batch when its time has come, and again when it heard no answer."""
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
    """An operator: cancels, requeues, pauses and limits, and shrugs when the backend does not answer."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for order in orders:
        await asyncio.sleep(began + order.at - loop.time())
        try:
            await _carry_out(client, order, list(ledger.accepted))
        except BackendUnavailable:
            pass


async def _carry_out(client: AsyncClient, order: Order, job_ids: list[str]) -> Any:
    if order.verb in ("cancel", "requeue"):
        first = int(order.which * len(job_ids))
        chosen = job_ids[first : first + 3]
        return await (client.cancel_many(chosen) if order.verb == "cancel" else client.requeue_many(chosen))
    settings = await client.settings(order.queue)
    if order.verb == "limit":
        changed = msgspec.structs.replace(settings, max_inflight=1 + int(order.which * 3))
    else:
        changed = msgspec.structs.replace(settings, paused=order.verb == "pause")
    return await client.configure(order.queue, changed)


def seeded(seed: int, purpose: str) -> random.Random:
    """An independent stream of chance per purpose, so that a change in one place leaves the others alone."""
    return random.Random(f"{purpose} {seed}")
