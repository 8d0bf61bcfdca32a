"""A day of virtual time with schedules: workers that crash and freeze, an operator, jobs, and a network that loses calls.

The code under test is the real one: `tick`, `AsyncSchedules`, `BackendClock`, and the engine in memory as the store. Every call
of it is an event, so a crash comes between any two calls. A seed gives the same day again.
"""

from __future__ import annotations

import heapq
import json
import random
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from schedules.expected import (
    DAY,
    FAR,
    MIDNIGHTS,
    SECOND,
    Change,
    Judge,
    OpenJob,
)
from taskharbor import BackendUnavailable, JobFilter
from taskharbor.clock import BackendClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver, QueueSettings
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.waiting import Look
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Failure, JobRecord, Micros, to_micros
from taskharbor.schedules import QUEUE
from taskharbor.schedules.tick_ids import parse_tick_id
from taskharbor.schedules.ticking import OPEN_STATES, tick

T = TypeVar("T")
LEASE = 30 * SECOND
JOBS = "jobs"


@types.coroutine
def ask(request: Any) -> Generator[Any, Any, Any]:
    """Hand a request to the world, and wait for its answer."""
    return (yield request)


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a call that never has to wait."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("it waited")


class Watch(msgspec.Struct, frozen=True):
    """Until something may be due: what `wait` of the contract does."""

    now: Micros
    version: str | None
    since: Micros


class Process:
    """Code that runs in virtual time, with a clock that is wrong and a network that may lose calls."""

    runs_by_itself: ClassVar[bool] = True

    def __init__(self, world: World, name: str, *, is_worker: bool) -> None:
        self.world, self.name, self.is_worker = world, name, is_worker
        self.driver = Link(self)
        self.clock = BackendClock(self.driver.time, self._monotonic)
        self.is_dead = False
        self._offset = world.chance.randrange(-3600 * SECOND, 3600 * SECOND)
        self._rate = world.chance.uniform(0.999, 1.001)
        self._work: Coroutine[Any, Any, None] | None = None

    def _monotonic(self) -> Micros:
        return self._offset + round(self.world.now() * self._rate)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self.go_on()

    def kill(self) -> None:
        self.is_dead = True
        if self._work is not None:
            self._work.close()

    def go_on(self, answer: Any = None) -> None:
        """Give the code its answer, and take its next request."""
        if self.is_dead or self._work is None:
            return
        try:
            if isinstance(answer, Exception):
                request = self._work.throw(answer)
            else:
                request = self._work.send(answer)
        except StopIteration:
            self._work = None
            return
        if isinstance(request, float):
            self.world.after(request, self.go_on)
        elif isinstance(request, Watch):
            self.world.watch(self, request)
        else:
            self.world.travel(self, request)


class Link(Driver):
    """The driver of a process."""

    capabilities = MemoryDriver.capabilities

    def __init__(self, process: Process) -> None:
        self._process = process

    def clone(self) -> Self:
        return type(self)(self._process)

    @classmethod
    def from_url(cls, url: str) -> Self:
        raise InvalidRequest("a simulated driver has no URL")

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def time(self) -> Micros:
        now: Micros = await ask(op.Time())
        return now

    async def run(self, call: op.Operation[Any]) -> Any:
        return await ask(call)


