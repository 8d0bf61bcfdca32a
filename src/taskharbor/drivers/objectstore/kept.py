"""What the state of a queue is made of: the memory store's slots, lines and order, which here remember their bytes and tell
when they change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from taskharbor.drivers.memory.lines import Item, Ledger
from taskharbor.drivers.memory.queues import BLOCKED, INFLIGHT, READY, SCHEDULED, Queue, Slot
from taskharbor.drivers.objectstore.numbers import Numbering, take_stamps
from taskharbor.drivers.objectstore.stored_jobs import encode_job
from taskharbor.jobs import JobRecord, JobState, Micros


class Watcher(Protocol):
    def changed(self, slot: Slot) -> None:
        """A job is not as it was written any more."""


class KeptSlot(Slot):
    """A job of the state, and the bytes it is written as, until it changes."""

    __slots__ = ("encoded",)

    encoded: bytes | None

    def __init__(self, record: JobRecord, queue: Queue, order: Ledger[Slot]) -> None:
        super().__init__(record, queue, order)
        self.encoded = None

    @classmethod
    def stored(cls, number: int, record: JobRecord, queue: Queue, encoded: bytes | None = None) -> KeptSlot:
        """One that has its number already."""
        slot = cls.__new__(cls)
        slot.record = record
        slot.queue = queue
        slot.seq = number
        slot.place = None
        slot.encoded = encoded
        return slot

    def piece(self) -> bytes:
        if self.encoded is None:
            self.encoded = encode_job(self.seq, self.record)
        return self.encoded


class KeptQueue(Queue):
    """Notes what changes in it."""

    def __init__(self, name: str, watcher: Watcher) -> None:
        super().__init__(name)
        self._watcher = watcher

    def leave(self, slot: Slot) -> None:
        super().leave(slot)
        self._watcher.changed(slot)

    def block(self, slot: Slot) -> None:
        super().block(slot)
        self._watcher.changed(slot)

    def line_up(self, slot: Slot, state: JobState) -> None:
        self._stand_in_line(slot, state)
        self._watcher.changed(slot)

    def end(self, slot: Slot, state: JobState, finished_at: Micros) -> None:
        super().end(slot, state, finished_at)
        self._watcher.changed(slot)

    def restore(self, slot: KeptSlot) -> None:
        """Into its place by what its record says. Leases and ended jobs in the order of their ends."""
        record = slot.record
        state, key = record.state, record.key
        if state is READY or state is SCHEDULED:
            self._stand_in_line(slot, state)
        elif state is INFLIGHT:
            item: Item = (record.expires_at_us, self.leases.live, slot)
            slot.place = item
            self.leases.push(item)
        elif state is BLOCKED:
            self.blocked += 1
        else:
            assert record.finished_at_us is not None
            super().end(slot, state, record.finished_at_us)
        if key is not None:
            if state is INFLIGHT:
                self.inflight[key] = slot
            elif state.is_waiting:
                self.waiting[key] = slot

    def archive(self, slot: Slot) -> None:
        """Out of its line: from now on a segment has it."""
        slot.place = None
        line = self.ended(slot.record.state)
        line.stale += 1
        line.tidy()


class AcceptedOrder(Ledger[Slot]):
    """The state's jobs by their numbers."""

    def __init__(self, numbering: Numbering) -> None:
        self.numbering = numbering
        self.slots: dict[int, Slot] = {}
        """In the order of their numbers, since those only grow."""
        self.stamp: int | None = None
        """For the next one."""

    def append(self, entry: Slot) -> int:
        stamp = take_stamps(1) if self.stamp is None else self.stamp
        number = self.numbering.number(stamp)
        self.slots[number] = entry
        return number

    def remove(self, number: int) -> None:
        del self.slots[number]

    def after(self, number: int) -> Iterator[Slot]:
        return (slot for slot in self.slots.values() if slot.seq > number)

    def before(self, number: int | None = None) -> Iterator[Slot]:
        slots = reversed(self.slots.values())
        return slots if number is None else (slot for slot in slots if slot.seq < number)
