"""The state of a queue: how what ended leaves it for segments, and how segments take each other's place."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from taskharbor.drivers.objectstore.clearing import ClearingState
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.kept import KeptSlot
from taskharbor.drivers.objectstore.recalling import ARCHIVED_STATES, Brought, SegmentsNeeded
from taskharbor.jobs import Micros

__all__ = ["ARCHIVED_STATES", "Brought", "QueueState", "SegmentsNeeded"]


class QueueState(ClearingState):
    """A queue, or a shard of one, as the driver asks for it."""

    @property
    def ended_count(self) -> int:
        """Jobs that could go to a segment. Dead ones stay: they may be requeued."""
        queue = self.queue
        return 0 if queue is None else queue.done.live + queue.cancelled.live

    @property
    def ended_bytes(self) -> int:
        queue = self.queue
        lines = () if queue is None else (queue.done, queue.cancelled)
        return sum(len(item[-1].piece()) for line in lines for item in line)

    def ended_slots(self) -> list[KeptSlot]:
        """In the order of their numbers."""
        queue = self.queue
        if queue is None:
            return []
        slots: list[KeptSlot] = [item[-1] for line in (queue.done, queue.cancelled) for item in line]
        return sorted(slots, key=_seq)

    def begin(self, name: str, wall_clock: Micros) -> None:
        """A segment of that name is about to be written: whoever finds it abandoned knows what to remove."""
        self.begun = [*self.begun, (name, wall_clock)]
        self.touched = True

    def abandon(self, name: str, wall_clock: Micros) -> None:
        """It will not become part of the queue, even if its writer believes so. What is there of it goes with the retired."""
        if self._has_begun(name):
            self.begun = [(other, at) for other, at in self.begun if other != name]
            self.retired = [*self.retired, (name, wall_clock)]
            self.touched = True

    def _has_begun(self, name: str) -> bool:
        return any(name == other for other, _ in self.begun)

    def _complete(self, name: str) -> None:
        self.begun = [(other, at) for other, at in self.begun if other != name]
        self.touched = True

    def fold_in(self, entry: SegmentEntry, rows: list[int], jobs: list[int]) -> bool:
        """A segment takes the place of the rows and jobs with these numbers; False where they are not all here any more, or
        the segment was given up."""
        queue, slots = self.queue, self.accepted_order.slots
        here = [slots.get(number) for number in jobs]
        is_same_tail = [row.number for row in self.tail.rows[: len(rows)]] == rows
        if queue is None or not is_same_tail or None in here or not self._has_begun(entry.name):
            return False
        for slot in here:
            assert slot is not None
            queue.archive(slot)
            del self.jobs[slot.record.id]
            self.order.remove(slot.seq)
        self.tail.remove_first(len(rows))
        self.segments = [*self.segments, entry]
        self._complete(entry.name)
        return True

    def merge_in(self, entry: SegmentEntry, parts: list[SegmentEntry], wall_clock: Micros) -> bool:
        """A segment takes the place of others; False where those are not all here as they were, or it was given up."""
        segments = self.segments
        if parts[0] not in segments or not self._has_begun(entry.name):
            return False
        at = segments.index(parts[0])
        if segments[at : at + len(parts)] != parts:
            return False
        self.segments = [*segments[:at], entry, *segments[at + len(parts) :]]
        self.retired = [*self.retired, *((part.name, wall_clock) for part in parts)]
        self._complete(entry.name)
        return True

    def leave_unmerged(self, entry: SegmentEntry) -> bool:
        """It is as large as a segment may be."""
        self.segments = [
            msgspec.structs.replace(one, level=one.level + 1) if one == entry else one
            for one in self.segments
        ]
        self.touched = True
        return True

    def forget_retired(self, names: Sequence[str]) -> None:
        self.retired = [(name, at) for name, at in self.retired if name not in names]
        self.touched = True


def _seq(slot: KeptSlot) -> int:
    return slot.seq
