"""One queue's jobs, each in the one line its state has; the lengths of the lines are the counters.

Ready jobs stand in one line per type: a claim by type never looks at other types, and a claim of any type merges
the heads. An entry moves by changing its `place`; what it left behind goes stale (see `PlaceLine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace

from taskharbor.drivers.contract import QueueSettings
from taskharbor.drivers.memory.lines import Item, Ledger, Line, PlaceLine
from taskharbor.drivers.waiting import ALWAYS
from taskharbor.jobs import JobRecord, JobState, Micros

# Reading a member of an enum through its class costs more than the rest of a move.
SCHEDULED, READY, BLOCKED, INFLIGHT = JobState.SCHEDULED, JobState.READY, JobState.BLOCKED, JobState.INFLIGHT
DONE, DEAD, CANCELLED = JobState.DONE, JobState.DEAD, JobState.CANCELLED


class Slot:
    """A job in the store: the record, where it was inserted, and the item that stands for it in a line."""

    __slots__ = ("place", "queue", "record", "seq")

    def __init__(self, record: JobRecord, queue: Queue, order: Ledger[Slot]) -> None:
        self.record = record
        self.queue = queue
        self.seq = order.append(self)
        self.place: Item | None = None

    def __lt__(self, other: Slot) -> bool:
        # Reached only between a stale item and an equal fresh one of the same slot: either order will do.
        return False


class Queue:
    """The lines, counters, keys and settings of one queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings = QueueSettings()
        self.ready: dict[str, PlaceLine] = {}
        """By type; (-priority, run_at, seq, slot). A type without ready jobs has no line."""
        self.scheduled = PlaceLine()
        """(run_at, seq, slot)"""
        self.leases = PlaceLine()
        """(expires_at, number of the grant, slot)"""
        self.blocked = 0
        """How many; they stand in no line, `waiting` has them by key."""
        self.done = PlaceLine()
        """This and the other two terminal ones: (finished_at, seq, slot)"""
        self.dead = PlaceLine()
        self.cancelled = PlaceLine()
        self.gone: dict[JobState, int] = {DONE: 0, DEAD: 0, CANCELLED: 0}
        """How many left a terminal state again: removed, or requeued."""
        self.latest_end: Micros = 0
        """The latest end of a lease: no later lease may begin before it, whatever its caller's clock says."""
        self.log = Line()
        """Rows of the attempt log."""
        self.waiting: dict[str, Slot] = {}
        """By key: the one ready, scheduled or blocked job."""
        self.inflight: dict[str, Slot] = {}
        """By key: the one job under a lease, valid or not."""
        self.accepted: dict[str, str] = {}
        """Idempotency key -> id of the job it led to."""
        self.led_here: dict[str, list[str]] = {}
        """Job id -> the idempotency keys that led to it, to forget them together."""

    def _line_of(self, record: JobRecord) -> PlaceLine:
        state = record.state
        if state is READY:
            return self.ready[record.type]
        if state is SCHEDULED:
            return self.scheduled
        return self.leases if state is INFLIGHT else self.ended(state)

    def ended(self, state: JobState) -> PlaceLine:
        """The line of a terminal state."""
        if state is DONE:
            return self.done
        return self.dead if state is DEAD else self.cancelled

    def leave(self, slot: Slot) -> None:
        """Take a slot out of wherever its record (unchanged so far) says it is."""
        state = slot.record.state
        if state is BLOCKED:
            self.blocked -= 1
            return
        slot.place = None
        line = self._line_of(slot.record)
        line.stale += 1
        line.tidy()
        if state in self.gone:
            self.gone[state] += 1

    def block(self, slot: Slot) -> None:
        slot.record.state = BLOCKED
        self.blocked += 1

    def _stand_in_line(self, slot: Slot, state: JobState) -> None:
        """Into the ready or the scheduled line."""
        record = slot.record
        record.state = state
        item: Item
        if state is READY:
            slot.place = item = (-record.priority, record.run_at_us, slot.seq, slot)
            line = self.ready.get(record.type)
            if line is None:
                line = self.ready[record.type] = PlaceLine()
        else:
            slot.place = item = (record.run_at_us, slot.seq, slot)
            line = self.scheduled
        line.push(item)

    line_up = _stand_in_line
    """For those who changed the job, or brought it. Time alone moves jobs by `_stand_in_line`."""

    def end(self, slot: Slot, state: JobState, finished_at: Micros) -> None:
        record = slot.record
        record.state = state
        record.finished_at_us = finished_at
        slot.place = item = (finished_at, slot.seq, slot)
        line = self.done if state is DONE else self.ended(state)
        line.push(item)

    def promote(self, now: Micros) -> bool:
        """Scheduled jobs whose time has come become ready; whether there were any."""
        scheduled = self.scheduled
        item = scheduled.head()
        if item is None or item[0] > now:
            return False
        while item is not None and item[0] <= now:
            scheduled.pop()
            self._stand_in_line(item[-1], READY)
            item = scheduled.head()
        return True

    def take(self, limit: int, now: Micros, types: Sequence[str] | None) -> list[Slot]:
        """Remove up to `limit` ready jobs from their lines, in order."""
        names: Iterable[str] = list(self.ready) if types is None else dict.fromkeys(types)
        lines = [(name, self.ready[name]) for name in names if name in self.ready]
        taken: list[Slot] = []
        if len(lines) == 1:
            line = lines[0][1]
            while len(taken) < limit and (item := line.take()) is not None:
                if item[1] <= now:
                    taken.append(item[-1])
                else:
                    # Promoted by somebody whose `now` was ahead of the caller's, for whom it is not due yet.
                    self._stand_in_line(item[-1], SCHEDULED)
        else:
            heads = [(item, line) for _, line in lines if (item := line.head()) is not None]
            heapify(heads)
            while len(taken) < limit and heads:
                item, line = heads[0]
                line.pop()
                if item[1] <= now:
                    taken.append(item[-1])
                else:
                    self._stand_in_line(item[-1], SCHEDULED)
                following = line.head()
                if following is None:
                    heappop(heads)
                else:
                    heapreplace(heads, (following, line))
        for name, line in lines:
            if not line:
                del self.ready[name]
        return taken

    def counts(self) -> dict[JobState, int]:
        return {
            SCHEDULED: self.scheduled.live,
            READY: sum(line.live for line in self.ready.values()),
            BLOCKED: self.blocked,
            INFLIGHT: self.leases.live,
            DONE: self.done.live,
            DEAD: self.dead.live,
            CANCELLED: self.cancelled.live,
        }

    def total(self, state: JobState) -> int:
        """How many jobs ever reached a terminal state."""
        return self.ended(state).live + self.gone[state]

    def next_due(self, since: Micros = ALWAYS) -> Micros | None:
        """When the first scheduled job or the first lease comes due, unless that was by `since`."""
        heads = [item[0] for line in (self.scheduled, self.leases) if (item := line.head()) is not None]
        return min((due for due in heads if due > since), default=None)

    def head_run_at(self) -> Micros | None:
        """run_at of the ready job that is claimed next."""
        heads = [item for line in self.ready.values() if (item := line.head()) is not None]
        run_at: Micros | None = min(heads)[1] if heads else None
        return run_at
