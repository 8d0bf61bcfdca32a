"""Bugs in accepting jobs."""

from __future__ import annotations

from collections.abc import Sequence

from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.memory import MemoryStore
from taskharbor.drivers.memory.queues import Slot
from taskharbor.jobs import JobRecord, JobState, Micros
from taskharbor_testkit.planted.registry import planted


@planted
class IdempotencyKeyChangesJob(MemoryStore):
    """A known idempotency key is a lookup, never a change."""

    def _accept(self, record: JobRecord, now: Micros) -> Enqueued:
        queue = self.queues.get(record.queue)
        if queue is not None and record.idempotency_key is not None and record.id not in self.jobs:
            known = queue.accepted.get(record.idempotency_key)
            if known is not None:
                self.jobs[known].record.payload = record.payload
        return super()._accept(record, now)


@planted
class IdempotencyKeyForgottenAtEnd(MemoryStore):
    """An idempotency key stays known as long as its job is kept, also after it ended."""

    def _finish(self, slot: Slot, state: JobState, now: Micros, finished_at: Micros) -> None:
        super()._finish(slot, state, now, finished_at)
        for key in slot.queue.led_here.pop(slot.record.id, ()):
            del slot.queue.accepted[key]


@planted
class KnownIdStoredAgain(MemoryStore):
    """A repeated enqueue of a known id changes nothing."""

    def _accept(self, record: JobRecord, now: Micros) -> Enqueued:
        slot = self.jobs.get(record.id)
        if slot is not None:
            slot.record.payload = record.payload
        return super()._accept(record, now)


@planted
class EnqueueNotAllOrNothing(MemoryStore):
    """A batch is stored as a whole or not at all."""

    def enqueue(self, records: Sequence[JobRecord], now: Micros) -> list[Enqueued]:
        answers: list[Enqueued] = []
        for record in records:
            answers += super().enqueue([record], now)
        return answers


@planted
class EnqueueShuffled(MemoryStore):
    """A batch is stored in the order it was given."""

    def enqueue(self, records: Sequence[JobRecord], now: Micros) -> list[Enqueued]:
        return super().enqueue(records[::-1], now)[::-1]


@planted
class EnqueueKeepsCounters(MemoryStore):
    """Counters of the given record are ignored."""

    def enqueue(self, records: Sequence[JobRecord], now: Micros) -> list[Enqueued]:
        new = [record for record in records if record.id not in self.jobs]
        answers = super().enqueue(records, now)
        for record in new:
            if record.id in self.jobs:
                self.jobs[record.id].record.attempts = record.attempts
        return answers
