"""Exceptions that a handler can raise to say how its job goes on, other than by failing."""

from __future__ import annotations

from datetime import datetime, timedelta

from taskharbor.jobs import SECOND, Failure, Micros, to_micros


class HandlerSignal(Exception):
    """Base class of the signals. They are not failures in themselves, so no traceback is kept."""

    failure: Failure | None = None
    """The failure to record, for a signal that was raised in another process."""


def _seconds(value: timedelta | float) -> Micros:
    return to_micros(value) if isinstance(value, timedelta) else round(value * SECOND)


class Retry(HandlerSignal):
    """Fail this execution and run again after `delay`, or at the instant `run_at`, instead of by the retry policy.

    It spends an attempt. The job still dies when its attempts are used up.
    """

    def __init__(
        self,
        reason: str = "retry asked for",
        *,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
    ) -> None:
        super().__init__(reason)
        self.delay_us = None if delay is None else max(0, _seconds(delay))
        self.at_us = None if run_at is None else to_micros(run_at)
        if self.delay_us is not None and self.at_us is not None:
            raise ValueError("give either delay or run_at, not both")

    def run_at(self, now: Micros) -> Micros | None:
        """Return the instant of the next attempt, or None to leave it to the retry policy."""
        if self.at_us is not None:
            return self.at_us
        return None if self.delay_us is None else now + self.delay_us


class Unrecoverable(HandlerSignal):
    """End the job as dead at once: no further attempt can help."""


class Cancel(HandlerSignal):
    """End the job as cancelled, with the reason: it is no longer needed."""


class Snooze(HandlerSignal):
    """Run the job again after `delay`, without spending an attempt."""

    def __init__(self, delay: timedelta | float) -> None:
        super().__init__(f"snoozed for {delay}")
        self.delay_us = max(0, _seconds(delay))
