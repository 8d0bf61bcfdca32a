"""Queues by name and by number, and their counters.

A job carries the number: short in every index, and no name is too long for it. Counters move by the sums of a whole call: a
trigger per row would double the work.
"""

from __future__ import annotations

import msgspec

from taskharbor.drivers.contract import QueueSettings
from taskharbor.drivers.engine.rows import DONE
from taskharbor.drivers.engine.statements import Transaction, load
from taskharbor.jobs import Micros

_SQL = load("queues")
_ENQUEUE = load("enqueue")
_DEFAULTS = QueueSettings()


class QueueRow(msgspec.Struct, frozen=True):
    name: str
    max_inflight: int | None
    failure_queue: str | None


def known_queue_id(transaction: Transaction, name: str) -> int | None:
    row = transaction.connection.execute(_SQL["id_of"], (name,)).fetchone()
    return None if row is None else int(row[0])


def queue_id(transaction: Transaction, name: str) -> int:
    """The queue's number; a queue nobody knew yet gets one."""
    known = known_queue_id(transaction, name)
    if known is not None:
        return known
    keep = (_DEFAULTS.keep_done_us, _DEFAULTS.keep_dead_us, _DEFAULTS.keep_attempts_us)
    return transaction.connection.execute(_SQL["add"], (name, *keep)).lastrowid or 0


def forget_queue(transaction: Transaction, number: int) -> None:
    """A queue that was only named: every job for it was known before, elsewhere."""
    transaction.connection.execute(_SQL["remove"], (number,))


def queue_row(transaction: Transaction, number: int) -> QueueRow:
    return QueueRow(*transaction.connection.execute(_SQL["row"], (number,)).fetchone())


def configure(transaction: Transaction, name: str, settings: QueueSettings) -> None:
    number = queue_id(transaction, name)
    transaction.connection.execute(
        _SQL["configure"],
        (
            settings.paused,
            settings.max_inflight,
            settings.failure_queue,
            settings.keep_done_us,
            settings.keep_dead_us,
            settings.keep_attempts_us,
            number,
        ),
    )
    transaction.notifies = True


def settings_of(transaction: Transaction, name: str) -> QueueSettings:
    row = transaction.connection.execute(_SQL["settings"], (name,)).fetchone()
    return _DEFAULTS if row is None else settings_from(row)


def settings_from(
    row: tuple[int, int | None, str | None, int | None, int | None, int | None],
) -> QueueSettings:
    paused, max_inflight, failure_queue, keep_done, keep_dead, keep_attempts = row
    return QueueSettings(
        paused=bool(paused),
        max_inflight=max_inflight,
        failure_queue=failure_queue,
        keep_done_us=keep_done,
        keep_dead_us=keep_dead,
        keep_attempts_us=keep_attempts,
    )


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
