"""The way to the backend and back: slow, lossy, and indifferent to what becomes of the process that asked.

A request under way arrives even when its sender has been killed or frozen since. A lost call raises
`BackendUnavailable`, and the caller cannot know whether the request or the answer was lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar, cast

import msgspec

from taskharbor.drivers.contract import Driver, Settlement, Woken
from taskharbor.drivers.operations import Operation, Settle, Time, Wait
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import Micros
from taskharbor_testkit.simulation.backend import Backend
from taskharbor_testkit.simulation.ledger import Trace
from taskharbor_testkit.simulation.process import Process
from taskharbor_testkit.simulation.scheduler import Scheduler

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
        """The simulation is over: a task that still calls is only cleaning up."""
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
        lost = (
            "request"
            if weather.is_out or fate < weather.loss / 2
            else "answer"
            if fate < weather.loss
            else None
        )
        if lost:
            process.disturb(self._scheduler.now, self._scheduler.now + out + back)
            if isinstance(call, Settle):
                self._note_settlements(process, call.settlements, self._scheduler.now + out + back)
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            if self.is_closed:
                return
            given: Any = None
            if lost != "request":
                try:
                    given = self._backend.perform(process.name, call)
                except Exception as error:
                    given = error
            if lost:
                given = BackendUnavailable(f"{op}: no answer")
                self._trace.add(self._scheduler.now, process.name, f"{op}: {lost} lost")
            deliver = answer.get_loop().call_soon_threadsafe
            self._scheduler.after(back, deliver, _deliver, answer, given)

        self._scheduler.after(out, arrive)
        return await answer

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


class SimulatedDriver(Driver):
    """The driver of one process: every call goes over the simulated network."""

    def __init__(self, network: Network, process: Process, waiting: Driver) -> None:
        self._network = network
        self._process = process
        self._waiting = waiting

    def clone(self) -> Self:
        return type(self)(self._network, self._process, self._waiting.clone())

    @classmethod
    def from_url(cls, url: str) -> Self:
        raise InvalidRequest("a simulated driver has no URL")

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def time(self) -> Micros:
        return await self._network.call(self._process, Time())

    def run(self, call: Operation[A]) -> Coroutine[Any, Any, A]:
        if isinstance(call, Wait):
            return cast("Coroutine[Any, Any, A]", self._wait(call))
        return self._network.call(self._process, call)

    async def _wait(self, call: Wait) -> Woken:
        if self._network.weather.is_out:
            raise BackendUnavailable("wait: no answer")
        return await self._waiting.run(call)
