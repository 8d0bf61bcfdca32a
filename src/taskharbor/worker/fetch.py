"""The fetch loop: leases jobs in batches, as many as can be started soon and no more.

What is leased ahead is bounded by how fast jobs have been finishing: quick jobs fill a large buffer and hide the
round trip, slow ones are leased only when a place is free, so that they do not wait here while another worker is
idle. The settings of a worker and the handling of outages, which the other loops share, are here too.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver
from taskharbor.errors import (
    BackendUnavailable,
    Forbidden,
    JobError,
    SchemaMismatch,
    TaskHarborError,
    field_error,
)
from taskharbor.jobs import JobRecord, Micros, Outcome
from taskharbor.worker.run import BufferedRunner, Hold

log = logging.getLogger("taskharbor.worker")

T = TypeVar("T")
OnStart: TypeAlias = Callable[[Driver, Micros], Awaitable[None]]

_LET_BEGIN = 0.001
"""Seconds between a claim that took all there was and the next. The handlers' thread needs the interpreter to begin, and the
next claim would hold it for as long as a handler of a quick job runs."""
_ASIDE = 0.0001
"""Seconds for which this thread sleeps after a claim. It leaves the interpreter to the handlers' thread, which has just been rung
and otherwise waits until this one has nothing left to do: a tenth of the time from hearing of a job to running it."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
_PATIENCE = 1.0
"""Seconds for which a queue that does not answer is asked again and again while others wait."""
_REST = 0.5
"""Seconds without a claim after one was refused. Twice as long each time, up to `_LONGEST_PAUSE`."""
_SAY_AGAIN = 60.0
"""Seconds between two log lines about the same trouble."""
AHEAD_SECONDS = 0.1
"""Lease ahead what should start within this time, at the pace of late."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's settings, checked and in the units the loops use."""

    name: str
    queues: Annotated[tuple[str, ...], Meta(min_length=1)]
    types: tuple[str, ...] | None
    claims: tuple[str, ...] | None = None
    """The types that one engine claims; None: all of the worker's types."""
    order: Literal["turns", "strict"] = "turns"
    weights: dict[str, int] = {}
    """By queue. A queue that is not in here has the weight 1."""
    limits: dict[str, int] = {}
    """The most jobs of a queue that the worker holds at once."""
    sizes: dict[str, int] = {}
    """The places that a job takes, by type, where it is more than one."""
    concurrency: Annotated[int, Meta(ge=1)]
    lease_us: Micros
    heartbeat: float
    poll_interval: Annotated[float, Meta(gt=0)]
    prefetch: Annotated[int, Meta(ge=0)]
    batch: Annotated[int, Meta(ge=1)]
    grace: Annotated[float, Meta(ge=0)]
    until_empty: bool | Literal["retries"]
    max_jobs: Annotated[int, Meta(ge=1)] | None
    max_seconds: float | None

    @classmethod
    def checked(cls, **values: Any) -> WorkerConfig:
        """Make the settings if all are within bounds. Raises InvalidRequest."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise field_error(SimpleNamespace(**values), str(error)) from None


class Outage:
    """Keeps asking a backend that does not answer: with growing pauses, and one line in the log at each end.

    Shared by a worker's loops, so that an outage is announced once and not once per loop."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._since: float | None = None
        self.random = rng or random.Random()

    @property
    def is_on(self) -> bool:
        return self._since is not None

    async def ride_out(
        self,
        call: Callable[[], Awaitable[T]],
        *,
        give_up: Callable[[], bool] = lambda: False,
        longest_pause: float = _LONGEST_PAUSE,
    ) -> T:
        """`call` until the backend answers. Operations are safe to repeat, so an unclear answer is simply asked again."""
        pause = min(_FIRST_PAUSE, longest_pause)
        loop = asyncio.get_running_loop()
        while True:
            try:
                answer = await call()
            except (BackendUnavailable, OSError) as error:
                if give_up():
                    raise
                if self._since is None:
                    self._since = loop.time()
                    log.warning("the backend does not answer (%s); trying until it does", error)
                await asyncio.sleep(pause * self.random.uniform(0.5, 1.0))
                pause = min(pause * 2, longest_pause)
                continue
            if self._since is not None:
                log.warning("the backend answers again after %.1f s", loop.time() - self._since)
                self._since = None
            return answer


