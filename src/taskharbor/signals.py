"""Exceptions that a handler can raise to say how its job goes on, other than by failing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from taskharbor.errors import InvalidRequest
from taskharbor.jobs import LATEST, Failure, Micros
from taskharbor.requests import as_duration, as_instant

_LONGEST = 9e9
"""Seconds. A handler may compute a delay, so one that is too long or negative is cut and not refused."""


class HandlerSignal(Exception):
    """Base class of the signals. They are not failures in themselves, so no traceback is kept."""

    failure: Failure | None = None
    """The failure to record, for a signal that was raised in another process."""
    delay_us: Micros | None = None
    at_us: Micros | None = None

    def run_at(self, now: Micros) -> Micros | None:
        """Return the instant of the next execution, within the range of instants, or None if the signal leaves it to the retry
        policy."""
        if self.at_us is None and self.delay_us is None:
            return None
        wanted = now + (self.delay_us or 0) if self.at_us is None else self.at_us
        return max(-LATEST, min(wanted, LATEST))

    def _take_time(self, delay: timedelta | float | None, run_at: datetime | None) -> None:
        kind = type(self).__name__
        if delay is not None and run_at is not None:
            raise InvalidRequest(f"{kind}: delay {delay!r} and run_at {run_at}: give one of them, not both")
        if delay is not None:
            if isinstance(delay, (int, float)):
                delay = max(0, min(delay, _LONGEST))
            self.delay_us = max(0, as_duration(f"{kind}: delay", delay))
        if run_at is not None:
            self.at_us = as_instant(f"{kind}: run_at", run_at)


class Retry(HandlerSignal):
    """Fail this execution and run again after `delay`, or at the instant `run_at`, instead of by the retry policy.

    It spends an attempt. The job still dies when its attempts are used up.

    Args:
        reason: The error that the attempt log keeps.
        delay: Seconds or a timedelta.
        run_at: An aware datetime.

    Raises:
        InvalidRequest: Both `delay` and `run_at` are given.
    """

    def __init__(
        self,
        reason: str = "retry asked for",
        *,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
    ) -> None:
        if not isinstance(reason, str):
            raise InvalidRequest(
                f"Retry({reason!r}): the reason is a text; for a time write Retry(delay=...)"
            )
        super().__init__(reason)
        self._take_time(delay, run_at)


class Unrecoverable(HandlerSignal):
    """End the job as dead at once: no further attempt can help."""


class Cancel(HandlerSignal):
    """End the job as cancelled, with the reason: it is no longer needed."""


class Snooze(HandlerSignal):
    """Run the job again after `delay`, or at the instant `run_at`, without spending an attempt.

    Args:
        delay: Seconds or a timedelta.
        run_at: An aware datetime.

    Raises:
        InvalidRequest: Not exactly one of `delay` and `run_at` is given.
    """

    def __init__(self, delay: timedelta | float | None = None, *, run_at: datetime | None = None) -> None:
        if delay is None and run_at is None:
            raise InvalidRequest("Snooze(): give a time, as in Snooze(60) or Snooze(run_at=...)")
        super().__init__(f"snoozed for {delay}" if run_at is None else f"snoozed until {run_at}")
        self._take_time(delay, run_at)


_STRONGEST_FIRST = (Unrecoverable, Cancel, Retry)


def find_signal(error: BaseException) -> HandlerSignal | None:
    """Return the signal that an exception is, was raised from, or has in it as an exception group.

    Of several the strongest counts: `Unrecoverable`, then `Cancel`, then `Retry`. A `Snooze` counts only if nothing else was
    raised beside it, because it spends no attempt.
    """
    if isinstance(error, HandlerSignal):
        return error
    leaves = list(_leaves(error, set()))
    for kind in _STRONGEST_FIRST:
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0] if leaves and all(isinstance(leaf, Snooze) for leaf in leaves) else None  # type: ignore[return-value]


def _leaves(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """The exceptions that a group has, each replaced by the signal that it was raised from."""
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, HandlerSignal):
            yield cause
            return
        if isinstance(cause, BaseExceptionGroup):
            for inner in cause.exceptions:
                yield from _leaves(inner, seen)
            return
        cause = cause.__cause__
    yield error
