"""Violations put into a clean stretch of history, one at a time, by editing or adding rows.

Each takes a job of its own and disturbs as little else as it can: what is added lies in the pauses between two leases.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from taskharbor.jobs import SECOND, Micros
from taskharbor.spark.audit.kinds import Kind
from taskharbor_testkit.histories.plan import Slot
from taskharbor_testkit.histories.rows import DONE, EXPIRED, READY, RELEASED, REQUEUED, Row
from taskharbor_testkit.histories.slot import BREATH, number_of_row

Wanted = Callable[["Planter", list[Row]], bool]
"""Whether a job's rows can take the violation; if so, it has been put there."""


class Planter:
    """Works on the rows of one slot's day, in place."""

    def __init__(self, rows: list[Row], slot: Slot, slots: int, limit: int, chance: random.Random) -> None:
        self.rows = rows
        self.chance = chance
        self.limit = limit
        self._slot = slot
        self._slots = slots
        self._taken = {row.ended_at for row in rows}
        self._jobs: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows:
            self._jobs[row.job_id].append(row)
        self._untouched = list(self._jobs)
        chance.shuffle(self._untouched)

    def plant(self, kinds: Iterable[Kind]) -> list[tuple[Kind, str]]:
        """What was planted, with the job that shows it. A kind for which no job fits is left out."""
        planted = []
        for kind in kinds:
            for place, job_id in enumerate(self._untouched):
                if PLANTERS[kind](self, self._jobs[job_id]):
                    del self._untouched[place]
                    planted.append((kind, job_id))
                    break
        return planted

    def add(self, like: Row, **changed: object) -> None:
        row: Row = replace(like, **changed)  # type: ignore[arg-type]
        row.seq = self.number(row.ended_at)
        self.rows.append(row)

    def number(self, at: Micros) -> int:
        """A number that no other row has, as near to the instant as can be."""
        while at in self._taken:
            at += 1
        self._taken.add(at)
        return number_of_row(at, self._slot, self._slots)


def _leases(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.reserved_at is not None]


def _long_enough(row: Row) -> bool:
    return row.reserved_at is not None and row.until - row.reserved_at > 100


def _middle(row: Row) -> Micros:
    assert row.reserved_at is not None
    return (row.reserved_at + row.until) // 2


def _only_done(rows: list[Row]) -> bool:
    """One execution that succeeded: the plainest job there is."""
    return len(rows) == 1 and rows[0].outcome == DONE and _long_enough(rows[0])


def _overlap(planter: Planter, rows: list[Row]) -> bool:
    """The job's last lease is moved into the one before it."""
    leases = _leases(rows)
    if (
        len(leases) < 2
        or len(leases) < len(rows)
        or leases[-1].outcome == EXPIRED
        or not _long_enough(leases[-2])
    ):
        return False
    held, moved = leases[-2:]
    moved.reserved_at = _middle(held)
    moved.run_at = min(moved.run_at, moved.reserved_at)
    moved.ended_at = moved.reserved_at + 10
    moved.lease_expires_at = moved.reserved_at + 30 * SECOND
    return True


def _swap_fences(planter: Planter, rows: list[Row]) -> bool:
    leases = _leases(rows)
    if len(leases) < 2:
        return False
    leases[-2].fence, leases[-1].fence = leases[-1].fence, leases[-2].fence
    return True


def _repeat_fence(planter: Planter, rows: list[Row]) -> bool:
    leases = _leases(rows)
    if len(leases) < 2 or rows[-1] is not leases[-1]:
        return False
    leases[-1].fence = leases[-2].fence
    return True


def _skip_fence(planter: Planter, rows: list[Row]) -> bool:
    leases = _leases(rows)
    if len(leases) < 2 or rows[-1] is not leases[-1]:
        return False
    leases[-1].fence += planter.chance.randint(1, 3)
    return True


def _crowd(planter: Planter, rows: list[Row]) -> bool:
    """As many leases as the queue allows, all at once in a pause of the slot, and then this job's own."""
    if not _only_done(rows):
        return False
    (row,) = rows
    assert row.reserved_at is not None
    end = row.reserved_at - 1
    begin = end - BREATH // 4
    for number in range(planter.limit):
        start = begin - planter.limit + number
        planter.add(
            row,
            job_id=f"{row.job_id}-crowd-{number}",
            key=None,
            created_at=start,
            run_at=start,
            reserved_at=start,
            lease_expires_at=start + 30 * SECOND,
            ended_at=end,
        )
    row.reserved_at = begin
    row.run_at = min(row.run_at, begin)
    row.created_at = min(row.created_at, begin)
    return True


def _start_early(planter: Planter, rows: list[Row]) -> bool:
    row = planter.chance.choice(rows)
    if row.reserved_at is None:
        return False
    row.run_at = row.reserved_at + planter.chance.randint(1, 600 * SECOND)
    return True


