"""Bugs in the claim order, in granting and extending leases, and in waiting for work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from taskharbor.clock import Clock
from taskharbor.drivers.contract import DAY, Extension, Release, Settlement, Woken
from taskharbor.drivers.operations import Reserve
from taskharbor.drivers.waiting import Notifications
from taskharbor.errors import JobError, LeaseExpired, LeaseMismatch
from taskharbor.jobs import SECOND, JobRecord, JobState, Lease, Micros
from taskharbor_testkit.model import Model
from taskharbor_testkit.planted.registry import Bug, HandleBug


class _OtherOrder(Bug):
    def candidates(self, queue: str, types: Sequence[str] | None, now: Micros) -> list[JobRecord]:
        return sorted(super().candidates(queue, types, now), key=self.rank)

    def rank(self, job: JobRecord) -> Any:
        raise NotImplementedError


class PriorityInverted(_OtherOrder):
    """Higher priority first."""

    def rank(self, job: JobRecord) -> Any:
        return (job.priority, job.run_at_us, self.places[job.id])


class LastInFirstOut(_OtherOrder):
    """Insertion order at equal priority and run_at."""

    def rank(self, job: JobRecord) -> Any:
        return (-job.priority, job.run_at_us, -self.places[job.id])


class RunAtIgnoredInOrder(_OtherOrder):
    """At equal priority the one due first comes first."""

    def rank(self, job: JobRecord) -> Any:
        return (-job.priority, self.places[job.id])


class ScheduledRunsEarly(Bug):
    """No job is handed out before its run_at."""

    def candidates(self, queue: str, types: Sequence[str] | None, now: Micros) -> list[JobRecord]:
        return super().candidates(queue, types, now + SECOND)


class TypeFilterIgnored(Bug):
    """Only jobs of the types asked for are handed out."""

    def candidates(self, queue: str, types: Sequence[str] | None, now: Micros) -> list[JobRecord]:
        return super().candidates(queue, None, now)


class NoTypesMeansAllTypes(Bug):
    """An empty sequence of types matches nothing."""

    def candidates(self, queue: str, types: Sequence[str] | None, now: Micros) -> list[JobRecord]:
        return super().candidates(queue, types or None, now)


class ReclaimedGoesToTheBack(Bug):
    """A job whose lease expired keeps its place in the queue."""

    def expire(self, job: JobRecord, now: Micros) -> None:
        super().expire(job, now)
        if job.state is JobState.READY:
            job.run_at_us = now


class ReleasedGoesToTheBack(Bug):
    """A released job keeps its place in the queue."""

    def release(self, job: JobRecord, held: JobRecord, release: Release, now: Micros) -> None:
        run_at = now if release.run_at_us is None else release.run_at_us
        super().release(job, held, msgspec.structs.replace(release, run_at_us=run_at), now)


class DoubleLease(Bug):
    """A job under a valid lease is not handed out."""

    def candidates(self, queue: str, types: Sequence[str] | None, now: Micros) -> list[JobRecord]:
        return super().candidates(queue, types, now) or self.leased(queue, now)[:1]


class LostOnReclaim(Bug):
    """A job whose lease expired can be reserved again."""

    lost: frozenset[str] = frozenset()

    def expire(self, job: JobRecord, now: Micros) -> None:
        super().expire(job, now)
        self.lost |= {job.id}

    def candidates(self, queue: str, types: Sequence[str] | None, now: Micros) -> list[JobRecord]:
        return [job for job in super().candidates(queue, types, now) if job.id not in self.lost]


class ReserveDoesNotReclaim(Bug):
    """reserve reclaims due leases itself; nobody has to sweep first."""

    def reclaim_for_reserve(self, queue: str, now: Micros) -> None:
        pass


class LeaseReclaimedEarly(Bug):
    """A lease holds until expires_at, to the microsecond."""

    def expired(self, now: Micros, queue: str | None = None) -> list[str]:
        return super().expired(now + 1, queue)


class StaleTokenAccepted(Bug):
    """Only the current token proves a lease."""

    def refuse(self, job_id: str, token: str, now: Micros) -> JobError | None:
        error = super().refuse(job_id, token, now)
        return None if isinstance(error, LeaseMismatch) else error


class ExpiredSettlementAccepted(Bug):
    """A settlement after expires_at is refused, even where nobody reclaimed the job yet."""

    is_settling = False

    def settle_one(self, settlement: Settlement, now: Micros) -> JobError | None:
        self.is_settling = True
        answer = super().settle_one(settlement, now)
        self.is_settling = False
        return answer

    def refuse(self, job_id: str, token: str, now: Micros) -> JobError | None:
        error = super().refuse(job_id, token, now)
        return None if self.is_settling and isinstance(error, LeaseExpired) else error


class ExpiredExtensionAccepted(Bug):
    """A heartbeat after expires_at revives nothing."""

    def extend_lease(
        self, extensions: Sequence[Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        return super().extend_lease(extensions, lease_for=now + lease_for, now=0)


class ExtendsFromOldExpiry(Bug):
    """An extension counts from now, not from the old expiry."""

    def held_until(self, job: JobRecord, expires_at: Micros) -> Micros:
        return max((job.expires_at_us or 0) + SECOND, expires_at)


class LateHeartbeatShortens(Bug):
    """A heartbeat never moves expires_at backwards."""

    def held_until(self, job: JobRecord, expires_at: Micros) -> Micros:
        return expires_at


class HeartbeatClearsProgress(Bug):
    """A heartbeat without progress leaves the stored progress as it is."""

    def extend(self, job: JobRecord, expires_at: Micros, progress: bytes | None) -> Lease:
        job.progress = None
        return super().extend(job, expires_at, progress)


class CancelNotDelivered(Bug):
    """The heartbeat of a job tells its holder that a cancel was requested."""

    def extend(self, job: JobRecord, expires_at: Micros, progress: bytes | None) -> Lease:
        lease = super().extend(job, expires_at, progress)
        return msgspec.structs.replace(lease, cancel_requested=False)


class FenceNotIncreased(Bug):
    """Every lease of a job has a higher fence than the one before."""

    def grant(self, job: JobRecord, worker: str, start: Micros, lease_for: Micros) -> None:
        job.fence = 0
        super().grant(job, worker, start, lease_for)


class StampsWithTheCallersClock(Bug):
    """A lease never begins before the end of one that ended before it was granted."""

    def lease_start(self, queue: str, now: Micros) -> Micros:
        return now


class OneClockForAllQueues(Bug):
    """Only leases of the same queue hold a lease's beginning back."""

    def lease_start(self, queue: str, now: Micros) -> Micros:
        return max([now, *self.latest_end.values()])


