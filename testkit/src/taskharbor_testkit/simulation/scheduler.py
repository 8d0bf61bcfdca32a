"""One seeded scheduler for a whole fleet: it owns virtual time and decides whose turn it is.

Every simulated thread is an event loop of its own. Within one, callbacks keep the order asyncio promises; between
them the order is the seed's choice, as it would be the operating system's. When nobody has anything to do, time jumps
to the next timer, so a minute of waiting costs nothing.
"""

from __future__ import annotations

import heapq
import random
from asyncio import TimerHandle, _set_running_loop
from collections.abc import Callable
from typing import Any, TypeAlias

from taskharbor.jobs import SECOND, Micros
from taskharbor_testkit.simulation.loop import SimulatedLoop

EPOCH: Micros = 1_700_000_000 * SECOND
"""The backend's time when a simulation begins."""

MOST_STEPS_AT_ONCE = 20_000
"""More callbacks than this without time moving is a busy loop, not work."""

_Timer: TypeAlias = tuple[float, int, SimulatedLoop | None, Any, tuple[Any, ...]]


class Stuck(Exception):
    """Nobody can ever run again, or somebody never stops running: a deadlock or a busy loop."""


class Scheduler:
    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random
        self._timers: list[_Timer] = []
        self._count = 0
        self._runnable: list[SimulatedLoop] = []
        self.now = 0.0
        """True time in seconds since the beginning. No simulated process can read it."""
        self.loops: list[SimulatedLoop] = []
        self.steps = 0
        self._steps_at_once = 0

    @property
    def now_us(self) -> Micros:
        """True time as the backend's clock shows it."""
        return EPOCH + int(self.now * SECOND)

    def new_loop(self, name: str, *, offset: float = 0.0, rate: float = 1.0) -> SimulatedLoop:
        # Abstract by the stubs only: nothing here opens a socket, a pipe or a process.
        loop = SimulatedLoop(self, name, offset=offset, rate=rate)  # type: ignore[abstract]
        self.loops.append(loop)
        return loop

    def after(self, seconds: float, callback: Callable[..., Any], *args: Any) -> None:
        """Something that happens to the world, whatever becomes of the processes in it."""
        self._count += 1
        heapq.heappush(self._timers, (self.now + seconds, self._count, None, callback, args))

    def add_timer(self, when: float, loop: SimulatedLoop, handle: TimerHandle) -> None:
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, loop, handle, ()))

    def add_runnable(self, loop: SimulatedLoop) -> None:
        self._runnable.append(loop)

    def remove_runnable(self, loop: SimulatedLoop) -> None:
        self._runnable.remove(loop)

    def run(self, until: Callable[[], bool], *, seconds: float) -> bool:
        """Run until the condition holds (True) or `seconds` of virtual time have passed (False).

        The condition is looked at whenever nobody is left to run at this instant.
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
            self._advance(when)
            if loop is None:
                action(*args)
            else:
                loop.fire(action)

    def _advance(self, when: float) -> None:
        if when > self.now:
            self.now = when
            self._steps_at_once = 0

    def _run_instant(self) -> None:
        """Everybody who can run does, one callback at a time and in the seed's order."""
        runnable, chance = self._runnable, self._random
        steps = 0
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
                steps += 1
                if not handle._cancelled:
                    _set_running_loop(loop)
                    handle._run()
                if steps > MOST_STEPS_AT_ONCE:
                    break
        finally:
            _set_running_loop(None)
        self.steps += steps
        self._steps_at_once += steps
        if self._steps_at_once > MOST_STEPS_AT_ONCE:
            raise Stuck(f"{self._steps_at_once} callbacks and time does not move from {self.now:.6f} s")
