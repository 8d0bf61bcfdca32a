"""What a batch handler can ask about the call it is in."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from taskharbor.jobs import JobRecord
from taskharbor.middleware import Stoppable

_current: ContextVar[Batch] = ContextVar("taskharbor_current_batch")


class Batch(Stoppable):
    """The jobs of one call, and whether it should wind up."""

    def __init__(self, records: Sequence[JobRecord]) -> None:
        self.records = records
        """In the order they were leased. A row that was rejected is in here and not in the frame."""

    def __len__(self) -> int:
        return len(self.records)


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
