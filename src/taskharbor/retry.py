"""Retry policies: the delay before a failed job runs again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from random import Random
from typing import Protocol

from taskharbor.errors import InvalidRequest
from taskharbor.jobs import LATEST, SECOND, JobRecord, Micros, to_micros

log = logging.getLogger("taskharbor.worker")


class RetryPolicy(Protocol):
    """Decides when a failed job runs again."""

    def next_delay(self, job: JobRecord, attempt: int, error: BaseException) -> timedelta | float | None:
        """Return the delay before the next execution.

        Args:
            job: The job. Its `max_attempts` bounds the executions whatever the policy says.
            attempt: The number of recorded failures, with this one: 1 after the first.
            error: The exception of the handler. If the handler ran in another process, it is a `RemoteError` with the
                name, the message and the traceback of the exception.

        Returns:
            A timedelta or seconds. None: the job is dead at once.
        """


class ExponentialBackoff:
    """Doubles from the job's own minimum to its own maximum. Jitter within both keeps many jobs from returning at
    the same time."""

    def __init__(self, *, factor: float = 2.0, jitter: float = 0.1, random: Random | None = None) -> None:
        if factor < 1 or not 0 <= jitter <= 1:
            raise InvalidRequest(f"factor {factor!r}: at least 1; jitter {jitter!r}: from 0 to 1")
        self._factor = factor
        self._jitter = jitter
        self._random = random or _shared_random

    def next_delay(self, job: JobRecord, attempt: int, error: BaseException) -> float:
        """Return the delay before the next execution, in seconds."""
        # Bounded before the power: 2.0 ** 2000 overflows, and the maximum is reached long before.
        steps = min(max(attempt - 1, 0), 64)
        delay = min(job.backoff_min_us * self._factor**steps, float(job.backoff_max_us))
        spread = delay * self._jitter
        least, most = max(delay - spread, job.backoff_min_us), min(delay + spread, job.backoff_max_us)
        return self._random.uniform(least, most) / SECOND


class FixedDelays:
    """Fixed delays in seconds. The last one repeats."""

    def __init__(self, delays: Sequence[float]) -> None:
        numbers = isinstance(delays, Sequence) and all(isinstance(delay, (int, float)) for delay in delays)
        if not numbers or not delays or min(delays) < 0:
            raise InvalidRequest(
                f"FixedDelays({delays!r}): give a list of seconds, at least one and none negative, as in [1, 10, 60]"
            )
        self._delays = list(delays)

    def next_delay(self, job: JobRecord, attempt: int, error: BaseException) -> float:
        """Return the delay before the next execution, in seconds."""
        return self._delays[min(max(attempt, 1), len(self._delays)) - 1]


_shared_random = Random()
DEFAULT_RETRY: RetryPolicy = ExponentialBackoff()


def retry_delay(
    policy: RetryPolicy | None, job: JobRecord, attempt: int, error: BaseException
) -> Micros | None:
    """Ask a policy (None: the default one) for a delay. A policy that fails is replaced by the default one."""
    try:
        delay = (policy or DEFAULT_RETRY).next_delay(job, attempt, error)
        if delay is None:
            return None
        exact = to_micros(delay) if isinstance(delay, timedelta) else round(delay * SECOND)
        return max(0, min(exact, LATEST))
    except Exception:
        log.exception("the retry policy of %s failed; the default one is used", job.type)
        return retry_delay(None, job, attempt, error)