def _share_key(planter: Planter, rows: list[Row]) -> bool:
    """Another job of the key runs in the middle of this one's lease, with this one's id first in line to be blamed."""
    if not _only_done(rows) or rows[0].key is None:
        return False
    (row,) = rows
    held = replace(row)
    middle = _middle(row)
    planter.add(
        held,
        job_id=f"{row.job_id}-other",
        created_at=row.created_at,
        ended_at=middle + 20,
    )
    row.reserved_at = middle
    return True


def _end_again(planter: Planter, rows: list[Row]) -> bool:
    return _go_on(planter, rows, DONE, DONE)


def _go_on_after_end(planter: Planter, rows: list[Row]) -> bool:
    return _go_on(planter, rows, RELEASED, READY)


def _go_on(planter: Planter, rows: list[Row], outcome: str, state: str) -> bool:
    """One more lease, right after the last one."""
    if not _only_done(rows):
        return False
    (row,) = rows
    begin = row.ended_at + BREATH // 4
    planter.add(
        row,
        fence=row.fence + 1,
        reserved_at=begin,
        lease_expires_at=begin + 30 * SECOND,
        ended_at=begin + 20,
        outcome=outcome,
        state=state,
    )
    return True


def _requeue_alive(planter: Planter, rows: list[Row]) -> bool:
    if not _only_done(rows):
        return False
    (row,) = rows
    planter.add(
        row,
        worker=None,
        reserved_at=None,
        lease_expires_at=None,
        ended_at=row.ended_at + BREATH // 4,
        outcome=REQUEUED,
        state=READY,
    )
    return True


def _settle_late(planter: Planter, rows: list[Row]) -> bool:
    row = rows[-1]
    if row.outcome == EXPIRED or not _long_enough(row):
        return False
    row.lease_expires_at = planter.chance.choice((_middle(row), row.ended_at))
    return True


def _expire_early(planter: Planter, rows: list[Row]) -> bool:
    for row in rows:
        if row.outcome == EXPIRED:
            row.lease_expires_at = row.ended_at + planter.chance.randint(1, 20 * SECOND)
            return True
    # Where nothing ever stalled: a job that failed once and is said to have stalled instead.
    for row in rows[:-1]:
        if row.reserved_at is not None and row.state in (READY, "scheduled"):
            row.outcome = EXPIRED
            return True
    return False


def _disorder_times(planter: Planter, rows: list[Row]) -> bool:
    if not _only_done(rows):
        return False
    (row,) = rows
    assert row.reserved_at is not None
    match planter.chance.randrange(3):
        case 0:
            row.reserved_at = row.ended_at + 1
        case 1:
            row.lease_expires_at = row.reserved_at
        case _:
            # More than clocks can be apart.
            row.created_at = row.run_at = row.ended_at + 20 * SECOND
    return True


def _contradict_state(planter: Planter, rows: list[Row]) -> bool:
    if not _only_done(rows):
        return False
    rows[0].state = planter.chance.choice(("dead", "ready", "inflight", "nothing"))
    return True


def _contradict_lease(planter: Planter, rows: list[Row]) -> bool:
    if not _only_done(rows):
        return False
    rows[0].lease_expires_at = None
    return True


def _make_up_outcome(planter: Planter, rows: list[Row]) -> bool:
    planter.chance.choice(rows).outcome = planter.chance.choice(("vanished", "", "Done"))
    return True


def _duplicate(planter: Planter, rows: list[Row]) -> bool:
    row = planter.chance.choice(rows)
    copy = replace(row)
    if planter.chance.random() < 0.5:
        copy.seq = planter.number(row.ended_at)
    planter.rows.append(copy)
    return True


PLANTERS: dict[Kind, Wanted] = {
    Kind.OVERLAPPING_LEASES: _overlap,
    Kind.FENCE_OUT_OF_ORDER: _swap_fences,
    Kind.FENCE_USED_TWICE: _repeat_fence,
    Kind.FENCE_GAP: _skip_fence,
    Kind.LIMIT_EXCEEDED: _crowd,
    Kind.STARTED_EARLY: _start_early,
    Kind.KEY_HELD_TWICE: _share_key,
    Kind.ENDED_TWICE: _end_again,
    Kind.ACTIVE_AFTER_END: _go_on_after_end,
    Kind.REQUEUED_ALIVE: _requeue_alive,
    Kind.SETTLED_TOO_LATE: _settle_late,
    Kind.EXPIRED_TOO_EARLY: _expire_early,
    Kind.TIMES_OUT_OF_ORDER: _disorder_times,
    Kind.STATE_CONTRADICTS_OUTCOME: _contradict_state,
    Kind.LEASE_CONTRADICTS_OUTCOME: _contradict_lease,
    Kind.UNKNOWN_OUTCOME: _make_up_outcome,
    Kind.DUPLICATE_ROW: _duplicate,
}
"""All that can be seen in the log alone; what the store lost is planted in the store."""
