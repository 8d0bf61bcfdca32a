"""The simulated backend: one store on true time, behind a network that is slow and loses calls.

A request under way arrives even when its sender has been killed or frozen since. A lost call raises
`BackendUnavailable`, and the caller cannot know whether the request or the answer was lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from taskharbor.clock import Clock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import TERMINAL_STATES, Driver, JobFilter
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobError
from taskharbor.jobs import SECOND, JobRecord, JobState, Lease, Micros
from taskharbor_testkit.model import Model, ModelDriver
from taskharbor_testkit.simulation.ledger import Ledger, brief
from taskharbor_testkit.simulation.scheduler import Process, Scheduler

T = TypeVar("T")

CLOCK_TOLERANCE: Micros = SECOND // 4
"""The largest error of a process's idea of backend time: half a round trip, and drift between samples."""

_SILENT = {"time", "stats", "get"}
"""Calls that the trace leaves out."""

_UNENDED = JobFilter(states=frozenset(JobState) - TERMINAL_STATES)


class Weather(msgspec.Struct, kw_only=True):
    """The present behaviour of the network."""

    slowest: float
    """One way takes up to this many seconds."""
    loss: float = 0.0
    """Share of calls whose request or answer is lost."""
    spikes: float = 0.0
    """Share of calls that take up to `spike` seconds each way."""
    spike: float = 0.0
    is_out: bool = False
    """The backend answers nobody."""


def model_driver(clock: Clock, store: Callable[[], Model] = Model) -> ModelDriver:
    """A driver on a fresh model. Its tokens and ids are numbers, because a simulation must not depend on chance."""
    tokens, ids = count(1), count(1)
    model = store()
    model.token_for = lambda job: f"t{next(tokens)}"
    model.failure_id_for = lambda dead, queue: f"failure{next(ids)}"
    return ModelDriver(model, clock=clock)


