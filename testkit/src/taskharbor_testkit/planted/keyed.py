"""Bugs in keyed jobs: one waiting and one inflight per key, and what becomes of the blocked one."""

from __future__ import annotations

from taskharbor.drivers.memory import MemoryStore
from taskharbor.drivers.memory.queues import BLOCKED, Queue, Slot
from taskharbor.jobs import DEFAULT_FLAGS, Failure, JobRecord, JobState, Micros, Outcome
from taskharbor_testkit.planted.registry import planted


@planted
class TwoInflightPerKey(MemoryStore):
    """Never two jobs of one key inflight."""

    def _insert(self, queue: Queue, record: JobRecord, now: Micros) -> None:
        held = None if record.key is None else queue.inflight.pop(record.key, None)
        super()._insert(queue, record, now)
        if held is not None and record.key is not None:
            queue.inflight[record.key] = held

    def _end_lease(
        self, slot: Slot, outcome: Outcome, state: JobState, error: Failure | None, now: Micros
    ) -> Micros:
        if slot.record.key is not None:
            slot.queue.inflight.setdefault(slot.record.key, slot)
        return super()._end_lease(slot, outcome, state, error, now)


@planted
class BlockedForEver(MemoryStore):
    """The end of a job makes the blocked one of its key runnable."""

    def _unblock(self, ended: Slot, now: Micros) -> None:
        pass


@planted
class UnblockedRunsAtOnce(MemoryStore):
    """An unblocked job waits for its own run_at."""

    def _unblock(self, ended: Slot, now: Micros) -> None:
        blocked = ended.queue.waiting.get(ended.record.key or "")
        if blocked is not None and blocked.record.state is BLOCKED:
            blocked.record.run_at_us = min(blocked.record.run_at_us, now)
        super()._unblock(ended, now)


@planted
class MergeDropsFlags(MemoryStore):
    """A blocked job is merged by the flags it came with."""

    def _absorb(self, survivor: Slot, blocked: Slot, now: Micros) -> None:
        flags = blocked.record.update
        blocked.record.update = DEFAULT_FLAGS
        super()._absorb(survivor, blocked, now)
        blocked.record.update = flags


@planted
class MergeLosesId(MemoryStore):
    """A merged job's own id reads as merged into the survivor."""

    def _absorb(self, survivor: Slot, blocked: Slot, now: Micros) -> None:
        super()._absorb(survivor, blocked, now)
        blocked.record.merged_into = None


@planted
class MergeOverwrittenByRetry(MemoryStore):
    """The blocked job's changes come after the survivor's own, so they win."""

    def _absorb(self, survivor: Slot, blocked: Slot, now: Micros) -> None:
        run_at, attempts = survivor.record.run_at_us, survivor.record.attempts
        super()._absorb(survivor, blocked, now)
        survivor.record.run_at_us, survivor.record.attempts = run_at, attempts


@planted
class BlockedForgetsEarlierFlags(MemoryStore):
    """A blocked job gathers the flags of every enqueue onto it."""

    def _update_waiting(self, slot: Slot, newer: JobRecord, now: Micros) -> None:
        super()._update_waiting(slot, newer, now)
        if slot.record.state is BLOCKED:
            slot.record.update = newer.update or DEFAULT_FLAGS


@planted
class UpdateIgnoresFlags(MemoryStore):
    """An enqueue onto a waiting job changes what its flags say, and nothing else."""

    def _update_waiting(self, slot: Slot, newer: JobRecord, now: Micros) -> None:
        newer.update = None
        super()._update_waiting(slot, newer, now)


@planted
class KeysSharedBetweenQueues(MemoryStore):
    """A key means something within its queue only."""

    def _queue(self, name: str) -> Queue:
        queue = super()._queue(name)
        first = next(iter(self.queues.values()))
        queue.waiting, queue.inflight = first.waiting, first.inflight
        return queue
