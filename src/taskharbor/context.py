"""What a handler sees of its job: `Job`, and `current_job()` to reach it from anywhere inside the handler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any

import msgspec

from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, Micros, to_datetime

MAX_PROGRESS_BYTES = 4096

_current: ContextVar[Job] = ContextVar("taskharbor_current_job")


class StopFlag:
    """Set once, from any thread, when a handler should wind up; made only for jobs that look at it."""

    __slots__ = ("_event", "_reason")

    def __init__(self) -> None:
        self._event: threading.Event | None = None
        self._reason: str | None = None

    def set(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._event is not None:
            self._event.set()

    @property
    def reason(self) -> str | None:
        return self._reason

    def wait(self, timeout: float | None) -> bool:
        if self._event is None:
            self._event = threading.Event()
        # Looked at again after the event exists: set() may have come in between.
        if self._reason is not None:
            self._event.set()
        return self._event.wait(timeout)


class Job:
    """The job that a handler is working on. Reading it costs nothing; `progress` travels with the next heartbeat."""

    __slots__ = ("_report", "_stop", "arguments", "record", "started_at_us")

    def __init__(
        self,
        record: JobRecord,
        started_at_us: Micros,
        report: Callable[[JobRecord, bytes], None] | None = None,
    ) -> None:
        self.record = record
        self.started_at_us = started_at_us
        self.arguments: Any = None
        """The decoded and validated payload, once the validate middleware has run."""
        self._stop = StopFlag()
        self._report = report

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def type(self) -> str:
        return self.record.type

    @property
    def queue(self) -> str:
        return self.record.queue

    @property
    def payload(self) -> bytes:
        return self.record.payload

    @property
    def headers(self) -> Mapping[str, str]:
        return self.record.headers

    @property
    def key(self) -> str | None:
        return self.record.key

    @property
    def attempt(self) -> int:
        """Which execution this is, from 1: failures and expired leases before it count."""
        return self.record.attempts + self.record.stalls + 1

    @property
    def max_attempts(self) -> int:
        return self.record.max_attempts

    @property
    def fence(self) -> int:
        """Grows with every lease of this job: hand it to a resource that can refuse an older holder."""
        return self.record.fence

    @property
    def run_at(self) -> datetime:
        return self.record.run_at

    @property
    def created_at(self) -> datetime:
        return self.record.created_at

    @property
    def timeout(self) -> timedelta | None:
        return self.record.timeout

    @property
    def deadline(self) -> datetime | None:
        """When the timeout strikes; None where there is none."""
        if not self.record.timeout_us:
            return None
        return to_datetime(self.started_at_us + self.record.timeout_us)

    @property
    def should_stop(self) -> bool:
        """True once the job was cancelled, timed out, lost its lease or the worker is shutting down."""
        return self._stop.reason is not None

    @property
    def stop_reason(self) -> str | None:
        return self._stop.reason

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """For threads: sleep that ends early when the job should stop. True if it should."""
        return self._stop.wait(timeout)

    def stop(self, reason: str) -> None:
        self._stop.set(reason)

    def progress(self, value: Any) -> None:
        """Report how far the job is (anything small that JSON can hold); visible to others from the next heartbeat on."""
        encoded = msgspec.json.encode(value)
        if len(encoded) > MAX_PROGRESS_BYTES:
            raise InvalidRequest(f"progress of {len(encoded)} bytes; at most {MAX_PROGRESS_BYTES} are kept")
        if self._report is not None:
            self._report(self.record, encoded)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.type} attempt {self.attempt}/{self.max_attempts}>"


def current_job() -> Job:
    """The job this code runs for. Works in async handlers, in threads and in worker processes."""
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError("no job is running here: current_job() works inside a handler only") from None


def set_current_job(job: Job) -> None:
    _current.set(job)
