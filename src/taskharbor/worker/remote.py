"""Errors from worker processes: what stands here for an exception that was raised there.

The exception itself does not cross over (that would take pickle); its type, message and traceback do, and a signal
stays a signal, with its times.
"""

from __future__ import annotations

import taskharbor.signals as signals
from taskharbor.jobs import Failure


class Remote(Exception):
    """Base of what stands in for a remote exception; `failure` is what is recorded, as if it had been raised here."""

    failure: Failure


class RemoteError(Remote):
    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.type}: {failure.message}" if failure.message else failure.type)
        self.failure = failure


class RemoteRetry(Remote, signals.Retry):
    def __init__(self, failure: Failure, delay_us: int | None, at_us: int | None) -> None:
        signals.Retry.__init__(self, failure.message)
        self.delay_us = delay_us
        self.at_us = at_us
        self.failure = failure


class RemoteSnooze(Remote, signals.Snooze):
    def __init__(self, failure: Failure, delay_us: int) -> None:
        Exception.__init__(self, failure.message)
        self.delay_us = delay_us
        self.failure = failure


class RemoteDiscard(Remote, signals.Discard):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class RemoteUnrecoverable(Remote, signals.Unrecoverable):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
