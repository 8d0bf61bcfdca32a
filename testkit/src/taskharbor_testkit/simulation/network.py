"""The way to the backend and back: slow, lossy, and indifferent to what becomes of the process that asked.

A request under way arrives even when its sender has been killed or frozen since. A lost call raises
`BackendUnavailable`, and the caller cannot know whether the request or the answer was lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from taskharbor.drivers.contract import Settlement
from taskharbor.drivers.operations import Operation, Settle
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import Micros
from taskharbor_testkit.simulation.backend import Backend
from taskharbor_testkit.simulation.process import Process
from taskharbor_testkit.simulation.scheduler import Scheduler
from taskharbor_testkit.simulation.trace import Trace

A = TypeVar("A")

LONGEST_USUAL = 0.1
"""Seconds that one way takes at most, unless the weather is bad."""


class Weather(msgspec.Struct, kw_only=True):
    """How the network behaves for now."""

    slowest: float = LONGEST_USUAL
    """One way takes up to this many seconds."""
    loss: float = 0.0
    """Share of calls whose request or answer is lost."""
    spikes: float = 0.0
    """Share of calls that take up to `spike` seconds each way."""
    spike: float = 0.0
    is_out: bool = False
    """The backend answers nobody."""


class Network:
    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        rng: random.Random,
        weather: Weather,
        trace: Trace,
    ) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._rng = rng
        self.weather = weather
        self._trace = trace
        self.is_closed = False
        """The simulation is over: whoever still calls is only cleaning up."""
        self.clock_errors: list[str] = []
        self.worst_clock_error: Micros = 0
        self.unanswered: dict[tuple[Process, str], float] = {}
        """Settlements (process, job) whose last try was lost, and when the process learned of it."""

    async def call(self, process: Process, call: Operation[A]) -> A:
        op = call.name
        if self.is_closed:
            raise BackendUnavailable("the simulation is over")
        now: Micros | None = getattr(call, "now", None)
        if now is not None:
            self._check_clock(process, op, now)
        weather, chance = self.weather, self._rng.random
        out, back = chance() * weather.slowest, chance() * weather.slowest
        fate = chance()
        if op != "time" and fate < weather.spikes:
            out, back = out + chance() * weather.spike, back + chance() * weather.spike
            process.disturb(self._scheduler.now, self._scheduler.now + out + back)
            fate = 1.0
        if isinstance(call, Settle):
            self._note_settlements(process, call.settlements, None)
        loses_request = weather.is_out or fate < weather.loss / 2
        loses_answer = not loses_request and fate < weather.loss
        if loses_request or loses_answer:
            process.disturb(self._scheduler.now, self._scheduler.now + out + back)
            if isinstance(call, Settle):
                self._note_settlements(process, call.settlements, self._scheduler.now + out + back)
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._scheduler.after(out, self._arrive, process, call, answer, back, loses_request, loses_answer)
        return await answer

    def _arrive(
        self,
        process: Process,
        call: Operation[Any],
        answer: asyncio.Future[Any],
        back: float,
        loses_request: bool,
        loses_answer: bool,
    ) -> None:
        if self.is_closed:
            return
        given: Any
        if loses_request:
            given = BackendUnavailable(f"{call.name}: no answer")
        else:
            try:
                given = self._backend.perform(process.name, call)
            except Exception as error:
                given = error
            if loses_answer:
                given = BackendUnavailable(f"{call.name}: no answer")
        if isinstance(given, BackendUnavailable):
            where = "request" if loses_request else "answer"
            self._trace.add(self._scheduler.now, process.name, f"{call.name}: {where} lost")
        loop = answer.get_loop()
        self._scheduler.after(back, loop.call_soon_threadsafe, _deliver, answer, given)

    def _note_settlements(
        self, process: Process, settlements: Sequence[Settlement], unanswered_at: float | None
    ) -> None:
        for settlement in settlements:
            if unanswered_at is None:
                self.unanswered.pop((process, settlement.job_id), None)
            else:
                self.unanswered[process, settlement.job_id] = unanswered_at

    def _check_clock(self, process: Process, op: str, now: Micros) -> None:
        off = abs(now - self._backend.now())
        self.worst_clock_error = max(self.worst_clock_error, off)
        if off > process.clock_tolerance_us:
            self.clock_errors.append(
                f"{process.name} called {op} with now={now} when the backend's time was {self._backend.now()}"
            )


def _deliver(answer: asyncio.Future[Any], given: Any) -> None:
    if answer.done():
        return  # The caller gave up waiting.
    if isinstance(given, BaseException):
        answer.set_exception(given)
    else:
        answer.set_result(given)
