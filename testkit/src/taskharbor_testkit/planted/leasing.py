"""Bugs in granting, extending and ending leases by time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from taskharbor.drivers.contract import Extension, Settlement, Woken
from taskharbor.drivers.memory import MemoryDriver, MemoryStore
from taskharbor.drivers.memory.lines import Item
from taskharbor.drivers.memory.queues import READY, Queue, Slot
from taskharbor.errors import JobError, LeaseExpired, LeaseMismatch
from taskharbor.jobs import SECOND, JobRecord, Lease, Micros
from taskharbor_testkit.planted.registry import planted


@planted
class DoubleLease(MemoryStore):
    """A job under a valid lease is not handed out."""

    def _claim(self, queue: Queue, limit: int, now: Micros, types: Sequence[str] | None) -> list[Slot]:
        slots = super()._claim(queue, limit, now, types)
        held = queue.leases.head()
        if slots or held is None or limit < 1:
            return slots
        slot: Slot = held[-1]
        queue.leave(slot)
        if slot.record.key is not None:
            queue.waiting[slot.record.key] = queue.inflight.pop(slot.record.key)
        return [slot]


@planted
class LostOnReclaim(MemoryStore):
    """A job whose lease expired can be reserved again."""

    def _expire(self, slot: Slot, now: Micros) -> None:
        super()._expire(slot, now)
        if slot.record.state is READY:
            # Still counted and still listed as ready, but no line leads to it.
            slot.place = None


@planted
class ReserveDoesNotReclaim(MemoryStore):
    """reserve reclaims due leases itself; nobody has to sweep first."""

    def _reclaim_queue(self, queue: Queue, now: Micros, limit: int | None = None) -> int:
        return 0 if limit is None else super()._reclaim_queue(queue, now, limit)


@planted
class LeaseReclaimedEarly(MemoryStore):
    """A lease holds until expires_at, to the microsecond."""

    def _reclaim_queue(self, queue: Queue, now: Micros, limit: int | None = None) -> int:
        return super()._reclaim_queue(queue, now + 1, limit)


@planted
class StaleTokenAccepted(MemoryStore):
    """Only the current token proves a lease."""

    def _objection(self, slot: Slot | None, job_id: str, token: str, now: Micros) -> JobError | None:
        error = super()._objection(slot, job_id, token, now)
        return None if isinstance(error, LeaseMismatch) else error


class _ForgivesExpiry(MemoryStore):
    is_forgiving = False

    def _objection(self, slot: Slot | None, job_id: str, token: str, now: Micros) -> JobError | None:
        error = super()._objection(slot, job_id, token, now)
        return None if self.is_forgiving and isinstance(error, LeaseExpired) else error


@planted
class ExpiredSettlementAccepted(_ForgivesExpiry):
    """A settlement after expires_at is refused, even where nobody reclaimed the job yet."""

    def settle(self, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
        self.is_forgiving = True
        try:
            return super().settle(settlements, now)
        finally:
            self.is_forgiving = False


@planted
class ExpiredExtensionAccepted(_ForgivesExpiry):
    """A heartbeat after expires_at revives nothing."""

    def extend(
        self, extensions: Sequence[Extension], lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        self.is_forgiving = True
        try:
            return super().extend(extensions, lease_for, now)
        finally:
            self.is_forgiving = False


@planted
class ExtendsFromOldExpiry(MemoryStore):
    """An extension counts from now, not from the old expiry."""

    def _extend(self, slot: Slot, expires_at: Micros, progress: bytes | None) -> Lease:
        old = slot.record.expires_at_us
        assert old is not None
        return super()._extend(slot, max(old + SECOND, expires_at), progress)


@planted
class LateHeartbeatShortens(MemoryStore):
    """A heartbeat never moves expires_at backwards."""

    def _held_until(self, record: JobRecord, expires_at: Micros) -> Micros:
        return expires_at


@planted
class HeartbeatClearsProgress(MemoryStore):
    """A heartbeat without progress leaves the stored progress as it is."""

    def _extend(self, slot: Slot, expires_at: Micros, progress: bytes | None) -> Lease:
        slot.record.progress = None
        return super()._extend(slot, expires_at, progress)


@planted
class CancelNotDelivered(MemoryStore):
    """The heartbeat of a job tells its holder that a cancel was requested."""

    def _extend(self, slot: Slot, expires_at: Micros, progress: bytes | None) -> Lease:
        lease = super()._extend(slot, expires_at, progress)
        return msgspec.structs.replace(lease, cancel_requested=False)


@planted
class FenceNotIncreased(MemoryStore):
    """Every lease of a job has a higher fence than the one before."""

    def _grant(self, slot: Slot, place: Item, token: str, worker: str, reserved_at: Micros) -> JobRecord:
        slot.record.fence = min(slot.record.fence, 0)
        return super()._grant(slot, place, token, worker, reserved_at)


@planted
class StampsWithTheCallersClock(MemoryStore):
    """A lease never begins before the end of one that ended before it was granted."""

    def _reserved_at(self, queue: Queue, now: Micros) -> Micros:
        return now


@planted
class OneClockForAllQueues(MemoryStore):
    """Only leases of the same queue hold a lease's beginning back."""

    def _reserved_at(self, queue: Queue, now: Micros) -> Micros:
        return max(now, *(other.latest_end for other in self.queues.values()))


