"""The parts of a history, decided by a few numbers: queues, their slots, and how many rows fall to each slot and day.

The unit of work is one slot of one queue on one day. A slot runs one job after another, so a queue with W slots never has more
than W at once, and a key that belongs to one slot is never held twice: clean by construction, with nothing shared between tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise

import msgspec

from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, Micros, to_micros

DAY: Micros = 86_400 * SECOND
START: Micros = to_micros(datetime(2026, 1, 5, tzinfo=UTC))
"""A Monday."""
ROWS_PER_SLOT_AND_DAY = 4000
"""The rows that one task holds at a time; more rows make more slots."""
WEEKEND = 0.45


class QueuePlan(msgspec.Struct, frozen=True):
    """The behaviour of one queue. Shares and rates are between 0 and 1, times in seconds."""

    name: str
    share: float
    """The queue's part of all rows, in proportion to the other queues."""
    types: tuple[str, ...]
    """The first is the most frequent."""
    run: float
    """A typical execution. Shortened where a day could not hold them all."""
    spread: float = 0.8
    """The spread of the log-normal run times."""
    failing: float = 0.03
    poisoned: float = 0.003
    """Jobs that fail every time."""
    stalling: float = 0.002
    keyed: float = 0.0
    delayed: float = 0.05
    priorities: tuple[int, ...] = (0,)
    peak_hour: float = 14.0
    lease: float = 30.0
    max_attempts: int = 4


_ORDER_TYPES = ("charge_card", "reserve_stock", "ship_order")

DEFAULT_QUEUES = (
    QueuePlan("mail", 0.34, ("send_mail", "send_digest"), 0.4, priorities=(0, 0, 0, 5)),
    QueuePlan("orders", 0.28, _ORDER_TYPES, 1.5, keyed=0.35, priorities=(0, 0, 10), failing=0.05),
    QueuePlan("webhooks", 0.2, ("deliver_webhook",), 0.8, failing=0.12, poisoned=0.01, spread=1.2),
    QueuePlan(
        "reports", 0.12, ("render_report", "export_table"), 12.0, stalling=0.01, peak_hour=3.0, lease=60.0
    ),
    QueuePlan("sync", 0.06, ("sync_account",), 4.0, keyed=0.9, delayed=0.3, peak_hour=9.0),
)


class Slot(msgspec.Struct, frozen=True):
    """One place in which a queue runs its jobs, one after another."""

    index: int
    """Among all slots of the history."""
    number: int
    """Among those of its queue."""
    queue: QueuePlan


class HistoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plain data, so that every task can have it."""

    rows: int
    seed: int
    days: int
    violations: int
    queues: tuple[QueuePlan, ...]
    with_store: bool = False
    """Violations are also planted in the store's jobs."""

    def slots(self) -> list[Slot]:
        kept = [(queue, number) for queue in self.queues for number in range(self.slots_of(queue))]
        return [Slot(index, number, queue) for index, (queue, number) in enumerate(kept)]

    def slots_of(self, queue: QueuePlan) -> int:
        """As many as the rows need. Also the queue's W."""
        share = queue.share / sum(other.share for other in self.queues)
        return max(2, math.ceil(self.rows * share / self.days / ROWS_PER_SLOT_AND_DAY))

    def rows_of_days(self) -> list[int]:
        return split(self.rows, [WEEKEND if day % 7 >= 5 else 1.0 for day in range(self.days)])

    def units(self) -> int:
        return self.days * sum(map(self.slots_of, self.queues))


def make_plan(
    rows: int,
    seed: int,
    days: int,
    queues: Sequence[QueuePlan] = DEFAULT_QUEUES,
    violations: int = 0,
    with_store: bool = False,
) -> HistoryPlan:
    if rows < 0 or violations < 0:
        raise InvalidRequest("rows and violations count from 0 up")
    if days < 1 or not queues:
        raise InvalidRequest("a history needs at least one day and one queue")
    if len({queue.name for queue in queues}) < len(queues):
        raise InvalidRequest("two queues have the same name: give each one its own")
    return HistoryPlan(
        rows=rows, seed=seed, days=days, violations=violations, queues=tuple(queues), with_store=with_store
    )


def split(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers in proportion to the weights that add up to exactly `total`."""
    reached = [round(total * part / sum(weights)) for part in accumulate(weights)]
    return [upto - before for before, upto in pairwise([0, *reached])]