class Pace:
    """Executions that end per second, smoothed."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._at = time()
        self._completed = 0
        self.per_second = 0.0

    def update(self, completed: int) -> None:
        now = self._time()
        elapsed = now - self._at
        if elapsed < 0.002:
            return
        latest = (completed - self._completed) / elapsed
        weight = min(1.0, elapsed / 0.05)
        self.per_second += (latest - self.per_second) * weight
        self._at = now
        self._completed = completed


class Allowance(msgspec.Struct, eq=False):
    """The number of jobs that a worker may still claim, over all of its fetch loops."""

    left: int = sys.maxsize
    is_shared: bool = False
    """True if several fetch loops share it."""
    turn: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    """Held over a look at the queues: two at once could take more than is left, or more than a queue's limit."""
    on_settled: list[Callable[[], None]] = []
    """Called after every write, on the backend's loop, in a worker with limits."""


class Assignment(msgspec.Struct, eq=False, kw_only=True):
    """One engine's part of a worker's jobs, and what its loops share. Belongs to the backend's loop once the engine runs."""

    config: WorkerConfig
    driver: Driver
    clock: Clock
    runner: BufferedRunner
    outage: Outage
    outcomes: Counter[Outcome]
    allowance: Allowance
    siblings: Sequence[Assignment]
    """All assignments of this worker: none stops for want of work while another has some."""
    has_own_thread: bool
    """True if the backend's loop runs on another thread than the handlers' loop."""
    on_start: OnStart | None = None
    """Called with the open driver and the time before the first claim."""
    holds: dict[Hold, None] = {}
    """Jobs that are leased and not settled, oldest first. Not by job id: a job whose lease was lost may come back to this very
    worker while the old execution still winds up."""
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set when the engine has to look again at whether it is done."""
    heartbeat_over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set while no heartbeat is under way: every hold then has the token that is valid now."""
    claiming: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    """Held over a claim. A suspect that runs alone has that of all siblings: nothing is claimed meanwhile."""
    on_heartbeat: Callable[[], object] = lambda: None
    """Called before each heartbeat."""
    closing_at: float | None = None
    """The time of the loop at which nothing more is written."""

    def is_past_closing(self) -> bool:
        return self.closing_at is not None and asyncio.get_running_loop().time() > self.closing_at


class CallRefused(JobError):
    """Stands in a batch for the one job for which the driver refuses the whole call."""


def reason_of(error: Exception) -> str:
    """Return what to say about an error. The text of an error from elsewhere may repeat what a job carries."""
    return str(error) if isinstance(error, TaskHarborError) else type(error).__name__


class Troubles:
    """Logs trouble that may last: once a minute."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._said: dict[str, float] = {}

    def say(self, what: str, error: Exception) -> None:
        now = self._loop.time()
        if now - self._said.get(what, -_SAY_AGAIN) >= _SAY_AGAIN:
            self._said[what] = now
            log.warning("%s: %s; the worker goes on", what, reason_of(error))


class BackendLoop:
    """The base of the backend's loops: the parts of their assignment."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self._config = assignment.config
        self._driver = assignment.driver
        self._clock = assignment.clock
        self._runner = assignment.runner
        self._holds = assignment.holds
        self._outage = assignment.outage
        self._loop = asyncio.get_running_loop()
        self._troubles = Troubles()

    async def _each(
        self, call: Callable[[Sequence[Hold]], Awaitable[Sequence[T]]], holds: Sequence[Hold]
    ) -> list[T | CallRefused]:
        """Call for a batch. If it is refused, it is halved until the job that is to blame stands alone. Outages are raised."""
        try:
            return list(await call(holds))
        except (BackendUnavailable, OSError, SchemaMismatch):
            raise
        except Exception as error:
            if len(holds) == 1:
                return [CallRefused(holds[0].record.id, reason_of(error))]
        half = len(holds) // 2
        return [*await self._each(call, holds[:half]), *await self._each(call, holds[half:])]


