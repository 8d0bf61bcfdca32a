"""Bugs in accepting jobs, and in keyed jobs: one waiting and one inflight per key."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.operations import Enqueue
from taskharbor.jobs import DEFAULT_FLAGS, LARGEST_PAYLOAD, JobRecord, JobState, Micros, UpdateFlags
from taskharbor_testkit.model.records import change, flags_of
from taskharbor_testkit.planted.registry import Bug, HandleBug


class IdempotencyKeyChangesJob(Bug):
    """A known idempotency key is a lookup, never a change."""

    def known_for(self, given: JobRecord) -> str | None:
        known = super().known_for(given)
        if known is not None:
            self.jobs[known].payload = given.payload
        return known


class IdempotencyKeyForgottenAtEnd(Bug):
    """An idempotency key stays known as long as its job is kept, also after it ended."""

    def known_for(self, given: JobRecord) -> str | None:
        known = super().known_for(given)
        return None if known is None or self.jobs[known].state.is_terminal else known


class KnownIdStoredAgain(Bug):
    """A repeated enqueue of a known id changes nothing."""

    def enqueue_one(self, given: JobRecord, now: Micros) -> Enqueued:
        if given.id in self.jobs:
            self.jobs[given.id].payload = given.payload
        return super().enqueue_one(given, now)


class EnqueueNotAllOrNothing(HandleBug):
    """A batch is stored as a whole or not at all."""

    async def enqueue(
        self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False
    ) -> list[Enqueued]:
        answers: list[Enqueued] = []
        for record in records:
            answers += await super().enqueue([record], now=now, new_ids=new_ids)
        return answers


class EnqueueShuffled(Bug):
    """A batch is stored in the order it was given."""

    def enqueue(self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False) -> list[Enqueued]:
        return super().enqueue(records[::-1], now=now)[::-1]


class EnqueueKeepsCounters(Bug):
    """Counters of the given record are ignored."""

    def insert(self, given: JobRecord, now: Micros) -> None:
        super().insert(given, now)
        self.jobs[given.id].attempts = given.attempts


class TwoInflightPerKey(Bug):
    """Never two jobs of one key inflight."""

    def is_blocked(self, job: JobRecord) -> bool:
        return False


class BlockedForEver(Bug):
    """The end of a job makes the blocked one of its key runnable."""

    def unblock(self, blocked: JobRecord, now: Micros) -> None:
        pass


class UnblockedRunsAtOnce(Bug):
    """An unblocked job waits for its own run_at."""

    def unblock(self, blocked: JobRecord, now: Micros) -> None:
        blocked.run_at_us = min(blocked.run_at_us, now)
        super().unblock(blocked, now)


class MergeDropsFlags(Bug):
    """A blocked job is merged by the flags it came with."""

    def absorb(self, survivor: JobRecord, blocked: JobRecord) -> None:
        change(survivor, blocked, DEFAULT_FLAGS)
        blocked.merged_into = survivor.id


class MergeLosesId(Bug):
    """A merged job's own id reads as merged into the survivor."""

    def absorb(self, survivor: JobRecord, blocked: JobRecord) -> None:
        super().absorb(survivor, blocked)
        blocked.merged_into = None


class MergeOverwrittenByRetry(Bug):
    """The blocked job's changes come after the survivor's own, so they win."""

    def absorb(self, survivor: JobRecord, blocked: JobRecord) -> None:
        run_at, attempts = survivor.run_at_us, survivor.attempts
        super().absorb(survivor, blocked)
        survivor.run_at_us, survivor.attempts = run_at, attempts


class BlockedForgetsEarlierFlags(Bug):
    """A blocked job gathers the flags of every enqueue onto it."""

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        super().update_waiting(waiting, given, flags, now)
        if waiting.state is JobState.BLOCKED:
            waiting.update = flags


class UpdateIgnoresFlags(Bug):
    """An enqueue onto a waiting job changes what its flags say, and nothing else."""

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        super().update_waiting(waiting, given, DEFAULT_FLAGS, now)


class UpdateIgnoresPriorityFlag(Bug):
    """An enqueue onto a waiting job changes its priority where its flags say so."""

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        super().update_waiting(waiting, given, replace(flags, priority=False), now)


class UpdateAlwaysChangesPriority(Bug):
    """An enqueue onto a waiting job leaves its priority where its flags do not name it."""

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        super().update_waiting(waiting, given, flags, now)
        waiting.priority = given.priority


class UpdateOfPriorityLosesThePlace(Bug):
    """A job whose priority changes keeps its place of insertion."""

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        super().update_waiting(waiting, given, flags, now)
        if flags.priority:
            self.jobs[waiting.id] = self.jobs.pop(waiting.id)


class BlockedForgetsPriorityFlag(Bug):
    """A blocked job gathers the flag of the priority too."""

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        kept = flags_of(waiting).priority
        super().update_waiting(waiting, given, flags, now)
        if waiting.state is JobState.BLOCKED and waiting.update is not None:
            waiting.update = replace(waiting.update, priority=kept)


class MergeKeepsPriority(Bug):
    """A merge changes the priority where the blocked job's flags say so."""

    def absorb(self, survivor: JobRecord, blocked: JobRecord) -> None:
        priority = survivor.priority
        super().absorb(survivor, blocked)
        survivor.priority = priority


class KeysSharedBetweenQueues(Bug):
    """A key means something within its queue only."""

    def shares_keys(self, job: JobRecord, other: JobRecord) -> bool:
        return True


class AnyPayload(HandleBug):
    """A payload has a largest size, whatever a client allows."""

    async def enqueue(
        self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False
    ) -> list[Enqueued]:
        if any(
            isinstance(record.payload, bytes) and len(record.payload) > LARGEST_PAYLOAD for record in records
        ):
            return await self.run(Enqueue(list(records), now))
        return await super().enqueue(records, now=now, new_ids=new_ids)
