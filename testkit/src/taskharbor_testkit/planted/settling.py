"""Bugs in ending leases."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from taskharbor.drivers.contract import EXPIRED_ERROR, Ack, Fail, Release, Retry, Settlement
from taskharbor.drivers.memory import MemoryStore
from taskharbor.drivers.memory.queues import Slot
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import JobState, Micros
from taskharbor_testkit.planted.registry import planted


@planted
class AckNotIdempotent(MemoryStore):
    """An ack of a done job succeeds again."""

    def _is_repeated(self, settlement: Settlement, state: JobState) -> bool:
        return not isinstance(settlement, Ack) and super()._is_repeated(settlement, state)


@planted
class RepeatedAckReplacesResult(MemoryStore):
    """An ack of a done job changes nothing."""

    def _is_repeated(self, settlement: Settlement, state: JobState) -> bool:
        is_repeated = super()._is_repeated(settlement, state)
        if is_repeated and isinstance(settlement, Ack):
            self.jobs[settlement.job_id].record.result = settlement.result
        return is_repeated


@planted
class RetryOfEndedAccepted(MemoryStore):
    """A retry of a job that ended is JobNotInflight."""

    def _is_repeated(self, settlement: Settlement, state: JobState) -> bool:
        return (isinstance(settlement, Retry) and state.is_terminal) or super()._is_repeated(
            settlement, state
        )


@planted
class FailOfUnknownSucceeds(MemoryStore):
    """Whoever settles an unknown job is told so."""

    def settle(self, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
        answers = super().settle(settlements, now)
        return [
            None if isinstance(settlement, Fail) and isinstance(answer, JobNotFound) else answer
            for settlement, answer in zip(settlements, answers, strict=True)
        ]


@planted
class OneErrorStopsTheBatch(MemoryStore):
    """Each settlement of a batch is applied on its own, whatever became of the one before."""

    def settle(self, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
        answers: list[JobError | None] = []
        for settlement in settlements:
            failed = next((answer for answer in answers if answer is not None), None)
            answers += super().settle([settlement], now) if failed is None else [failed]
        return answers


@planted
class RetryLosesRunAt(MemoryStore):
    """A retried job waits until the run_at it was given."""

    def _retry(self, slot: Slot, retry: Retry, now: Micros) -> None:
        super()._retry(slot, msgspec.structs.replace(retry, run_at_us=now), now)


@planted
class RetryIgnoresCancel(MemoryStore):
    """A retry of a job with a cancel request cancels it."""

    def _retry(self, slot: Slot, retry: Retry, now: Micros) -> None:
        slot.record.cancel_requested = False
        super()._retry(slot, retry, now)


@planted
class ReleaseCountsAnAttempt(MemoryStore):
    """A released job goes back unspent."""

    def _release(self, slot: Slot, release: Release, now: Micros) -> None:
        slot.record.attempts += 1
        super()._release(slot, release, now)


@planted
class AckLosesResult(MemoryStore):
    """A result is kept as long as the job is."""

    def _ack(self, slot: Slot, ack: Ack, now: Micros) -> None:
        super()._ack(slot, msgspec.structs.replace(ack, result=None), now)


@planted
class ProgressOutlivesLease(MemoryStore):
    """The end of a lease clears the progress of that execution."""

    def _release(self, slot: Slot, release: Release, now: Micros) -> None:
        progress = slot.record.progress
        super()._release(slot, release, now)
        slot.record.progress = progress


@planted
class FailureQueueMissesStalls(MemoryStore):
    """A job that dies by a stall goes to the failure queue, too."""

    def _serve_failure_queue(self, dead: Slot, now: Micros) -> None:
        if dead.record.last_error != EXPIRED_ERROR.text:
            super()._serve_failure_queue(dead, now)


@planted
class FailureQueueMissesFailures(MemoryStore):
    """A job that fails for good goes to the failure queue."""

    def _serve_failure_queue(self, dead: Slot, now: Micros) -> None:
        if dead.record.last_error == EXPIRED_ERROR.text:
            super()._serve_failure_queue(dead, now)
