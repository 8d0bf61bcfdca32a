"""Violations put into a clean stretch of history, one at a time, by editing or adding rows, or what the store has of a job.

Each takes a job of its own and disturbs as little else as it can: what is added lies in the pauses between two leases.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from taskharbor.jobs import SECOND, Micros
from taskharbor.spark.audit.violations import Kind
from taskharbor_testkit.histories.plan import DAY, Slot
from taskharbor_testkit.histories.slot import BREATH, Row, number_of_row

StoredJob: TypeAlias = dict[str, object] | None
Plant: TypeAlias = Callable[["Planter", list[Row]], bool]
"""Puts a violation into a job's rows; False where they cannot take it."""

PLANTERS: dict[Kind, Plant] = {}
"""By kind. Those of `STORE_KINDS` need the store's jobs beside the log."""


def _plants(kind: Kind) -> Callable[[Plant], Plant]:
    return lambda plant: PLANTERS.setdefault(kind, plant)


def _plants_in_done(kind: Kind) -> Callable[[Callable[[Planter, Row], object]], None]:
    """For a change of the plainest job there is: one execution, which succeeded."""

    def register(change: Callable[[Planter, Row], object]) -> None:
        def plant(planter: Planter, rows: list[Row]) -> bool:
            fits = len(rows) == 1 and rows[0].outcome == "done" and _long_enough(rows[0])
            if fits:
                change(planter, rows[0])
            return fits

        PLANTERS[kind] = plant

    return register


class Planter:
    """Works on the rows of one slot's day, in place."""

    def __init__(self, rows: list[Row], slot: Slot, slots: int, limit: int, chance: random.Random) -> None:
        self.rows = rows
        self.chance = chance
        self.limit = limit
        self.max_attempts = slot.queue.max_attempts
        self.stored: dict[str, StoredJob] = {}
        """Where the store has a job otherwise than its rows say: changed fields, or None if it does not have it."""
        self.oldest = min((row.ended_at for row in rows), default=0)
        self._slot = slot
        self._slots = slots
        self._taken = {row.ended_at for row in rows}
        self._jobs: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows:
            self._jobs[row.job_id].append(row)
        self._untouched = list(self._jobs)
        chance.shuffle(self._untouched)

    def plant(self, kinds: Iterable[Kind]) -> list[tuple[Kind, str]]:
        """The violations that were planted, each with the job that shows it. A kind for which no job fits is left out."""
        planted = []
        for kind in kinds:
            for place, job_id in enumerate(self._untouched):
                if PLANTERS[kind](self, self._jobs[job_id]):
                    del self._untouched[place]
                    planted.append((kind, job_id))
                    break
        return planted

    def add(self, like: Row, **changed: object) -> Row:
        row: Row = replace(like, **changed)  # type: ignore[arg-type]
        row.seq = self.number(row.ended_at)
        self.rows.append(row)
        return row

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


@_plants(Kind.OVERLAPPING_LEASES)
def _overlap(planter: Planter, rows: list[Row]) -> bool:
    """The job's last lease is moved into the one before it."""
    if len(rows) < 2 or _leases(rows) != rows or rows[-1].outcome == "expired" or not _long_enough(rows[-2]):
        return False
    held, moved = rows[-2:]
    moved.reserved_at = _middle(held)
    moved.run_at = min(moved.run_at, moved.reserved_at)
    moved.ended_at = moved.reserved_at + 10
    moved.lease_expires_at = moved.reserved_at + 30 * SECOND
    return True


@_plants(Kind.FENCE_OUT_OF_ORDER)
def _swap_fences(planter: Planter, rows: list[Row]) -> bool:
    leases = _leases(rows)
    if len(leases) < 2:
        return False
    leases[-2].fence, leases[-1].fence = leases[-1].fence, leases[-2].fence
    return True


def _change_last_fence(planter: Planter, rows: list[Row], *, is_gap: bool) -> bool:
    """The job's last lease repeats the fence before it, or leaves out a few."""
    leases = _leases(rows)
    if len(leases) < 2 or rows[-1] is not leases[-1]:
        return False
    leases[-1].fence = leases[-1].fence + planter.chance.randint(1, 3) if is_gap else leases[-2].fence
    return True


_plants(Kind.FENCE_USED_TWICE)(partial(_change_last_fence, is_gap=False))
_plants(Kind.FENCE_GAP)(partial(_change_last_fence, is_gap=True))


