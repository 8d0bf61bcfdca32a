"""Clocks. The core reads the time from a `Clock`, never from the operating system.

In production that is a `BackendClock`: the backend's time, read now and then and carried forward by a monotonic clock. So a
worker whose own clock is an hour wrong neither steals a lease nor runs a job early. Tests use a `FakeClock` and move it by hand.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import ClassVar, Protocol

from taskharbor.jobs import SECOND, Micros, to_datetime, to_micros

RESAMPLE_AFTER: Micros = 30 * SECOND


def monotonic_us() -> Micros:
    return time.monotonic_ns() // 1000


class Clock(Protocol):
    runs_by_itself: ClassVar[bool]
    """True if time passes by itself, so that another machine can carry it forward."""

    def now(self) -> Micros:
        """Return the current instant, in microseconds UTC."""
        ...

    async def refresh(self) -> None:
        """Set the clock again if it follows another clock and the next sample is due."""


class SystemClock:
    """The host's own clock, for instants that never leave the host."""

    runs_by_itself: ClassVar[bool] = True

    def now(self) -> Micros:
        """Return the machine's time, in microseconds UTC."""
        return time.time_ns() // 1000

    async def refresh(self) -> None:
        """Do nothing: this clock follows no other clock."""


class FakeClock:
    """A clock that changes only by `advance`."""

    runs_by_itself: ClassVar[bool] = False

    def __init__(self, start: datetime | Micros = 1_700_000_000 * SECOND) -> None:
        self._now = start if isinstance(start, int) else to_micros(start)

    def now(self) -> Micros:
        """Return the set time, in microseconds UTC."""
        return self._now

    async def refresh(self) -> None:
        """Do nothing: only `advance` moves this clock."""

    @property
    def now_datetime(self) -> datetime:
        """Return the set time as a datetime."""
        return to_datetime(self._now)

    def advance(self, by: timedelta | float) -> Micros:
        """Move the clock forward by a timedelta or by seconds, and return the new time."""
        step = to_micros(by) if isinstance(by, timedelta) else round(by * SECOND)
        if step < 0:
            raise ValueError("time only moves forward; make a new FakeClock to start earlier")
        self._now += step
        return self._now


class BackendClock:
    """The backend's time, at the cost of one sample every half minute.

    A sample may be wrong by half its round trip, so the quickest of a few is taken. Between samples `now()` never goes back, even
    if a new sample shows that the old one was ahead.
    """

    runs_by_itself: ClassVar[bool] = True

    def __init__(
        self, sample: Callable[[], Awaitable[Micros]], monotonic: Callable[[], Micros] = monotonic_us
    ) -> None:
        self._sample = sample
        self._monotonic = monotonic
        self._offset: Micros | None = None
        self._sampled_at: Micros = 0
        self._latest: Micros = 0
        self.error: Micros = 0
        """The largest error of the last sample, in microseconds: half its round trip."""

    def now(self) -> Micros:
        """Return the backend's time, in microseconds UTC, as far as it is known."""
        if self._offset is None:
            raise RuntimeError("the clock was never synchronised: await sync() first")
        self._latest = max(self._latest, self._monotonic() + self._offset)
        return self._latest

    @property
    def is_due(self) -> bool:
        """True if the backend's time should be read again."""
        return self._offset is None or self._monotonic() - self._sampled_at >= RESAMPLE_AFTER

    async def refresh(self) -> None:
        """Read the backend's time if that is due."""
        if self.is_due:
            await self.sync()

    async def sync(self, samples: int = 3) -> None:
        """Read the backend's time. The quickest of `samples` answers counts."""
        measured: list[tuple[Micros, Micros]] = []
        for _ in range(samples):
            before = self._monotonic()
            backend = await self._sample()
            after = self._monotonic()
            round_trip = after - before
            measured.append((round_trip, backend + round_trip // 2 - after))
        round_trip, self._offset = min(measured, key=lambda one: one[0])
        self.error = round_trip // 2
        self._sampled_at = self._monotonic()
