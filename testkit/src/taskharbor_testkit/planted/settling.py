"""Bugs in ending leases, and in the attempt log that every end writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from taskharbor.drivers.contract import EXPIRED_ERROR, Ack, AttemptPage, Fail, Release, RetryAt, Settlement
from taskharbor.drivers.operations import Settle
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import MAX_TRIES, Failure, JobRecord, Micros, Outcome
from taskharbor_testkit.planted.registry import Bug, HandleBug


class AckNotIdempotent(Bug):
    """An ack of a done job succeeds again."""

    def is_repeated(self, settlement: Settlement, job: JobRecord) -> bool:
        return not isinstance(settlement, Ack) and super().is_repeated(settlement, job)


class RepeatedAckReplacesResult(Bug):
    """An ack of a done job changes nothing."""

    def is_repeated(self, settlement: Settlement, job: JobRecord) -> bool:
        is_repeated = super().is_repeated(settlement, job)
        if is_repeated and isinstance(settlement, Ack):
            job.result = settlement.result
        return is_repeated


class RetryOfEndedAccepted(Bug):
    """A retry of a job that ended is JobNotInflight."""

    def is_repeated(self, settlement: Settlement, job: JobRecord) -> bool:
        is_late_retry = isinstance(settlement, RetryAt) and job.state.is_terminal
        return is_late_retry or super().is_repeated(settlement, job)


class FailOfUnknownSucceeds(Bug):
    """A settlement of an unknown job is refused."""

    def settle_one(self, settlement: Settlement, now: Micros) -> JobError | None:
        answer = super().settle_one(settlement, now)
        return None if isinstance(settlement, Fail) and isinstance(answer, JobNotFound) else answer


class OneErrorStopsTheBatch(Bug):
    """Each settlement of a batch is applied on its own, whatever became of the one before."""

    def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        answers: list[JobError | None] = []
        for settlement in settlements:
            failed = next((answer for answer in answers if answer is not None), None)
            answers += super().settle([settlement], now=now) if failed is None else [failed]
        return answers


class RetryLosesRunAt(Bug):
    """A retried job waits until the run_at it was given."""

    def retry(self, job: JobRecord, held: JobRecord, retry: RetryAt, now: Micros) -> None:
        super().retry(job, held, msgspec.structs.replace(retry, run_at_us=now), now)


class RetryIgnoresCancel(Bug):
    """A retry of a job with a cancel request cancels it."""

    def retry(self, job: JobRecord, held: JobRecord, retry: RetryAt, now: Micros) -> None:
        held.cancel_requested = False
        super().retry(job, held, retry, now)


class ReleaseCountsAnAttempt(Bug):
    """A released job goes back unspent."""

    def release(self, job: JobRecord, held: JobRecord, release: Release, now: Micros) -> None:
        job.attempts += 1
        super().release(job, held, release, now)


class AckLosesResult(Bug):
    """A result is kept as long as the job is."""

    def ack(self, job: JobRecord, held: JobRecord, ack: Ack, now: Micros) -> None:
        super().ack(job, held, msgspec.structs.replace(ack, result=None), now)


class ProgressOutlivesLease(Bug):
    """The end of a lease clears the progress of that execution."""

    def release(self, job: JobRecord, held: JobRecord, release: Release, now: Micros) -> None:
        super().release(job, held, release, now)
        job.progress = held.progress


class FailureQueueMissesStalls(Bug):
    """A job that dies by a stall goes to the failure queue, too."""

    def serve_failure_queue(self, dead: JobRecord, queue: str, now: Micros) -> None:
        if dead.last_error != EXPIRED_ERROR.text:
            super().serve_failure_queue(dead, queue, now)


class FailureQueueMissesFailures(Bug):
    """A job that fails for good goes to the failure queue."""

    def serve_failure_queue(self, dead: JobRecord, queue: str, now: Micros) -> None:
        if dead.last_error == EXPIRED_ERROR.text:
            super().serve_failure_queue(dead, queue, now)


class FailureQueueLosesKey(Bug):
    """The job of a failure queue has the key of the dead job."""

    def serve_failure_queue(self, dead: JobRecord, queue: str, now: Micros) -> None:
        super().serve_failure_queue(msgspec.structs.replace(dead, key=None), queue, now)


class _LogsOutcome(Bug):
    """Writes the rows of one outcome another number of times than once."""

    outcome: ClassVar[Outcome]
    times: ClassVar[int] = 0

    def append(
        self, job: JobRecord, held: JobRecord, outcome: Outcome, now: Micros, error: Failure | None = None
    ) -> None:
        super().append(job, held, outcome, now, error)
        if outcome is self.outcome:
            row = self.log.pop()
            self.log += [msgspec.structs.replace(row, seq=row.seq + n) for n in range(self.times)]
            self.next_seq += self.times


class ReleaseNotLogged(_LogsOutcome):
    """Every lease that ends leaves a row, a released one too."""

    outcome = Outcome.RELEASED


class MergeNotLogged(_LogsOutcome):
    """A merged job leaves a row."""

    outcome = Outcome.MERGED


class RetryLoggedTwice(_LogsOutcome):
    """Every lease that ends leaves one row, not two."""

    outcome = Outcome.RETRIED
    times = 2


class LogCursorSkipsARow(Bug):
    """A reader that resumes from its cursor sees every row."""

    def read_attempts(self, *, after: str | None = None, limit: int = 1000) -> AttemptPage:
        page = super().read_attempts(after=after, limit=limit)
        is_full = len(page.attempts) == limit
        return AttemptPage(page.attempts, str(int(page.cursor) + is_full))


class FailuresUncounted(HandleBug):
    """The number of failures in a settlement has the bound of max_attempts."""

    async def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        if any(isinstance(one, (RetryAt, Fail)) and one.attempts > MAX_TRIES for one in settlements):
            return await self.run(Settle(list(settlements), now))
        return await super().settle(settlements, now=now)