@_plants_in_done(Kind.LIMIT_EXCEEDED)
def _crowd(planter: Planter, row: Row) -> None:
    """As many leases as the queue allows, all at once in a pause of the slot, and then this job's own."""
    assert row.reserved_at is not None
    end = row.reserved_at - 1
    begin = end - BREATH // 4
    for number in range(planter.limit):
        start = begin - planter.limit + number
        instants = dict.fromkeys(("created_at", "run_at", "reserved_at"), start)
        name = f"{row.job_id}-crowd-{number}"
        expiry = start + 30 * SECOND
        planter.add(row, job_id=name, key=None, lease_expires_at=expiry, ended_at=end, **instants)
    row.reserved_at = begin
    row.run_at = min(row.run_at, begin)
    row.created_at = min(row.created_at, begin)


@_plants(Kind.STARTED_EARLY)
def _start_early(planter: Planter, rows: list[Row]) -> bool:
    row = planter.chance.choice(rows)
    if row.reserved_at is None:
        return False
    row.run_at = row.reserved_at + planter.chance.randint(1, 600 * SECOND)
    return True


@_plants(Kind.KEY_HELD_TWICE)
def _share_key(planter: Planter, rows: list[Row]) -> bool:
    """Another job of the key runs in the middle of this one's lease, with this one's id first in line to be blamed."""
    row = rows[0]
    if len(rows) != 1 or row.outcome != "done" or not _long_enough(row) or row.key is None:
        return False
    middle = _middle(row)
    planter.add(row, job_id=f"{row.job_id}-other", ended_at=middle + 20)
    row.reserved_at = middle
    return True


def _go_on(planter: Planter, row: Row, **end: str) -> Row:
    """One more lease, right after the last one."""
    begin = row.ended_at + BREATH // 4
    lease = {"reserved_at": begin, "lease_expires_at": begin + 30 * SECOND, "ended_at": begin + 20}
    return planter.add(row, fence=row.fence + 1, **lease, **end)


def _plants_in_retry(kind: Kind) -> Callable[[Callable[[Planter, Row, Row], None]], None]:
    """For a change of a job without a key that failed, waited, and was done. It is made of one that was done at once."""

    def register(change: Callable[[Planter, Row, Row], None]) -> None:
        def plant(planter: Planter, rows: list[Row]) -> bool:
            fits = (
                len(rows) == 1 and rows[0].outcome == "done" and rows[0].key is None and _long_enough(rows[0])
            )
            if fits:
                again = _go_on(planter, rows[0])
                rows[0].outcome, rows[0].state = "retried", "scheduled"
                again.run_at = rows[0].ended_at
                change(planter, rows[0], again)
            return fits

        PLANTERS[kind] = plant

    return register


_plants_in_done(Kind.ENDED_TWICE)(partial(_go_on, outcome="done", state="done"))
_plants_in_done(Kind.ACTIVE_AFTER_END)(partial(_go_on, outcome="released", state="ready"))


