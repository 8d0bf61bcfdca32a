"""Virtual time, and the threads and processes that live in it.

Every simulated thread is an event loop. Within one loop, callbacks keep the order that asyncio promises; between loops
the seed chooses the order, as the operating system would. When no loop has a callback to run, time jumps to the next
timer, so a minute of waiting costs nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from asyncio import Handle, TimerHandle, _set_running_loop
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVarTuple

import msgspec

from taskharbor.jobs import SECOND, Micros

Ts = TypeVarTuple("Ts")
Callback: TypeAlias = Callable[[*Ts], object]

EPOCH: Micros = 1_700_000_000 * SECOND
"""The backend's time when a simulation begins."""

BASE = 100_000.0
"""Added to every monotonic clock, so that no skewed one begins below zero."""

MOST_STEPS_AT_ONCE = 20_000
"""More callbacks than this without time moving are a busy loop."""


class Stuck(Exception):
    """A deadlock, or a busy loop."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """One simulated thread: as much of an event loop as code without sockets, signals and subprocesses needs.

    A frozen loop (SIGSTOP, a paused virtual machine, a blocked thread) keeps its callbacks until it is thawed. A
    killed loop runs nothing any more, no clean-up and no `finally`, as after `kill -9`.
    """

    def __init__(self, scheduler: Scheduler, name: str, *, offset: float = 0.0, rate: float = 1.0) -> None:
        self._scheduler = scheduler
        self._offset = offset
        self._rate = rate
        self._freezes = 0
        """Freezes may overlap."""
        self.name = name
        self.ready: deque[Handle] = deque()
        self.is_listed = False
        """The scheduler counts this loop among those that can run."""
        self.is_dead = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Tasks that have not ended. Kept alive here: a task that is collected would run its clean-up."""
        self.errors: list[str] = []
        """Exceptions that nobody caught."""

    def time(self) -> float:
        """This machine's monotonic clock: off by `offset`, fast or slow by `rate`."""
        return self._offset + self._rate * self._scheduler.now

    def monotonic_us(self) -> Micros:
        return int(self.time() * SECOND)

    def call_later(
        self, delay: float, callback: Callback[*Ts], *args: *Ts, context: Any = None
    ) -> TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callback[*Ts], *args: *Ts, context: Any = None) -> TimerHandle:
        handle = TimerHandle(when, callback, args, self, context)
        if not self.is_dead:
            due = max(self._scheduler.now, (when - self._offset) / self._rate)
            self._scheduler.add_timer(due, self, handle)
        return handle

    def call_soon(self, callback: Callback[*Ts], *args: *Ts, context: Any = None) -> Handle:
        handle = Handle(callback, args, self, context)
        self.fire(handle)
        return handle

    call_soon_threadsafe = call_soon

    def fire(self, handle: Handle) -> None:
        """Run a callback as soon as it is this loop's turn."""
        if not self.is_dead:
            self.ready.append(handle)
            if not self.is_listed:
                self._list()

    def _list(self) -> None:
        """Tell the scheduler whether this loop can run."""
        can_run = bool(self.ready) and not self._freezes and not self.is_dead
        if can_run and not self.is_listed:
            self._scheduler.runnable.append(self)
        elif self.is_listed and not can_run:
            self._scheduler.runnable.remove(self)
        self.is_listed = can_run

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name or "simulated", context=context)
        self.tasks[task] = None
        task.add_done_callback(lambda ended: self.tasks.pop(ended, None))
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """A hook of asyncio. The scheduler skips a cancelled timer when it is due."""

    def block(self, seconds: float) -> None:
        """Freeze for a while: callbacks that are due meanwhile run afterwards."""
        self._freezes += 1
        self._list()
        self._scheduler.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self._freezes -= 1
        self._list()

    def kill(self) -> None:
        # Callbacks that are due stay in `ready`: `bury` needs them to end the tasks they belong to.
        self.is_dead = True
        self._list()

    def bury(self) -> None:
        """Cancel abandoned tasks when a run is over, so that nothing is left to the garbage collector."""
        self.is_dead = False
        self._freezes = 0
        self._list()
        for task in list(self.tasks):
            task.cancel()


_Timer: TypeAlias = tuple[float, int, SimulatedLoop | None, Any, tuple[Any, ...]]


