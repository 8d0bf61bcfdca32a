"""Bugs in which job comes next."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from taskharbor.drivers.contract import Release
from taskharbor.drivers.memory import MemoryStore
from taskharbor.drivers.memory.queues import READY, Queue, Slot
from taskharbor.jobs import SECOND, Micros
from taskharbor_testkit.planted.registry import planted


class _OtherOrder(MemoryStore):
    rank: Callable[[Slot], Any]

    def _claim(self, queue: Queue, limit: int, now: Micros, types: Sequence[str] | None) -> list[Slot]:
        slots = sorted(super()._claim(queue, sys.maxsize, now, types), key=type(self).rank)
        taken = slots[: max(limit, 0)]
        for slot in slots[len(taken) :]:
            queue.line_up(slot, READY)
        return taken


@planted
class PriorityInverted(_OtherOrder):
    """Higher priority first."""

    rank = staticmethod(lambda slot: (slot.record.priority, slot.record.run_at_us, slot.seq))


@planted
class LastInFirstOut(_OtherOrder):
    """Insertion order at equal priority and run_at."""

    rank = staticmethod(lambda slot: (-slot.record.priority, slot.record.run_at_us, -slot.seq))


@planted
class RunAtIgnoredInOrder(_OtherOrder):
    """At equal priority the one due first comes first."""

    rank = staticmethod(lambda slot: (-slot.record.priority, slot.seq))


@planted
class ScheduledRunsEarly(MemoryStore):
    """No job is handed out before its run_at."""

    def _claim(self, queue: Queue, limit: int, now: Micros, types: Sequence[str] | None) -> list[Slot]:
        queue.promote(now + SECOND)
        return super()._claim(queue, limit, now + SECOND, types)


@planted
class TypeFilterIgnored(MemoryStore):
    """Only jobs of the types asked for are handed out."""

    def _claim(self, queue: Queue, limit: int, now: Micros, types: Sequence[str] | None) -> list[Slot]:
        return super()._claim(queue, limit, now, None)


@planted
class NoTypesMeansAllTypes(MemoryStore):
    """An empty sequence of types matches nothing."""

    def _claim(self, queue: Queue, limit: int, now: Micros, types: Sequence[str] | None) -> list[Slot]:
        return super()._claim(queue, limit, now, types or None)


@planted
class ReclaimedGoesToTheBack(MemoryStore):
    """A job whose lease expired keeps its place in the queue."""

    def _expire(self, slot: Slot, now: Micros) -> None:
        super()._expire(slot, now)
        if slot.record.state is READY:
            slot.queue.leave(slot)
            slot.record.run_at_us = now
            slot.queue.line_up(slot, READY)


@planted
class ReleasedGoesToTheBack(MemoryStore):
    """A released job keeps its place in the queue."""

    def _release(self, slot: Slot, release: Release, now: Micros) -> None:
        if release.run_at_us is None:
            release = msgspec.structs.replace(release, run_at_us=now)
        super()._release(slot, release, now)