@_plants_in_done(Kind.REQUEUED_ALIVE)
def _requeue_alive(planter: Planter, row: Row) -> None:
    nobody = dict.fromkeys(("worker", "reserved_at", "lease_expires_at"))
    planter.add(row, ended_at=row.ended_at + BREATH // 4, outcome="requeued", state="ready", **nobody)


@_plants(Kind.SETTLED_TOO_LATE)
def _settle_late(planter: Planter, rows: list[Row]) -> bool:
    row = rows[-1]
    if row.outcome == "expired" or not _long_enough(row):
        return False
    row.lease_expires_at = planter.chance.choice((_middle(row), row.ended_at))
    return True


@_plants(Kind.EXPIRED_TOO_EARLY)
def _expire_early(planter: Planter, rows: list[Row]) -> bool:
    for row in rows:
        if row.outcome == "expired":
            row.lease_expires_at = row.ended_at + planter.chance.randint(1, 20 * SECOND)
            return True
    # Where nothing ever stalled: a job that failed once and is said to have stalled instead.
    for row in rows[:-1]:
        if row.reserved_at is not None and row.state in ("ready", "scheduled"):
            row.outcome = "expired"
            return True
    return False


@_plants_in_done(Kind.TIMES_OUT_OF_ORDER)
def _disorder_times(planter: Planter, row: Row) -> None:
    match planter.chance.randrange(3):
        case 0:
            row.reserved_at = row.ended_at + 1
        case 1:
            row.lease_expires_at = row.reserved_at
        case _:
            # More than clocks can be apart.
            row.created_at = row.run_at = row.ended_at + 20 * SECOND


@_plants_in_done(Kind.STATE_CONTRADICTS_OUTCOME)
def _contradict_state(planter: Planter, row: Row) -> None:
    row.state = planter.chance.choice(("dead", "ready", "inflight", "nothing"))


@_plants_in_done(Kind.LEASE_CONTRADICTS_OUTCOME)
def _contradict_lease(planter: Planter, row: Row) -> None:
    row.lease_expires_at = None


@_plants(Kind.UNKNOWN_OUTCOME)
def _make_up_outcome(planter: Planter, rows: list[Row]) -> bool:
    planter.chance.choice(rows).outcome = planter.chance.choice(("vanished", "", "Done"))
    return True


@_plants(Kind.DUPLICATE_ROW)
def _duplicate(planter: Planter, rows: list[Row]) -> bool:
    row = planter.chance.choice(rows)
    copy = replace(row)
    if planter.chance.random() < 0.5:
        copy.seq = planter.number(row.ended_at)
    planter.rows.append(copy)
    return True


@_plants_in_done(Kind.LEASE_TOO_LONG)
def _lease_for_days(planter: Planter, row: Row) -> None:
    row.lease_expires_at = row.ended_at + DAY + planter.chance.randint(10 * SECOND, DAY)


@_plants(Kind.SETTLED_BY_ANOTHER)
def _settle_twice(planter: Planter, rows: list[Row]) -> bool:
    row = rows[-1]
    if row.worker is None or row.outcome == "expired" or not _long_enough(row):
        return False
    planter.add(row, worker=f"{row.worker}-other", ended_at=row.ended_at - 1)
    return True


@_plants_in_retry(Kind.RETRIED_TOO_EARLY)
def _forget_delay(planter: Planter, first: Row, again: Row) -> None:
    """The second lease has a time that was due before the failure."""
    again.run_at = first.ended_at - planter.chance.randint(6 * SECOND, 600 * SECOND)


@_plants_in_retry(Kind.TIME_WENT_BACK)
def _turn_back(planter: Planter, first: Row, again: Row) -> None:
    """The two leases change their times, and not their fences and numbers."""
    for name in ("run_at", "reserved_at", "lease_expires_at", "ended_at"):
        earlier, later = getattr(first, name), getattr(again, name)
        setattr(first, name, later)
        setattr(again, name, earlier)


@_plants_in_done(Kind.DONE_WITH_ERROR)
def _add_error(planter: Planter, row: Row) -> None:
    row.error_type = "ValueError"


@_plants_in_retry(Kind.JOB_CHANGED)
def _change_job(planter: Planter, first: Row, again: Row) -> None:
    if planter.chance.random() < 0.5:
        again.type += "_other"
    else:
        again.key = f"{again.job_id}-key"


@_plants_in_retry(Kind.RAN_AND_MERGED)
def _merge_after_run(planter: Planter, first: Row, again: Row) -> None:
    again.worker = again.reserved_at = again.lease_expires_at = None
    again.fence, again.outcome, again.state = first.fence, "merged", "cancelled"


# -- what the store has --------------------------------------------------------------------------------------------


def _leave_waiting(planter: Planter, row: Row) -> None:
    row.outcome, row.state = "released", "ready"


@_plants_in_done(Kind.LOST_JOB)
def _lose(planter: Planter, row: Row) -> None:
    _leave_waiting(planter, row)
    planter.stored[row.job_id] = None


@_plants_in_done(Kind.STORE_CONTRADICTS_LOG)
def _go_back(planter: Planter, row: Row) -> None:
    older: dict[str, object] = {"state": "ready", "fence": 0, "run_at": row.ended_at + DAY}
    held: dict[str, object] = {"state": "inflight"}
    planter.stored[row.job_id] = planter.chance.choice((older, held))


@_plants_in_done(Kind.DIED_TOO_EARLY)
def _die_early(planter: Planter, row: Row) -> None:
    row.outcome, row.state, row.lease_expires_at = "expired", "dead", row.ended_at
    planter.stored[row.job_id] = {"attempts": planter.chance.randrange(planter.max_attempts - 1), "stalls": 1}


@_plants_in_retry(Kind.TOO_MANY_EXECUTIONS)
def _allow_fewer(planter: Planter, first: Row, again: Row) -> None:
    planter.stored[again.job_id] = {"max_attempts": 1}


@_plants(Kind.DONE_WITHOUT_ROW)
def _forget_row(planter: Planter, rows: list[Row]) -> bool:
    """Not in the last hours: rows of this time may not have been read yet."""
    row, newest = rows[0], planter.rows[-1].ended_at
    is_between = planter.oldest + 60 * SECOND < row.created_at and row.ended_at < newest - 7200 * SECOND
    if len(rows) > 1 or row.outcome != "done" or not is_between:
        return False
    planter.stored[row.job_id] = {}
    planter.rows.remove(row)
    return True


@_plants(Kind.LEFT_WAITING)
def _leave(planter: Planter, rows: list[Row]) -> bool:
    if len(rows) > 1 or rows[0].outcome != "done" or rows[0].key is not None:
        return False
    _leave_waiting(planter, rows[0])
    return True
