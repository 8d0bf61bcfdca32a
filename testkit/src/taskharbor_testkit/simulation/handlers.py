"""Simulated handlers, and the record they keep: which job ran, under which lease, from when to when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from taskharbor.arguments import Arguments
from taskharbor.context import Job, current_job
from taskharbor.drivers.contract import FAILURE_TYPE
from taskharbor.handlers import make_handler
from taskharbor.jobs import Micros
from taskharbor.retry import RetryPolicy
from taskharbor.signals import Discard, Retry, Snooze, Unrecoverable
from taskharbor.worker import Worker
from taskharbor_testkit.simulation.ledger import Execution, Ledger
from taskharbor_testkit.simulation.loop import SimulatedLoop
from taskharbor_testkit.simulation.process import Process
from taskharbor_testkit.simulation.scenario import TYPED, WORK

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


class Handlers:
    """The handlers of one worker."""

    def __init__(
        self,
        process: Process,
        loop: SimulatedLoop,
        ledger: Ledger,
        now: Callable[[], Micros],
        tell: Callable[[str], None],
    ) -> None:
        self._process = process
        self._worker = process.name
        self._loop = loop
        self._ledger = ledger
        self._now = now
        self._tell = tell

    def register(self, worker: Worker, retry: RetryPolicy) -> None:
        typed = make_handler(TYPED, self.typed, retry=retry, arguments=_TYPED_ARGUMENTS)
        worker.register(WORK, self.work, retry=retry)
        worker.register(FAILURE_TYPE, self.failure, retry=retry)
        worker.add_handler(typed)

    async def work(self, job: Job) -> int:
        async with self._recorded(job):
            acts = _decode(job.payload).acts
            act, seconds = acts[min(job.fence, len(acts)) - 1]
            await self._spend(act, seconds)
            match act:
                case "raise":
                    raise HandlerFailed(f"attempt {job.attempt}")
                case "retry":
                    raise Retry("again", delay=seconds / 2)
                case "snooze":
                    raise Snooze(seconds)
                case "give_up":
                    raise Unrecoverable("hopeless")
                case "discard":
                    raise Discard("pointless")
                case "quit":
                    raise asyncio.CancelledError
            return job.fence

    async def _spend(self, act: str, seconds: float) -> None:
        if act == "block":
            self._process.had_blocking_handlers = True
            self._loop.block(seconds)
            await asyncio.sleep(0)
            return
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if act != "stubborn":
                raise
            await asyncio.sleep(WINDING_UP)

    async def typed(self, seconds: float) -> None:
        async with self._recorded(current_job()):
            current_job().progress({"slept": seconds})
            await asyncio.sleep(seconds)

    async def failure(self, job: Job) -> None:
        async with self._recorded(job):
            await asyncio.sleep(0)

    @asynccontextmanager
    async def _recorded(self, job: Job) -> AsyncIterator[None]:
        execution = self._ledger.begin(job.id, job.fence, self._worker, self._now())
        self._tell(f"runs {job.id}#{job.fence}")
        try:
            yield
        except BaseException as error:
            self._end(execution, type(error).__name__)
            raise
        else:
            self._end(execution, RETURNED)

    def _end(self, execution: Execution, result: str) -> None:
        if self._ledger.is_closed:
            return
        execution.result = result
        execution.ended_us = self._now()
        self._tell(f"ran {execution.job_id}#{execution.fence}: {result}")