@planted
class ReclaimLeavesNoMark(MemoryStore):
    """A lease that was reclaimed has ended as any other has."""

    def _reclaim_queue(self, queue: Queue, now: Micros, limit: int | None = None) -> int:
        latest_end = queue.latest_end
        ended = super()._reclaim_queue(queue, now, limit)
        queue.latest_end = latest_end
        return ended


@planted
class EndsBeforeItBegan(MemoryStore):
    """No lease ends before it began."""

    def _ended_at(self, record: JobRecord, now: Micros) -> Micros:
        return now


@planted
class MaxInflightOvershot(MemoryStore):
    """Never more than max_inflight valid leases in a queue."""

    def _room(self, queue: Queue, now: Micros) -> int:
        room = super()._room(queue, now)
        return room + 1 if queue.leases.live else room


@planted
class MaxInflightCountsExpired(MemoryStore):
    """An expired lease frees its place under max_inflight without waiting for a sweep."""

    def _reclaim_queue(self, queue: Queue, now: Micros, limit: int | None = None) -> int:
        if limit is None and queue.settings.max_inflight is not None:
            return 0
        return super()._reclaim_queue(queue, now, limit)


@planted
class PausedQueueServed(MemoryStore):
    """Nothing is handed out of a paused queue."""

    def _room(self, queue: Queue, now: Micros) -> int:
        settings = queue.settings
        queue.settings = msgspec.structs.replace(settings, paused=False)
        try:
            return super()._room(queue, now)
        finally:
            queue.settings = settings


@planted
class MaxStallsIgnored(MemoryStore):
    """A job dies when its stalls reach max_stalls."""

    def _is_spent(self, record: JobRecord) -> bool:
        return record.attempts + record.stalls >= record.max_attempts


@planted
class StallsSpendNothing(MemoryStore):
    """An expired lease spends one of max_attempts."""

    def _is_spent(self, record: JobRecord) -> bool:
        return record.attempts >= record.max_attempts or 0 < record.max_stalls <= record.stalls


@planted
class MissedWakeUp(MemoryDriver):
    """A wake-up that came between two waits is not lost."""

    async def wait(
        self, queues: Sequence[str], *, now: Micros, timeout: float, seen: str | None = None
    ) -> Woken:
        if seen is not None:
            seen = (await super().wait(queues, now=now, timeout=0)).seen
        return await super().wait(queues, now=now, timeout=timeout, seen=seen)
