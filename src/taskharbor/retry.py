"""Retry policies: the delay before a failed job runs again."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from taskharbor.jobs import SECOND, JobRecord, Micros


class RetryPolicy(Protocol):
    def next_delay(self, job: JobRecord, attempts: int) -> Micros:
        """Return the delay before the next execution, in microseconds, after the `attempts`-th recorded failure."""


class ExponentialBackoff:
    """Doubles from the job's own minimum to its own maximum. Jitter within both keeps many jobs from returning at
    the same time."""

    def __init__(self, *, factor: float = 2.0, jitter: float = 0.1, random: Random | None = None) -> None:
        if factor < 1 or not 0 <= jitter <= 1:
            raise ValueError("factor must be at least 1 and jitter between 0 and 1")
        self._factor = factor
        self._jitter = jitter
        self._random = random or _shared_random

    def next_delay(self, job: JobRecord, attempts: int) -> Micros:
        """Return the delay before the next attempt, in microseconds."""
        # Bounded before the power: 2.0 ** 2000 overflows, and the maximum is reached long before.
        steps = min(max(attempts - 1, 0), 64)
        delay = min(job.backoff_min_us * self._factor**steps, float(job.backoff_max_us))
        spread = delay * self._jitter
        least, most = max(delay - spread, job.backoff_min_us), min(delay + spread, job.backoff_max_us)
        return round(self._random.uniform(least, most))


class FixedDelays:
    """Fixed delays in seconds. The last one repeats."""

    def __init__(self, delays: Sequence[float]) -> None:
        if not delays or any(delay < 0 for delay in delays):
            raise ValueError("give at least one delay, none of them negative")
        self._delays = [round(delay * SECOND) for delay in delays]

    def next_delay(self, job: JobRecord, attempts: int) -> Micros:
        """Return the delay before the next attempt, in microseconds."""
        return self._delays[min(max(attempts, 1), len(self._delays)) - 1]


_shared_random = Random()
DEFAULT_RETRY: RetryPolicy = ExponentialBackoff()