class ReclaimLeavesNoMark(Bug):
    """A lease that was reclaimed has ended as any other has."""

    def expire(self, job: JobRecord, now: Micros) -> None:
        latest_end = dict(self.latest_end)
        super().expire(job, now)
        self.latest_end = latest_end


class EndsBeforeItBegan(Bug):
    """No lease ends before it began."""

    def ended_at(self, held: JobRecord, now: Micros) -> Micros:
        return now


class MaxInflightOvershot(Bug):
    """Never more than max_inflight valid leases in a queue."""

    def room(self, queue: str, now: Micros) -> int:
        return super().room(queue, now) + bool(self.leased(queue, now))


class MaxInflightCountsExpired(Bug):
    """An expired lease frees its place under max_inflight without waiting for a sweep."""

    def reclaim_for_reserve(self, queue: str, now: Micros) -> None:
        if self.settings(queue).max_inflight is None:
            super().reclaim_for_reserve(queue, now)

    def leased(self, queue: str, now: Micros) -> list[JobRecord]:
        return super().leased(queue, 0)


class PausedQueueServed(Bug):
    """Nothing is handed out of a paused queue."""

    def is_paused(self, queue: str) -> bool:
        return False


class MaxStallsIgnored(Bug):
    """A job dies when its stalls reach max_stalls."""

    def is_spent(self, job: JobRecord) -> bool:
        return not job.max_stalls and super().is_spent(job)


class StallsSpendTwice(Bug):
    """With max_stalls, an expired lease spends nothing of max_attempts."""

    def is_spent(self, job: JobRecord) -> bool:
        return super().is_spent(job) or job.attempts + job.stalls >= job.max_attempts


class AttemptsIgnoredWithMaxStalls(Bug):
    """With max_stalls too, a job dies when its attempts reach max_attempts."""

    def is_spent(self, job: JobRecord) -> bool:
        return super().is_spent(job) and (not job.max_stalls or job.stalls >= job.max_stalls)


class StallsSpendNothing(Bug):
    """An expired lease spends one of max_attempts."""

    def is_spent(self, job: JobRecord) -> bool:
        return job.attempts >= job.max_attempts or 0 < job.max_stalls <= job.stalls


class DeafToOthers(HandleBug):
    """A change by one handle wakes who waits on another."""

    trusts_notifications = True

    def __init__(self, model: Model | None = None, *, clock: Clock | None = None) -> None:
        super().__init__(model, clock=clock)
        self.notifications = Notifications()


class MissedWakeUp(HandleBug):
    """A wake-up that came between two waits is not lost."""

    async def wait(
        self, queues: Sequence[str], *, now: Micros, timeout: float, seen: str | None = None
    ) -> Woken:
        if seen is not None:
            seen = (await super().wait(queues, now=now, timeout=0)).seen
        return await super().wait(queues, now=now, timeout=timeout, seen=seen)


class LeaseForYears(HandleBug):
    """A lease lasts a day at most."""

    async def reserve(
        self,
        queue: str,
        *,
        limit: int,
        lease_for: Micros,
        now: Micros,
        worker: str,
        types: Sequence[str] | None = None,
    ) -> list[JobRecord]:
        if lease_for > DAY:
            return await self.run(Reserve(queue, limit, lease_for, now, worker))
        return await super().reserve(
            queue, limit=limit, lease_for=lease_for, now=now, worker=worker, types=types
        )