class World:
    """One day, from its seed."""

    runs_by_itself: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(f"schedules {seed}")
        self.midnight = chance.choice(MIDNIGHTS)
        self._now = self.begin = to_micros(self.midnight) + chance.randrange(12 * 3600 * SECOND)
        self.end = self.begin + DAY
        self.judge = Judge()
        self.trace: list[str] = []
        self._events: list[tuple[Micros, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = 0
        self.store = MemoryDriver(clock=self)
        self._watching: dict[Process, Watch] = {}
        self._is_stirred = False
        self.is_healed = False
        self._crashes = chance.choice((0.0, 0.0, 0.01, 0.05))
        self._losses = chance.choice((0.0, 0.0, 0.01, 0.05, 0.2))
        self._freezes = chance.choice((0.0, 0.0, 0.01, 0.03))
        self._deaths = chance.choice((0.0, 0.02))
        self._outages: list[tuple[Micros, Micros]] = []
        for _ in range(chance.choice((0, 0, 1, 2))):
            start = self.begin + chance.randrange(DAY)
            long = round(chance.choice((30, 600, 7200)) * chance.uniform(0.1, 1.5) * SECOND)
            self._outages.append((start, min(start + long, self.end)))
        self.workers = [chance.choice((0.0, 1.0)) for _ in range(chance.randint(1, 4))]
        self.change: Change | None = None

    # -- time ------------------------------------------------------------------------------------------------

    def now(self) -> Micros:
        return self._now

    async def refresh(self) -> None: ...

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        self._numbers += 1
        heapq.heappush(
            self._events, (self._now + round(seconds * SECOND), self._numbers, function, arguments)
        )

    def run(self) -> Judge:
        """Live the day, heal everything, and look at what is left."""
        self.trouble(3)
        if self.chance.random() < 0.3:
            # Jobs are forgotten as early as is allowed.
            settings = QueueSettings(keep_done_us=2 * LEASE)
            run_now(self.store.configure(JOBS, settings, now=self._now))
        for number, _ in enumerate(self.workers):
            self._start_worker(number, 1)
        from schedules.operating import Operator

        self.operator = Operator(self)
        self.operator.begin()
        self.after(self.chance.uniform(0, 1800), self._work)
        self._live(self.end)
        self.is_healed = True
        self.trouble(0)
        self._start_worker(len(self.workers), 1)
        self._live(self.end + 4 * LEASE)
        self.judge.ended(self._now - 2 * SECOND)
        return self.judge

    def _live(self, until: Micros) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, function, arguments = heapq.heappop(self._events)
            function(*arguments)
            if self._is_stirred:
                self._is_stirred = False
                for process in [*self._watching]:
                    self._look(process)
        self._now = until

    def trouble(self, seconds: float) -> None:
        """Whatever is due within this time and a lease may be late."""
        until = self._now + round(seconds * SECOND) + LEASE + 3 * SECOND
        self.judge.trouble_until = max(self.judge.trouble_until, until)

    # -- processes -------------------------------------------------------------------------------------------

    def _start_worker(self, slot: int, life: int) -> None:
        process = Process(self, f"w{slot}.{life}", is_worker=True)
        process.start(serve(process))
        if life > 1:
            # Its app declares its schedules again.
            self.after(self.chance.random(), self.operator.declare)

    def _crash(self, process: Process) -> None:
        self.tell(process.name, "crashes")
        process.kill()
        self._watching.pop(process, None)
        seconds = self.chance.choice((1.0, 30.0, 900.0)) * self.chance.uniform(0.2, 2.0)
        self.trouble(seconds)
        slot, _, life = process.name.removeprefix("w").partition(".")
        self.after(seconds, self._start_worker, int(slot), int(life) + 1)

    def watch(self, process: Process, watch: Watch) -> None:
        self._watching[process] = watch
        self._look(process)

    def _look(self, process: Process) -> None:
        watch = self._watching[process]
        look: Look = run_now(self.store._store.look([QUEUE], watch.version, watch.since))
        if look.is_changed or watch.version is None:
            self._wake(process, watch, look.version, self.chance.uniform(0, 0.05))
        elif look.due is not None and look.due < FAR:
            # As exact as a clock that is a minute old.
            seconds = max(0, look.due - watch.now) / SECOND + self.chance.uniform(-0.06, 0.06)
            self._numbers += 1
            at = max(self._now, watch.now + round(seconds * SECOND))
            heapq.heappush(self._events, (at, self._numbers, self._wake, (process, watch, look.version, 0.0)))

    def _wake(self, process: Process, watch: Watch, version: str, seconds: float) -> None:
        if self._watching.get(process) is watch:
            del self._watching[process]
            self.after(seconds, process.go_on, version)

    # -- calls -----------------------------------------------------------------------------------------------

    def travel(self, process: Process, call: op.Operation[Any]) -> None:
        """A call takes effect after a while, or never, and so does its answer."""
        chance = self.chance
        out, back, fate = chance.random() * 0.03, chance.random() * 0.03, chance.random()
        lost = ""
        if any(start <= self._now < end for start, end in self._outages):
            lost, back = "request", 20.0
            self.trouble(back)
        elif not self.is_healed and call.name != "time":
            if process.is_worker and fate < self._crashes:
                if fate < self._crashes / 2:
                    self._crash(process)
                    return
                self.after(out, self._perform, process, call)
                self.after(out, self._crash, process)
                return
            fate -= self._crashes
            if 0 <= fate < self._losses:
                lost = "request" if fate < self._losses / 2 else "answer"
                self.trouble(0)
            fate -= self._losses
            if process.is_worker and 0 <= fate < self._freezes:
                back += chance.choice((1.0, 20.0, 60.0, 600.0)) * chance.uniform(0.2, 2.0)
                self.tell(process.name, f"freezes for {back:.3f} s")
                self.trouble(back)
        self.after(out, self._arrive, process, call, lost, back)

    def _arrive(self, process: Process, call: op.Operation[Any], lost: str, back: float) -> None:
        answer: Any = None
        if lost != "request":
            answer = self._perform(process, call)
        if lost:
            self.tell(process.name, f"{call.name}: {lost} lost")
            answer = BackendUnavailable(call.name)
        self.after(back, process.go_on, answer)

    def _perform(self, process: Process, call: op.Operation[Any]) -> Any:
        if isinstance(call, op.Time):
            return self._now
        try:
            answer = run_now(self.store.run(call))
        except Exception as error:
            self.tell(process.name, f"{call.name}: {error!r}")
            return error
        judge = self.judge
        if isinstance(call, op.Enqueue):
            self._enqueued(process, call, answer)
        elif isinstance(call, op.Reserve):
            self.tell(process.name, f"leases {len(answer)}")
            for record in answer:
                key = f"schedule:{record.key}"
                judge.reserved(
                    process.name, record.id, record.token, record.payload, call.now, bool(self._open(key))
                )
        elif isinstance(call, op.Settle):
            self.tell(process.name, f"settles {len(answer)}")
            for one, refused in zip(call.settlements, answer, strict=True):
                if refused is None:
                    judge.settled(one.job_id, one.token)
        elif isinstance(call, op.CancelKeys) and call.queue == QUEUE:
            self.tell(process.name, f"deletes {call.keys}")
            for name in call.keys:
                judge.delete(name)
        elif isinstance(call, op.ExtendLease):
            judge.wrong += [f"{process.name} reports {one.progress!r}" for one in call.extensions]
        else:
            return answer
        self._is_stirred = True
        return answer

    def _enqueued(self, process: Process, call: op.Enqueue, answers: list[Any]) -> None:
        for record, answer in zip(call.records, answers, strict=True):
            if record.queue == QUEUE:
                self._changed(process, record, answer.id)
                continue
            parsed = parse_tick_id(record.id)
            assert parsed is not None
            self.tell(process.name, f"{parsed.made} {parsed.name} {parsed.at}{' known' * answer.existed}")
            if parsed.made != "tick":
                continue
            at, open_jobs = to_micros(parsed.at), self._open(record.key)
            target = next((one for one in open_jobs if one.id == answer.id), None)
            others = [one for one in open_jobs if one.id != answer.id]
            target = target or OpenJob(answer.id, "inflight", False)
            is_new, delay = not answer.existed, record.run_at_us - at
            self.judge.ticked(process.name, parsed.name, at, delay, is_new, target, others)

    def _changed(self, process: Process, record: JobRecord, job_id: str) -> None:
        stored = json.loads(record.payload)
        name, is_paused = record.key or "", "paused" in stored
        self.tell(process.name, f"puts {name} {stored['spec']['payload']}{' paused' * is_paused}")
        if process.is_worker:
            track = self.judge.current(name)
            if track is not None:
                self.judge.put(job_id, name, Change("pause", track.version, self._now))
        elif self.change is not None:
            self.operator.changes += 1
            at = self._now if self.change.kind == "pause" else record.created_at_us
            self.judge.put(job_id, name, self.change._replace(at=at))

    def _open(self, key: str | None) -> list[OpenJob]:
        if key is None:
            return []
        selection = JobFilter(queue=JOBS, key=key, states=OPEN_STATES)
        page = run_now(self.store.list_jobs(selection, now=self._now))
        return [OpenJob(one.id, one.state.value, one.cancel_requested) for one in page.jobs]

    # -- jobs ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Jobs begin and end, some of them never do, and old ones are forgotten."""
        chance = self.chance
        leased = run_now(self.store.reserve(JOBS, limit=20, lease_for=DAY, now=self._now, worker="runner"))
        for job in leased:
            if job.key is None or chance.random() < 0.95:
                self.after(chance.choice((1.0, 300.0, 6000.0)) * chance.random(), self._finish, job)
        if leased and chance.random() < 0.3:
            run_now(self.store.prune(now=self._now))
        self.after(chance.expovariate(1 / 1200), self._work)

    def _finish(self, job: JobRecord) -> None:
        settle: Any = self.store.ack
        parsed, options = parse_tick_id(job.id), dict[str, Any]()
        track = None if parsed is None else self.judge.current(parsed.name)
        if track is not None and self.chance.random() < self._deaths:
            settle, options = self.store.fail, {"attempts": 1, "error": Failure("E", "broken")}
            track.has_dead = True
        run_now(settle(job.id, job.token or "", now=self._now, **options))

    def tell(self, who: str, what: str) -> None:
        self.trace.append(f"{self._now} {who} {what}")


async def serve(process: Process) -> None:
    """What `ScheduleLoop` does."""
    version: str | None = None
    since: Micros = 0
    while True:
        try:
            await process.clock.refresh()
            now = process.clock.now()
            seen = await ask(Watch(now, version, since))
            await process.clock.refresh()
            while await tick(process.driver, process.clock.now(), process.name, process.clock):
                pass
            version, since = seen, now
        except BackendUnavailable:
            await ask(1.0)
