"""What a batch handler can ask about the call it is in."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from taskharbor.jobs import JobRecord
from taskharbor.middleware import StopFlag

_current: ContextVar[Batch] = ContextVar("taskharbor_current_batch")


class Batch:
    """The jobs of one call, and whether it should wind up."""

    def __init__(self, records: Sequence[JobRecord]) -> None:
        self.records = records
        """In the order they were leased. A row that was rejected is in here and not in the frame."""
        self._stop = StopFlag()

    def __len__(self) -> int:
        return len(self.records)

    @property
    def should_stop(self) -> bool:
        """True once the worker shuts down, the time is up, or every lease of the batch is lost."""
        return self._stop.reason is not None

    @property
    def stop_reason(self) -> str | None:
        return self._stop.reason

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """For threads: sleep that ends early when the batch should stop. True if it should."""
        return self._stop.wait(timeout)

    def stop(self, reason: str) -> None:
        self._stop.set(reason)


def current_batch() -> Batch:
    """The batch this code runs for."""
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError(
            "no batch is running here: current_batch() works inside a batch handler only"
        ) from None


def set_current_batch(batch: Batch) -> None:
    _current.set(batch)