class Scheduler:
    """Owns virtual time, chooses the loop that runs next, and keeps the trace of the run."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random
        self._timers: list[_Timer] = []
        self._count = 0
        self._steps_at_once = 0
        self.runnable: list[SimulatedLoop] = []
        self.now = 0.0
        """True time in seconds since the beginning. No simulated process can read it."""
        self.loops: list[SimulatedLoop] = []
        self.trace: list[str] = []
        """The events of the run, line by line: two runs of one seed agree in every byte."""

    @property
    def now_us(self) -> Micros:
        """True time as the backend's clock shows it."""
        return EPOCH + int(self.now * SECOND)

    def tell(self, who: str, what: str) -> None:
        self.trace.append(f"{self.now:12.6f} {who:<8} {what}")

    def new_loop(self, name: str, *, offset: float = 0.0, rate: float = 1.0) -> SimulatedLoop:
        # Abstract by the stubs only: nothing here opens a socket, a pipe or a process.
        loop = SimulatedLoop(self, name, offset=offset, rate=rate)  # type: ignore[abstract]
        self.loops.append(loop)
        return loop

    def after(self, seconds: float, callback: Callable[..., Any], *args: Any) -> None:
        """Schedule an event of the world, which happens whatever becomes of the processes in it."""
        self.add_timer(self.now + seconds, None, callback, *args)

    def add_timer(self, when: float, loop: SimulatedLoop | None, action: Any, *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, loop, action, args))

    def run(self, until: Callable[[], bool], *, seconds: float) -> bool:
        """Run until the condition holds (True) or `seconds` of virtual time have passed (False).

        The condition is looked at when no loop is left to run at this instant.
        """
        deadline = self.now + seconds
        self._steps_at_once = 0
        timers = self._timers
        while True:
            self._run_instant()
            if until():
                return True
            while timers and timers[0][2] is not None and timers[0][3].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Stuck(f"at {self.now:.6f} s nobody has anything to do, ever again")
            if timers[0][0] > deadline:
                self.now = deadline
                return False
            when, _, loop, action, args = heapq.heappop(timers)
            if when > self.now:
                self.now = when
                self._steps_at_once = 0
            if loop is None:
                action(*args)
            else:
                loop.fire(action)

    def _run_instant(self) -> None:
        """Run every loop that can run, one callback at a time and in the seed's order."""
        runnable, chance = self.runnable, self._random
        try:
            while runnable:
                index = int(chance() * len(runnable)) if len(runnable) > 1 else 0
                loop = runnable[index]
                handle = loop.ready.popleft()
                if not loop.ready:
                    last = runnable.pop()
                    if last is not loop:
                        runnable[index] = last
                    loop.is_listed = False
                if not handle._cancelled:
                    _set_running_loop(loop)
                    handle._run()
                self._steps_at_once += 1
                if self._steps_at_once > MOST_STEPS_AT_ONCE:
                    raise Stuck(f"{self._steps_at_once} callbacks, and time does not move: {self.now:.6f} s")
        finally:
            _set_running_loop(None)


class Machine(msgspec.Struct, frozen=True):
    """The error of a machine's clock."""

    offset: float
    rate: float


class Process:
    """A few threads on one machine, and the disturbances they suffered.

    A lease may expire under a worker that was frozen, killed or cut off, and under no other.
    """

    def __init__(self, scheduler: Scheduler, name: str, machine: Machine, threads: int = 1) -> None:
        self._scheduler = scheduler
        self._disturbed: list[tuple[float, float]] = []
        self.name = name
        names = [f"{name}/{number}" for number in range(threads)]
        offset = BASE + machine.offset
        self.loops = [scheduler.new_loop(thread, offset=offset, rate=machine.rate) for thread in names]
        self.is_dead = False
        self.is_leaving = False
        """It was asked to stop."""
        self.frozen_until = 0.0
        self.had_blocking_handlers = False
        """A handler that does not yield cannot be cancelled, nor can its neighbours meanwhile."""

    def disturb(self, seconds: float) -> None:
        """Note that the process is disturbed from now on."""
        self._disturbed.append((self._scheduler.now, self._scheduler.now + seconds))

    def was_disturbed(self, start_us: Micros, end_us: Micros) -> bool:
        """Return True if there was a disturbance between two instants of backend time, ends included."""
        start, end = (start_us - EPOCH) / SECOND, (end_us - EPOCH) / SECOND
        return any(first <= end and last >= start for first, last in self._disturbed)

    def freeze(self, seconds: float, loops: list[SimulatedLoop]) -> None:
        """Stop the process (SIGSTOP), or some of its threads, for a while."""
        self.frozen_until = max(self.frozen_until, self._scheduler.now + seconds)
        self.disturb(seconds)
        for loop in loops:
            loop.block(seconds)

    def kill(self) -> None:
        self.is_dead = True
        self.disturb(math.inf)
        for loop in self.loops:
            loop.kill()
