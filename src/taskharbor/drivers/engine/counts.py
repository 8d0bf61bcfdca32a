"""Counters per queue and state, moved by the sums of a whole call. No trigger per row: that would double the work."""

from __future__ import annotations

from taskharbor.drivers.engine.rows import DONE
from taskharbor.drivers.engine.statements import Transaction, load
from taskharbor.jobs import Micros

_SQL = load("queues")
_ENQUEUE = load("enqueue")


class Counts:
    """Deltas of one call. `flush` also says which queues have something new for those who wait."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._deltas: dict[int, list[int]] = {}
        self._stirred: set[int] = set()
        self._scheduled: dict[int, Micros] = {}
        self._ends: dict[int, Micros] = {}

    def move(self, queue: int, old: int | None, new: int | None, jobs: int = 1) -> None:
        """`jobs` jobs from one state to another; None is outside. An end also counts for ever."""
        deltas = self._deltas.setdefault(queue, [0] * 10)
        if old is not None:
            deltas[old] -= jobs
        if new is not None:
            deltas[new] += jobs
            if new >= DONE and old != new:
                deltas[new + 3] += jobs

    def stir(self, queue: int) -> None:
        """Something may have become runnable."""
        self._stirred.add(queue)

    def schedule(self, queue: int, run_at: Micros) -> None:
        """A job was scheduled: of interest to those who wait only if it is due before all others."""
        self._scheduled[queue] = min(run_at, self._scheduled.get(queue, run_at))

    def end_lease(self, queue: int, over_at: Micros) -> None:
        """No later lease of the queue may begin before this. Whoever ends a lease also moves its job."""
        self._ends[queue] = max(over_at, self._ends.get(queue, over_at))

    def flush(self) -> None:
        execute = self._transaction.connection.execute
        for queue, run_at in self._scheduled.items():
            if queue not in self._stirred:
                (earliest,) = execute(_ENQUEUE["earliest_scheduled"], {"queue": queue}).fetchone()
                if earliest is not None and run_at <= earliest:
                    self._stirred.add(queue)
        for queue in self._stirred - self._deltas.keys():
            self._deltas[queue] = [0] * 10
        for queue, deltas in self._deltas.items():
            execute(_SQL["count"], (*deltas, queue in self._stirred, self._ends.get(queue, 0), queue))
        if self._stirred:
            self._transaction.notifies = True
