"""The reference model: the driver contract in plain dicts and lists, slow and meant to be read.

It is written from the contract alone and shares no code with any driver, so an agreement between the two means
something. What a driver makes up (tokens, ids of failure jobs) comes in through `token_for` and
`failure_id_for`; everything else follows from the arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import msgspec

from taskharbor import errors
from taskharbor.drivers import contract
from taskharbor.drivers.contract import Enqueued, JobFilter, QueueSettings, QueueStats
from taskharbor.errors import JobError
from taskharbor.ids import new_id, new_token
from taskharbor.jobs import (
    DEFAULT_FLAGS,
    Attempt,
    Failure,
    JobRecord,
    JobState,
    Lease,
    Micros,
    Outcome,
)
from taskharbor_testkit.conformance.rules import (
    change,
    clear_lease,
    ended_at,
    matches,
    record_failure,
    wait_by_run_at,
)

TOTALS = (JobState.DONE, JobState.DEAD, JobState.CANCELLED)

_ENDS_AGREED: dict[type, tuple[JobState, ...]] = {
    contract.Ack: (JobState.DONE,),
    contract.Fail: (JobState.DONE, JobState.DEAD),
    contract.Discard: (JobState.CANCELLED,),
}


class Model:
    """What a correct store holds, and what each call would answer."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        """In the order of acceptance, which is also what "insertion" means in the claim order."""
        self.log: list[Attempt] = []
        self.configured: dict[str, QueueSettings] = {}
        self.queues: set[str] = set()
        self.totals: dict[tuple[str, JobState], int] = {}
        self.idempotency: dict[tuple[str, str], str] = {}
        self.latest_end: dict[str, Micros] = {}
        """Per queue, the latest end of a lease: what is leased afterwards begins no earlier."""
        self.absorbed: set[int] = set()
        """Rows (by seq) of jobs that went back to waiting and absorbed another in the same step."""
        self.next_seq = 1
        self.passed_over: frozenset[str] = frozenset()
        """Jobs that a `reserve` did not claim because a call that raced with it was changing them."""
        self.left_expired: frozenset[str] = frozenset()
        """And those whose lease it did not end for that reason."""
        self.token_for: Callable[[JobRecord], str] = lambda job: new_token()
        self.failure_id_for: Callable[[JobRecord, str], str] = lambda dead, queue: new_id()

    def copy(self) -> Self:
        twin = copy.copy(self)
        twin.jobs = {job_id: copy.copy(job) for job_id, job in self.jobs.items()}
        twin.log = list(self.log)
        twin.configured = dict(self.configured)
        twin.queues = set(self.queues)
        twin.totals = dict(self.totals)
        twin.idempotency = dict(self.idempotency)
        twin.latest_end = dict(self.latest_end)
        twin.absorbed = set(self.absorbed)
        return twin

    # -- producing ----------------------------------------------------------------------------------------

    def enqueue(self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False) -> list[Enqueued]:
        self._promote(now)
        return [self._enqueue_one(record, now) for record in records]

    def _enqueue_one(self, given: JobRecord, now: Micros) -> Enqueued:
        if given.id in self.jobs:
            return Enqueued(given.id, existed=True)
        known = given.idempotency_key and self.idempotency.get((given.queue, given.idempotency_key))
        if known:
            return Enqueued(known, existed=True)
        flags = given.update or DEFAULT_FLAGS
        waiting = self._of_key(given, lambda state: state.is_waiting)
        if waiting is not None:
            change(waiting, given, flags)
            if waiting.state is JobState.BLOCKED:
                waiting.update = contract.gather_flags(waiting.update or DEFAULT_FLAGS, flags)
            else:
                wait_by_run_at(waiting, now)
            self._remember_idempotency(given, waiting.id)
            return Enqueued(waiting.id, existed=True)
        job = msgspec.structs.replace(
            given,
            attempts=0,
            stalls=0,
            fence=0,
            token=None,
            worker=None,
            expires_at_us=None,
            reserved_at_us=None,
        )
        if self._of_key(given, lambda state: state is JobState.INFLIGHT) is not None:
            job.state = JobState.BLOCKED
            job.update = flags
        else:
            wait_by_run_at(job, now)
        self.jobs[job.id] = job
        self.queues.add(job.queue)
        self._remember_idempotency(given, job.id)
        return Enqueued(job.id)

    def _remember_idempotency(self, given: JobRecord, job_id: str) -> None:
        if given.idempotency_key is not None:
            self.idempotency[given.queue, given.idempotency_key] = job_id

    # -- working ------------------------------------------------------------------------------------------

    def runnable(self, queue: str, now: Micros) -> list[JobRecord]:
        """What could be claimed, in claim order. `sorted` is stable, so ties stand in order of insertion."""
        self._promote(now)
        ready = [job for job in self.jobs.values() if job.queue == queue and job.state is JobState.READY]
        return sorted(ready, key=lambda job: (-job.priority, job.run_at_us))

    def reserve(
        self,
        queue: str,
        *,
        limit: int,
        lease_for: Micros,
        now: Micros,
        worker: str,
        types: Sequence[str] | None = None,
    ) -> list[JobRecord]:
        over = [job_id for job_id in self.expired(now, queue) if job_id not in self.left_expired]
        self.reclaim_jobs(over, now=now)
        settings = self.settings(queue)
        if settings.paused:
            return []
        room = limit
        if settings.max_inflight is not None:
            # A lease that is over and was not ended, because somebody was at it, may yet turn out to have been extended.
            doubtful = [job_id for job_id in self.expired(now, queue) if job_id in self.left_expired]
            room = min(room, settings.max_inflight - len(self.leased(queue, now)) - len(doubtful))
        candidates = [
            job
            for job in self.runnable(queue, now)
            if (types is None or job.type in types) and job.id not in self.passed_over
        ]
        chosen = candidates[: max(room, 0)]
        for job in chosen:
            job.state = JobState.INFLIGHT
            job.fence += 1
            job.token = self.token_for(job)
            job.worker = worker
            job.reserved_at_us = max(now, self.latest_end.get(queue, now))
            job.expires_at_us = job.reserved_at_us + lease_for
        return [copy.copy(job) for job in chosen]

    def leased(self, queue: str, now: Micros) -> list[JobRecord]:
        return [
            job
            for job in self.jobs.values()
            if job.queue == queue and job.expires_at_us is not None and job.expires_at_us > now
        ]

    def extend_lease(
        self, extensions: Sequence[contract.Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        return [self._extend_one(extension, lease_for, now) for extension in extensions]

    def _extend_one(self, extension: contract.Extension, lease_for: Micros, now: Micros) -> Lease | JobError:
        refused = self._refuse(extension.job_id, extension.token, now)
        if refused is not None:
            return refused
        job = self.jobs[extension.job_id]
        assert job.expires_at_us is not None
        job.expires_at_us = max(job.expires_at_us, now + lease_for)
        job.token = self.token_for(job)
        if extension.progress is not None:
            job.progress = extension.progress
        return Lease(job.id, job.token, job.expires_at_us, job.cancel_requested)

    def settle(self, settlements: Sequence[contract.Settlement], *, now: Micros) -> list[JobError | None]:
        self._promote(now)
        return [self._settle_one(settlement, now) for settlement in settlements]

    def _settle_one(self, settlement: contract.Settlement, now: Micros) -> JobError | None:
        job = self.jobs.get(settlement.job_id)
        if job is not None and job.state in _ENDS_AGREED.get(type(settlement), ()):
            return None
        refused = self._refuse(settlement.job_id, settlement.token, now)
        if refused is not None:
            return refused
        assert job is not None
        held = copy.copy(job)
        job.progress = None
        clear_lease(job)
        match settlement:
            case contract.Ack(result=result):
                job.result = result
                self._end(job, held, JobState.DONE, Outcome.DONE, now)
            case contract.Fail(attempts=attempts, error=error):
                job.attempts = attempts
                record_failure(job, error, now)
                self._end(job, held, JobState.DEAD, Outcome.DEAD, now, error)
            case contract.Discard(reason=reason):
                if reason is not None:
                    job.last_error = reason.text
                self._end(job, held, JobState.CANCELLED, Outcome.CANCELLED, now, reason)
            case contract.Retry(run_at_us=run_at, attempts=attempts, error=error):
                job.attempts = attempts
                record_failure(job, error, now)
                if held.cancel_requested:
                    self._end(job, held, JobState.CANCELLED, Outcome.CANCELLED, now, error)
                else:
                    job.run_at_us = run_at
                    self._back_to_waiting(job, held, Outcome.RETRIED, now, error)
            case contract.Release(run_at_us=run_at_or_none):
                if held.cancel_requested:
                    self._end(job, held, JobState.CANCELLED, Outcome.CANCELLED, now)
                else:
                    if run_at_or_none is not None:
                        job.run_at_us = run_at_or_none
                    self._back_to_waiting(job, held, Outcome.RELEASED, now)
        return None

    def expired(self, now: Micros, queue: str | None = None) -> list[str]:
        return [
            job.id
            for job in self.jobs.values()
            if (queue is None or job.queue == queue)
            and job.expires_at_us is not None
            and job.expires_at_us <= now
        ]

    def reclaim_jobs(self, job_ids: Iterable[str], *, now: Micros) -> None:
        """End these leases, all of them over. Which ones a limited `reclaim` takes is the driver's choice."""
        self._promote(now)
        for job_id in job_ids:
            job = self.jobs[job_id]
            held = copy.copy(job)
            job.stalls += 1
            job.progress = None
            clear_lease(job)
            error = contract.EXPIRED_ERROR
            if held.cancel_requested:
                self._end(job, held, JobState.CANCELLED, Outcome.EXPIRED, now, error)
            elif job.attempts + job.stalls >= job.max_attempts or 0 < job.max_stalls <= job.stalls:
                job.last_error = error.text
                self._end(job, held, JobState.DEAD, Outcome.EXPIRED, now, error)
            else:
                self._back_to_waiting(job, held, Outcome.EXPIRED, now, error)

    # -- operating ----------------------------------------------------------------------------------------

    def cancel(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        self._promote(now)
        return [self._cancel_one(job_id, now) for job_id in job_ids]

    def _cancel_one(self, job_id: str, now: Micros) -> JobState | JobError:
        job = self.jobs.get(job_id)
        if job is None:
            return errors.JobNotFound(job_id)
        if job.state.is_waiting:
            self._end(job, copy.copy(job), JobState.CANCELLED, Outcome.CANCELLED, now)
        elif job.state is JobState.INFLIGHT:
            job.cancel_requested = True
        elif job.state is not JobState.CANCELLED:
            return errors.JobFinished(job_id)
        return job.state

    def requeue(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        self._promote(now)
        return [self._requeue_one(job_id, now) for job_id in job_ids]

    def _requeue_one(self, job_id: str, now: Micros) -> JobState | JobError:
        job = self.jobs.get(job_id)
        if job is None:
            return errors.JobNotFound(job_id)
        if job.state is not JobState.DEAD:
            return errors.JobNotDead(job_id)
        if self._of_key(job, lambda state: state.is_waiting) is not None:
            return errors.KeyConflict(job_id)
        blocked = self._of_key(job, lambda state: state is JobState.INFLIGHT) is not None
        job.state = JobState.BLOCKED if blocked else JobState.READY
        job.run_at_us = now
        job.attempts = job.stalls = 0
        job.finished_at_us = None
        self._append(job, job, job.state, Outcome.REQUEUED, now)
        return job.state

    def forget(self, job_ids: Iterable[str]) -> None:
        """Retention or a purge removed these; their idempotency keys go with them."""
        for job_id in job_ids:
            del self.jobs[job_id]
        self.idempotency = {key: job_id for key, job_id in self.idempotency.items() if job_id in self.jobs}

    def terminal(self, selection: JobFilter) -> list[str]:
        return [job.id for job in self.jobs.values() if job.state.is_terminal and matches(job, selection)]

    def get(self, job_ids: Sequence[str], *, now: Micros) -> list[JobRecord | None]:
        self._promote(now)
        return [copy.copy(self.jobs[job_id]) if job_id in self.jobs else None for job_id in job_ids]

    def listing(self, selection: JobFilter, *, now: Micros) -> list[JobRecord]:
        self._promote(now)
        return [copy.copy(job) for job in reversed(self.jobs.values()) if matches(job, selection)]

    def stats(self, *, now: Micros, queue: str | None = None) -> list[QueueStats]:
        self._promote(now)
        names = sorted(self.queues | set(self.configured)) if queue is None else [queue]
        return [self._stats_one(name, now) for name in names]

    def _stats_one(self, queue: str, now: Micros) -> QueueStats:
        states = [job.state for job in self.jobs.values() if job.queue == queue]
        runnable = self.runnable(queue, now)
        done, dead, cancelled = (self.totals.get((queue, state), 0) for state in TOTALS)
        return QueueStats(
            queue=queue,
            counts={state: states.count(state) for state in JobState},
            done_total=done,
            dead_total=dead,
            cancelled_total=cancelled,
            head_run_at_us=runnable[0].run_at_us if runnable else None,
            settings=self.settings(queue),
        )

    def configure(self, queue: str, settings: QueueSettings, *, now: Micros) -> None:
        self.configured[queue] = settings

    def settings(self, queue: str) -> QueueSettings:
        return self.configured.get(queue, QueueSettings())

    # -- the rules they share -----------------------------------------------------------------------------

    def _promote(self, now: Micros) -> None:
        """By the caller's clock alone: what was due to one who is ahead may not be to the next one."""
        for job in self.jobs.values():
            if job.state in (JobState.SCHEDULED, JobState.READY):
                wait_by_run_at(job, now)

    def _of_key(self, like: JobRecord, wanted: Callable[[JobState], bool]) -> JobRecord | None:
        if like.key is None:
            return None
        for job in self.jobs.values():
            if (job.queue, job.key) == (like.queue, like.key) and wanted(job.state):
                return job
        return None

    def _refuse(self, job_id: str, token: str, now: Micros) -> JobError | None:
        job = self.jobs.get(job_id)
        if job is None:
            return errors.JobNotFound(job_id)
        if job.state is not JobState.INFLIGHT or job.expires_at_us is None:
            return errors.JobNotInflight(job_id)
        if job.token != token:
            return errors.LeaseMismatch(job_id)
        if job.expires_at_us <= now:
            return errors.LeaseExpired(job_id)
        return None

    def _end(
        self,
        job: JobRecord,
        held: JobRecord,
        state: JobState,
        outcome: Outcome,
        now: Micros,
        error: Failure | None = None,
    ) -> None:
        job.state = state
        job.finished_at_us = ended_at(held, now)
        self.totals[job.queue, state] = self.totals.get((job.queue, state), 0) + 1
        self._append(job, held, state, outcome, now, error)
        if held.state is JobState.INFLIGHT:
            blocked = self._of_key(job, lambda other: other is JobState.BLOCKED)
            if blocked is not None:
                wait_by_run_at(blocked, now)
        failure_queue = self.settings(job.queue).failure_queue
        if state is JobState.DEAD and failure_queue is not None:
            new = self.failure_id_for(job, failure_queue)
            self._enqueue_one(contract.failure_record(job, job_id=new, queue=failure_queue, now=now), now)

    def _back_to_waiting(
        self, job: JobRecord, held: JobRecord, outcome: Outcome, now: Micros, error: Failure | None = None
    ) -> None:
        blocked = self._of_key(job, lambda state: state is JobState.BLOCKED)
        if blocked is not None:
            change(job, blocked, blocked.update or DEFAULT_FLAGS)
            self.absorbed.add(self.next_seq)
        wait_by_run_at(job, now)
        self._append(job, held, job.state, outcome, now, error)
        if blocked is not None:
            blocked.merged_into = job.id
            self._end(blocked, copy.copy(blocked), JobState.CANCELLED, Outcome.MERGED, now)

    def _append(
        self,
        job: JobRecord,
        held: JobRecord,
        state: JobState,
        outcome: Outcome,
        now: Micros,
        error: Failure | None = None,
    ) -> None:
        """`held` is the job as it was while the lease was held: that execution is what the row tells of."""
        end = ended_at(held, now)
        if held.reserved_at_us is not None:
            assert held.expires_at_us is not None
            over = min(end, held.expires_at_us)
            self.latest_end[job.queue] = max(over, self.latest_end.get(job.queue, over))
        self.log.append(
            Attempt(
                seq=self.next_seq,
                job_id=job.id,
                queue=job.queue,
                type=held.type,
                key=job.key,
                priority=held.priority,
                fence=job.fence,
                worker=held.worker,
                created_at_us=job.created_at_us,
                run_at_us=held.run_at_us,
                reserved_at_us=held.reserved_at_us,
                lease_expires_at_us=held.expires_at_us,
                ended_at_us=end,
                outcome=outcome,
                state=state,
                error_type=None if error is None else error.type,
                error_message=None if error is None else error.message,
                payload_size=len(held.payload),
            )
        )
        self.next_seq += 1
