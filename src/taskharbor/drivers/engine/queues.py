"""Queues by name and by number. A job carries the number: short in every index, and no name is too long for it."""

from __future__ import annotations

import msgspec

from taskharbor.drivers.contract import QueueSettings
from taskharbor.drivers.engine.statements import Transaction, load

_SQL = load("queues")
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