class Backend:
    """Any driver whose calls take effect at once can be simulated; `make_driver` gets the backend's clock."""

    runs_by_itself: ClassVar[bool] = False

    def __init__(
        self,
        scheduler: Scheduler,
        make_driver: Callable[[Clock], Driver],
        weather: Weather,
        rng: random.Random,
    ) -> None:
        self._scheduler = scheduler
        self._random = rng.random
        self._driver = make_driver(self)
        self._cursor: str | None = None
        self.ledger = Ledger(scheduler)
        self.weather = weather
        self.unanswered: dict[tuple[Process, str], float] = {}
        """Settlements (process, job) whose last try was lost, and when the process learned of it."""

    def now(self) -> Micros:
        """The backend's own clock, which is right by definition."""
        return self._scheduler.now_us

    async def refresh(self) -> None:
        """It is the clock that others follow."""

    def driver(self, process: Process) -> SimulatedDriver:
        return SimulatedDriver(self, process, self._driver.clone())

    async def call(self, process: Process, call: op.Operation[T]) -> T:
        """A call from a process, over the network and back."""
        if self.ledger.is_closed:
            raise BackendUnavailable("the simulation is over")
        self._check_clock(process, call)
        weather, chance = self.weather, self._random
        out, back, fate = chance() * weather.slowest, chance() * weather.slowest, chance()
        if call.name != "time" and fate < weather.spikes:
            out, back = out + chance() * weather.spike, back + chance() * weather.spike
            process.disturb(out + back)
            fate = 1.0
        settled = [(process, one.job_id) for one in call.settlements] if isinstance(call, op.Settle) else []
        for job in settled:
            self.unanswered.pop(job, None)
        lost = ""
        if weather.is_out or fate < weather.loss:
            lost = "request" if weather.is_out or fate < weather.loss / 2 else "answer"
            process.disturb(out + back)
            self.unanswered.update(dict.fromkeys(settled, self._scheduler.now + out + back))
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            if self.ledger.is_closed:
                return
            given: Any = None
            if lost != "request":
                try:
                    given = self.perform(process.name, call)
                except Exception as error:
                    given = error
            if lost:
                given = BackendUnavailable(f"{call.name}: no answer")
                self._scheduler.tell(process.name, f"{call.name}: {lost} lost")
            deliver = answer.get_loop().call_soon_threadsafe
            self._scheduler.after(back, deliver, _deliver, answer, given)

        self._scheduler.after(out, arrive)
        return await answer

    def _check_clock(self, process: Process, call: op.Operation[Any]) -> None:
        now, true_us = getattr(call, "now", self.now()), self.now()
        if abs(now - true_us) > CLOCK_TOLERANCE:
            self.ledger.clock_errors.append(
                f"{process.name} called {call.name} with now={now} when the backend's time was {true_us}"
            )

    def perform(self, who: str, call: op.Operation[Any]) -> Any:
        """A call takes effect, in this step."""
        ledger = self.ledger
        ledger.calls += 1
        now: Micros = getattr(call, "now", self.now())
        items: list[Any] = getattr(call, "settlements", None) or getattr(call, "extensions", [])
        claims = [ledger.claim(item, self._record(item.job_id), who, now) for item in items]
        answer = run_now(self._driver.time() if isinstance(call, op.Time) else self._driver.run(call))
        page = run_now(self._driver.read_attempts(after=self._cursor))
        self._cursor = page.cursor
        ledger.book_rows(page.attempts)
        if isinstance(call, op.Reserve):
            ledger.book_reserve(who, call, answer)
        elif isinstance(call, op.Enqueue):
            for record, given in zip(call.records, answer, strict=True):
                if not given.existed:
                    ledger.accepted[given.id] = record
        elif isinstance(call, op.Configure):
            ledger.settings[call.queue] = run_now(self._driver.settings(call.queue))
        rightly_changed = {claim.item.job_id for claim in claims if claim.is_valid}
        for claim, given in zip(claims, answer if claims else (), strict=True):
            job_id = claim.item.job_id
            claim.answer = given if isinstance(given, JobError) else None
            if isinstance(given, Lease) and (held := ledger.lease_of(job_id)) is not None:
                held.lease = given
            if claim.before is not None and job_id not in rightly_changed:
                claim.changed = self._record(job_id) != claim.before
        if call.name not in _SILENT:
            shown = brief(getattr(call, call.__struct_fields__[0]))
            self._scheduler.tell(who, f"{call.name} {shown} now={now} -> {brief(answer)}")
        return answer

    def _record(self, job_id: str) -> JobRecord | None:
        return run_now(self._driver.get([job_id], now=self.now()))[0]

    def jobs(self) -> list[JobRecord]:
        return run_now(self._driver.list_jobs(JobFilter(), now=self.now(), limit=100_000)).jobs

    def is_drained(self) -> bool:
        return not run_now(self._driver.list_jobs(_UNENDED, now=self.now(), limit=1)).jobs


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never has to wait, as every call of the model but `wait`."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise RuntimeError(f"{work!r} waited: the simulation needs a driver whose calls take effect at once")


def _deliver(answer: asyncio.Future[Any], given: Any) -> None:
    if answer.done():
        return  # The caller gave up waiting.
    if isinstance(given, BaseException):
        answer.set_exception(given)
    else:
        answer.set_result(given)


class SimulatedDriver(Driver):
    """The driver of one process: every call goes over the simulated network."""

    def __init__(self, backend: Backend, process: Process, waiting: Driver) -> None:
        self._backend = backend
        self._process = process
        self._waiting = waiting
        """For `wait`, the one call that takes time."""

    def clone(self) -> Self:
        return type(self)(self._backend, self._process, self._waiting.clone())

    @classmethod
    def from_url(cls, url: str) -> Self:
        raise InvalidRequest("a simulated driver has no URL")

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def time(self) -> Micros:
        return await self._backend.call(self._process, op.Time())

    async def run(self, call: op.Operation[T]) -> T:
        if call.name != "wait":
            return await self._backend.call(self._process, call)
        if self._backend.weather.is_out:
            raise BackendUnavailable("wait: no answer")
        return await self._waiting.run(call)