class FetchLoop(BackendLoop):
    """Keeps the runner supplied with leased jobs."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self._allowance = assignment.allowance
        self._queues = list(self._config.queues)
        self._types = self._config.types if self._config.claims is None else self._config.claims
        # A claim that blocks on the server takes our clock along, so it has to be one that runs by itself; and it would keep
        # other queues, and other loops with the same allowance, waiting. It also would not hear of room below a limit.
        is_alone = len(self._queues) == 1 and not self._allowance.is_shared and not self._config.limits
        self._makes_blocking_claims = is_alone and self._clock.runs_by_itself
        self._largest = max(self._config.sizes.values(), default=1)
        self._charged = dict.fromkeys(self._queues, 0.0)
        """By queue, the jobs that were claimed, divided by its weight. The lowest has the next turn. In strict order nothing is
        charged, so the first queue always has it."""
        self._settled = False
        """True if jobs were settled since the last look began, in a worker with limits."""
        if self._config.limits:
            self._allowance.on_settled.append(self._look_again)
        self._rests: dict[str, tuple[float, float]] = {}
        """The queues that could not be claimed from: the end of their rest, and how long it is."""
        self._has_claimed = False
        self._pace = Pace(self._loop.time)
        self._room = asyncio.Event()
        self._wants_room = False
        self._room_at = 0
        """With no more than this in hand, more is wanted: `_wanted() > 0`, worked out once for every execution to come."""
        self._stopping = False
        self._waiting: asyncio.Task[Any] | None = None
        """Our own task, while it waits for work."""
        self._seen: str | None = None
        self.handed = 0
        """Places of the jobs that were handed to the runner so far."""
        self._alone: Hold | None = None
        """A suspect that must have the worker to itself."""
        self._in_turn = False
        """True after it: what comes next may well be another, so one job is claimed at a time."""
        self.is_idle = asyncio.Event()
        """Set while the last look at every queue found nothing."""

    def stop(self) -> None:
        self._stopping = True
        self._room.set()
        self._end_wait()

    def _look_again(self) -> None:
        self._settled = True
        self._end_wait()

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None  # A second cancellation would be taken for somebody else's.

    def made_room(self) -> None:
        """An execution finished. Called from the handlers' thread, so it only looks and rings."""
        if self._wants_room and self.handed - self._runner.completed <= self._room_at:
            self._wants_room = False
            self._loop.call_soon_threadsafe(self._room.set)

    async def run(self) -> None:
        while not self._stopping and (self._alone or self._allowance.left > 0):
            if self._alone is not None:
                await self._run_alone(self._alone)
                continue
            wanted = await self._wait_for_room()
            if wanted == 0:
                return
            self._settled = False
            async with self.assignment.claiming:
                found = await self._look(wanted)
            if found:
                self.is_idle.clear()
                if found < wanted:
                    await self._let_begin()
                continue
            self.is_idle.set()
            # If either came while the fetch was under way, nobody would end the wait.
            if not self._stopping and not self._settled:
                await self._wait_for_work(wanted)
                if not self.is_idle.is_set():
                    await self._let_begin()

    async def _let_begin(self) -> None:
        if self.assignment.has_own_thread:
            time.sleep(_ASIDE)  # noqa: ASYNC251
        await asyncio.sleep(_LET_BEGIN)

    def _target(self) -> int:
        ahead = int(self._pace.per_second * AHEAD_SECONDS)
        return self._config.concurrency + min(self._config.prefetch, ahead)

    def _wanted(self) -> int:
        """The number of jobs to lease now; 0 while a larger batch is worth waiting for.

        A claim does not know the sizes of its jobs. So it takes what fits if all are of the largest size, and at least one: that
        one waits for places, and no other is claimed before it has them."""
        load = self.handed - self._runner.completed
        target = self._target()
        if load < self._config.concurrency or load <= target // 2:
            return max(1, (target - load) // self._largest)
        return 0

    async def _wait_for_room(self) -> int:
        """Wait until jobs can be leased, and return their number; 0 only when stopping."""
        self._pace.update(self._runner.completed)
        while True:
            wanted = 0 if self._stopping else self._wanted()
            if wanted > 0 or self._stopping:
                return wanted
            self._room.clear()
            self._room_at = max(self._config.concurrency - 1, self._target() // 2)
            # Raised before the second look: an execution that ends in between sees it and rings.
            self._wants_room = True
            if self._wanted() > 0:
                continue
            await self._room.wait()

    async def _look(self, wanted: int) -> int:
        """One look at the queues, the least charged first. What a queue does not use is for the others, who pay for it."""
        async with self._allowance.turn:
            wanted, found, level = self._at_most(wanted), 0, 0.0
            rooms, unused = self._rooms(), list[str]()
            for queue in sorted(self._queues, key=self._charged.__getitem__):
                if found >= wanted or self._stopping or self._alone:
                    break
                rest = wanted - found
                records: list[JobRecord] = []
                if (limit := min(rest, rooms.get(queue, rest))) > 0:
                    records = await self._reserve(queue, limit)
                if records:
                    self._take(records)
                    found += len(records)
                    level = self._charged[queue]
                    if self._config.order != "strict":
                        self._charged[queue] += len(records) / self._config.weights.get(queue, 1)
                if len(records) < rest:
                    unused.append(queue)
            for queue in unused:
                # It does not save up what it could not use.
                self._charged[queue] = max(self._charged[queue], level)
        return found

    async def _reserve(self, queue: str, limit: int) -> list[JobRecord]:
        """Claim jobs. A queue that cannot be claimed from is passed over for a while and holds up no other."""
        time = self._loop.time
        began = time()
        rest_ends, rest = self._rests.get(queue, (0.0, 0.0))
        if began < rest_ends:
            return []
        patience = 0.0 if rest else _PATIENCE if len(self._queues) > 1 else sys.maxsize
        try:
            records = await self._outage.ride_out(
                partial(self._claim, self._driver.reserve, queue, limit),
                give_up=lambda: self._stopping or time() - began >= patience,
            )
        except SchemaMismatch:
            raise
        except Exception as error:
            if self._stopping or (isinstance(error, Forbidden) and not self._has_claimed):
                raise  # A worker that may not claim at all says so and ends.
            # A queue that takes long to fail rests longer: the others are to get most of the time.
            rest = max(min(2 * rest, _LONGEST_PAUSE), _REST, 4 * (time() - began) * (rest > 0))
            self._rests[queue] = time() + rest, rest
            self._troubles.say(f"queue {queue} cannot be claimed from", error)
            return []
        self._has_claimed = True
        if self._rests.pop(queue, None):
            log.warning("queue %s can be claimed from again", queue)
        return records

    def _rooms(self) -> dict[str, int]:
        """The room of the queues that have a limit."""
        if not (limits := self._config.limits):
            return {}
        held = Counter([hold.record.queue for one in self.assignment.siblings for hold in one.holds])
        return {queue: limit - held[queue] for queue, limit in limits.items()}

    def _at_most(self, wanted: int) -> int:
        return min(1 if self._in_turn else wanted, self._config.batch, self._allowance.left)

    def _claim(
        self, claim: Callable[..., Awaitable[T]], queue: str, limit: int, **options: Any
    ) -> Awaitable[T]:
        return claim(
            queue,
            limit=limit,
            lease_for=self._config.lease_us,
            now=self._clock.now(),
            worker=self._config.name,
            types=self._types,
            **options,
        )

    def _take(self, records: list[JobRecord]) -> None:
        if records:
            self._allowance.left -= len(records)
            holds = [Hold(record, record.token or "", record.expires_at_us or 0) for record in records]
            if sizes := self._config.sizes:
                for hold in holds:
                    hold.size = sizes.get(hold.record.type, 1)
            runner = self._runner
            suspects = [one for one in holds if one.record.stalls and one.record.type in runner.in_process]
            alone = self._sort_out(suspects) if suspects else None
            self._alone, self._in_turn = alone, alone is not None
            self.handed += sum([hold.size for hold in holds])
            self._holds.update(dict.fromkeys(holds))
            if alone is not None:
                runner.call(runner.give_way, [hold for hold in holds if hold is not alone], [alone])
            elif suspects:
                apart = set(suspects)
                runner.call(runner.feed, [hold for hold in holds if hold not in apart], suspects)
            else:
                runner.call(runner.feed, holds)

    def _sort_out(self, suspects: list[Hold]) -> Hold | None:
        """The first suspect that has to run alone. Without one they run beside the other jobs."""
        isolated = self._runner.isolated
        for hold in suspects:
            if hold.record.type not in isolated:
                if not self._in_turn:
                    log.info("jobs whose lease ran out before run alone: nothing else is begun meanwhile")
                return hold
        # They take no places, so that other jobs are claimed while they wait; but not without end.
        free = self._config.concurrency - sum([hold.size == 0 for hold in self._holds])
        for hold in suspects[: max(0, free)]:
            hold.size = 0
        return None

    async def _run_alone(self, suspect: Hold) -> None:
        """Run a suspect with nothing beside it in this worker: when it begins, all else is settled, so its crash costs no other
        job anything."""
        siblings, changed = self.assignment.siblings, self.assignment.changed
        async with AsyncExitStack() as claims:
            for one in siblings:
                await claims.enter_async_context(one.claiming)
                if one is not self.assignment:
                    one.runner.call(one.runner.give_way)
            while suspect in self._holds:
                if sum([len(one.holds) for one in siblings]) == 1:
                    self._runner.call(self._runner.begin_alone, suspect)
                changed.clear()
                await changed.wait()
        self._alone = None

    async def _claim_next(self, wanted: int) -> bool:
        """Wait for jobs and claim them in one go. Whether that could be."""
        if not self._makes_blocking_claims:
            return False
        claim, limit, timeout = self._driver.reserve_next, self._at_most(wanted), self._config.poll_interval
        records: list[JobRecord] | None = []
        while records == [] and not self._stopping:
            async with self.assignment.claiming:
                records = await self._claim(claim, self._queues[0], limit, timeout=timeout)
                self._take(records or [])
        if records:
            self.is_idle.clear()
        return records is not None

    async def _wait_for_work(self, wanted: int) -> None:
        # In this very task: another one around the wait would cost every pick-up two more turns of the loop.
        self._waiting = task = asyncio.current_task()
        assert task is not None
        is_broken = False
        try:
            if not await self._claim_next(wanted):
                now, timeout = self._clock.now(), self._config.poll_interval
                woken = await self._driver.wait(self._queues, now=now, timeout=timeout, seen=self._seen)
                self._seen = woken.seen
        except asyncio.CancelledError:
            if not (self._stopping or self._settled) or task.uncancel() > 0:
                raise  # Not only by us.
        except SchemaMismatch:
            raise
        except Exception:
            is_broken = True
        finally:
            self._waiting = None
        if is_broken or self._rests:
            # The next claim says so and waits; this only keeps a broken wait from becoming a busy loop.
            await asyncio.sleep(min(self._config.poll_interval, 1.0))
