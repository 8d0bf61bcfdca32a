"""What comes of workers on executors, as plain data."""

from __future__ import annotations

import msgspec


class TaskReport(msgspec.Struct, kw_only=True):
    """What one task says of its worker at the end. A task whose executor died says nothing."""

    worker: str
    host: str
    outcomes: dict[str, int]
    seconds: float
    problem: str = ""
    """Why the worker could not work, where that is not the executor's fault: it would be the same on any other."""


class ExecutorWorker(msgspec.Struct, kw_only=True):
    """One of the workers that were asked for, over all executors it had to move to."""

    number: int
    name: str = ""
    host: str = ""
    """Where it ended; empty where its last executor was lost."""
    outcomes: dict[str, int] = {}
    """How many executions ended how, as far as reported: what a lost executor did is known to the store only."""
    seconds: float = 0.0
    submitted: int = 0
    lost: int = 0
    """How many Spark jobs of it failed, with its executor or by cancellation."""

    @property
    def done(self) -> int:
        return self.outcomes.get("done", 0)

    @property
    def failed(self) -> int:
        """Executions that failed, whether they are retried or dead."""
        return self.outcomes.get("retried", 0) + self.outcomes.get("dead", 0)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A look at the queues while workers run."""

    seconds: float
    ended: int
    """Jobs that ended since the start, whoever ran them."""
    waiting: int
    inflight: int
    workers: int
    """How many are still at work."""
    stopping: bool = False


class DrainSummary(msgspec.Struct, kw_only=True):
    run: str
    """Names this run: `ask_to_stop(url, run)` ends it from anywhere."""
    workers: list[ExecutorWorker]
    ended: int
    """Jobs that ended in the meantime by the store's count, which knows what lost executors did."""
    seconds: float
    stopped: bool = False
    """It was asked to stop."""
    cancelled: bool = False
    """Some tasks did not end in time and were cancelled: their jobs run again when their leases expire."""

    @property
    def done(self) -> int:
        return sum(worker.done for worker in self.workers)

    @property
    def failed(self) -> int:
        return sum(worker.failed for worker in self.workers)

    @property
    def lost(self) -> int:
        return sum(worker.lost for worker in self.workers)
