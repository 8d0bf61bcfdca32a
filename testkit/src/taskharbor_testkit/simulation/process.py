"""A simulated process: a name, a machine's clock, a few threads, and what was done to it.

What was done is kept as disturbances: a lease may run out under a worker that was frozen, killed or cut off, and
under no other.
"""

from __future__ import annotations

import math

from taskharbor.jobs import SECOND, Micros
from taskharbor_testkit.simulation.loop import SimulatedLoop
from taskharbor_testkit.simulation.scheduler import EPOCH, Scheduler

BASE = 100_000.0
"""So that no skewed monotonic clock begins below zero."""

CLOCK_TOLERANCE: Micros = SECOND // 4
"""How far a process's idea of backend time may be off: half a round trip, and drift between samples."""


class Process:
    def __init__(
        self, scheduler: Scheduler, name: str, *, threads: int = 1, offset: float = 0.0, rate: float = 1.0
    ) -> None:
        self._scheduler = scheduler
        self.name = name
        self.clock_tolerance_us = CLOCK_TOLERANCE
        self.loops: list[SimulatedLoop] = [
            scheduler.new_loop(f"{name}/{number}", offset=BASE + offset, rate=rate)
            for number in range(threads)
        ]
        self.is_dead = False
        self.is_leaving = False
        """It was asked to stop."""
        self.frozen_until = 0.0
        self.had_blocking_handlers = False
        """Handlers that do not yield cannot be cancelled, nor can their neighbours meanwhile."""
        self._disturbed: list[tuple[float, float]] = []

    def disturb(self, start: float, end: float) -> None:
        self._disturbed.append((start, end))

    def was_disturbed(self, start_us: Micros, end_us: Micros) -> bool:
        """Anything at all between two instants of backend time, ends included."""
        start, end = (start_us - EPOCH) / SECOND, (end_us - EPOCH) / SECOND
        return any(first <= end and last >= start for first, last in self._disturbed)

    def freeze(self, seconds: float, *, loops: list[SimulatedLoop] | None = None) -> None:
        """SIGSTOP for a while, or a stall of some of its threads."""
        end = self._scheduler.now + seconds
        self.frozen_until = max(self.frozen_until, end)
        self.disturb(self._scheduler.now, end)
        for loop in self.loops if loops is None else loops:
            loop.block(seconds)

    def kill(self) -> None:
        self.is_dead = True
        self.disturb(self._scheduler.now, math.inf)
        for loop in self.loops:
            loop.kill()
