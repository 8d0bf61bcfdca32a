"""The life of a job in the reference model: accepted, claimed, held, and ended or put back. One method per rule.

Values that a driver makes up (tokens, ids of failure jobs) come in through `token_for` and `failure_id_for`; everything
else follows from the arguments.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Self

from taskharbor import errors
from taskharbor.drivers import contract
from taskharbor.drivers.contract import Enqueued, Extension, QueueSettings, Settlement
from taskharbor.drivers.waiting import Notifications
from taskharbor.errors import JobError
from taskharbor.jobs import Attempt, Failure, JobRecord, JobState, Lease, Micros, Outcome, UpdateFlags
from taskharbor.requests import new_id, new_token
from taskharbor_testkit.model.records import SUCCEEDS_AGAIN, change, clear_lease, flags_of, own_copy


class Store:
    """The contents of a correct store, and the calls of producers and workers."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        """In the order of acceptance, which is also what "insertion" means in the claim order."""
        self.places: dict[str, int] = {}
        """Number of each job in the order of acceptance: the cursor of a listing."""
        self.keyed: dict[str, set[str]] = {}
        """The ids of each key, in whatever queue: a look at all jobs for each job of a large batch would take too long."""
        self.log: list[Attempt] = []
        self.configured: dict[str, QueueSettings] = {}
        self.queues: set[str] = set()
        self.totals: dict[tuple[str, JobState], int] = {}
        self.idempotency: dict[tuple[str, str], str] = {}
        self.latest_end: dict[str, Micros] = {}
        """Per queue, the latest end of a lease. A lease granted afterwards begins no earlier."""
        self.absorbed: set[int] = set()
        """Rows (by seq) of jobs that went back to waiting and absorbed another in the same step."""
        self.next_seq = 1
        self.next_place = 1
        self.passed_over: frozenset[str] = frozenset()
        """Jobs that a `reserve` did not claim because a call that raced with it was changing them."""
        self.left_expired: frozenset[str] = frozenset()
        """Jobs whose lease it did not end for that reason."""
        self.token_for: Callable[[JobRecord], str] = lambda job: new_token()
        self.failure_id_for: Callable[[JobRecord, str], str] = lambda dead, queue: new_id()
        self.lock = threading.RLock()
        self.versions: dict[str, int] = {}
        """Per queue, how often something may have become runnable in it."""
        self.notifications = Notifications()
        self.blobs: dict[str, bytes] = {}
        self.published: dict[str, tuple[tuple[int, int], int]] = {}
        """Per series: the last portion (number of the write, number of the portion), and the jobs its write has added."""

    def copy(self) -> Self:
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (dict, list, set)):
                setattr(twin, name, copy.copy(value))
        twin.jobs = {job_id: copy.copy(job) for job_id, job in self.jobs.items()}
        twin.keyed = {key: set(ids) for key, ids in self.keyed.items()}
        return twin

    # -- producing ----------------------------------------------------------------------------------------

    def enqueue(self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False) -> list[Enqueued]:
        self.promote(now)
        return [self.enqueue_one(record, now) for record in records]

    def enqueue_one(self, given: JobRecord, now: Micros) -> Enqueued:
        if given.id in self.jobs:
            return Enqueued(given.id, existed=True)
        known = self.known_for(given)
        if known is not None:
            return Enqueued(known, existed=True)
        waiting = self.of_key(given, lambda state: state.is_waiting)
        if waiting is not None:
            self.update_waiting(waiting, given, flags_of(given), now)
        else:
            self.insert(given, now)
        job_id = given.id if waiting is None else waiting.id
        if given.idempotency_key is not None:
            self.idempotency[given.queue, given.idempotency_key] = job_id
        return Enqueued(job_id, existed=waiting is not None)

    def known_for(self, given: JobRecord) -> str | None:
        """The job that the record's idempotency key led to before."""
        return self.idempotency.get((given.queue, given.idempotency_key or ""))

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        change(waiting, given, flags)
        if waiting.state is JobState.BLOCKED:
            waiting.update = contract.gather_flags(flags_of(waiting), flags)
        else:
            self.line_up(waiting, now)

    def insert(self, given: JobRecord, now: Micros) -> None:
        job = own_copy(given)
        job.attempts = job.stalls = job.fence = 0
        clear_lease(job)
        self.jobs[job.id] = job
        if job.key is not None:
            self.keyed.setdefault(job.key, set()).add(job.id)
        self.places[job.id] = self.next_place
        self.next_place += 1
        self.queues.add(job.queue)
        if self.is_blocked(job):
            job.state = JobState.BLOCKED
            job.update = flags_of(given)
        else:
            self.line_up(job, now)

    # -- claiming and holding -----------------------------------------------------------------------------

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
        self.reclaim_for_reserve(queue, now)
        room = max(0, min(limit, self.room(queue, now)))
        chosen = [job for job in self.candidates(queue, types, now) if job.id not in self.passed_over][:room]
        for job in chosen:
            self.grant(job, worker, self.lease_start(queue, now), lease_for)
        return [own_copy(job) for job in chosen]

    def reclaim_for_reserve(self, queue: str, now: Micros) -> None:
        due = [job_id for job_id in self.expired(now, queue) if job_id not in self.left_expired]
        self.reclaim_jobs(due, now=now)

    def room(self, queue: str, now: Micros) -> int:
        """Return the number of further leases that the queue's settings allow."""
        limit = self.settings(queue).max_inflight
        if self.is_paused(queue):
            return 0
        if limit is None:
            return sys.maxsize
        # A lease that is over and was not ended, because another call was changing it, may have been extended meanwhile.
        doubtful = [job_id for job_id in self.expired(now, queue) if job_id in self.left_expired]
        return limit - len(self.leased(queue, now)) - len(doubtful)

    def is_paused(self, queue: str) -> bool:
        return self.settings(queue).paused

    def leased(self, queue: str, now: Micros) -> list[JobRecord]:
        return [job for job in self.jobs.values() if job.queue == queue and (job.expires_at_us or now) > now]

    def candidates(self, queue: str, types: Sequence[str] | None, now: Micros) -> list[JobRecord]:
        return [job for job in self.runnable(queue, now) if types is None or job.type in types]

    def runnable(self, queue: str, now: Micros) -> list[JobRecord]:
        """Every job that could be claimed, in claim order. `sorted` is stable: ties stay in order of insertion."""
        self.promote(now)
        ready = [job for job in self.jobs.values() if job.queue == queue and job.state is JobState.READY]
        return sorted(ready, key=lambda job: (-job.priority, job.run_at_us))

    def lease_start(self, queue: str, now: Micros) -> Micros:
        return max(now, self.latest_end.get(queue, now))

    def grant(self, job: JobRecord, worker: str, start: Micros, lease_for: Micros) -> None:
        job.state = JobState.INFLIGHT
        job.fence += 1
        job.token = self.token_for(job)
        job.worker = worker
        job.reserved_at_us = start
        job.expires_at_us = start + lease_for

    def extend_lease(
        self, extensions: Sequence[Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        return [
            self.refuse(one.job_id, one.token, now)
            or self.extend(self.jobs[one.job_id], now + lease_for, one.progress)
            for one in extensions
        ]

    def extend(self, job: JobRecord, expires_at: Micros, progress: bytes | None) -> Lease:
        job.expires_at_us = self.held_until(job, expires_at)
        job.token = self.token_for(job)
        if progress is not None:
            job.progress = progress
        return Lease(job.id, job.token, job.expires_at_us, job.cancel_requested)

    def held_until(self, job: JobRecord, expires_at: Micros) -> Micros:
        return max(job.expires_at_us or 0, expires_at)

    def refuse(self, job_id: str, token: str, now: Micros) -> JobError | None:
        job = self.jobs.get(job_id)
        if job is None:
            return errors.JobNotFound(job_id)
        if job.state is not JobState.INFLIGHT or job.expires_at_us is None:
            return errors.JobNotInflight(job_id)
        if job.token != token:
            return errors.LeaseMismatch(job_id)
        return errors.LeaseExpired(job_id) if job.expires_at_us <= now else None

    # -- ending leases ------------------------------------------------------------------------------------

    def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        self.promote(now)
        return [self.settle_one(settlement, now) for settlement in settlements]

    def settle_one(self, settlement: Settlement, now: Micros) -> JobError | None:
        job = self.jobs.get(settlement.job_id)
        if job is not None and self.is_repeated(settlement, job):
            return None
        refused = self.refuse(settlement.job_id, settlement.token, now)
        if refused is not None or job is None:
            return refused
        held = copy.copy(job)
        job.progress = None
        clear_lease(job)
        match settlement:
            case contract.Ack():
                self.ack(job, held, settlement, now)
            case contract.Fail(attempts=attempts, error=error):
                self.record_failure(job, attempts, error, now)
                self.end(job, held, JobState.DEAD, Outcome.DEAD, now, error)
            case contract.Discard(reason=reason):
                job.last_error = job.last_error if reason is None else reason.text
                self.end(job, held, JobState.CANCELLED, Outcome.CANCELLED, now, reason)
            case contract.RetryAt():
                self.retry(job, held, settlement, now)
            case contract.Release():
                self.release(job, held, settlement, now)
        return None

    def is_repeated(self, settlement: Settlement, job: JobRecord) -> bool:
        return job.state in SUCCEEDS_AGAIN.get(type(settlement), ())

    def ack(self, job: JobRecord, held: JobRecord, ack: contract.Ack, now: Micros) -> None:
        job.result = ack.result
        self.end(job, held, JobState.DONE, Outcome.DONE, now)

    def retry(self, job: JobRecord, held: JobRecord, retry: contract.RetryAt, now: Micros) -> None:
        self.record_failure(job, retry.attempts, retry.error, now)
        if held.cancel_requested:
            self.end(job, held, JobState.CANCELLED, Outcome.CANCELLED, now, retry.error)
        else:
            job.run_at_us = retry.run_at_us
            self.back_to_waiting(job, held, Outcome.RETRIED, now, retry.error)

    def release(self, job: JobRecord, held: JobRecord, release: contract.Release, now: Micros) -> None:
        if held.cancel_requested:
            self.end(job, held, JobState.CANCELLED, Outcome.CANCELLED, now)
        else:
            job.run_at_us = job.run_at_us if release.run_at_us is None else release.run_at_us
            self.back_to_waiting(job, held, Outcome.RELEASED, now)

    def record_failure(self, job: JobRecord, attempts: int, error: Failure, now: Micros) -> None:
        job.attempts = attempts
        job.last_error = error.text
        job.failed_at_us = now

    def reclaim(self, *, now: Micros, queue: str | None = None, limit: int = 1000) -> int:
        return self.reclaim_jobs(self.expired(now, queue)[:limit], now=now)

    def expired(self, now: Micros, queue: str | None = None) -> list[str]:
        return [
            job.id
            for job in self.jobs.values()
            if queue in (None, job.queue) and job.expires_at_us is not None and job.expires_at_us <= now
        ]

    def reclaim_jobs(self, job_ids: Sequence[str], *, now: Micros) -> int:
        """End these leases, all of them over. A driver may choose which ones a limited `reclaim` takes."""
        self.promote(now)
        for job_id in job_ids:
            self.expire(self.jobs[job_id], now)
        return len(job_ids)

    def expire(self, job: JobRecord, now: Micros) -> None:
        held = copy.copy(job)
        job.stalls += 1
        job.progress = None
        clear_lease(job)
        error = contract.EXPIRED_ERROR
        if held.cancel_requested:
            self.end(job, held, JobState.CANCELLED, Outcome.EXPIRED, now, error)
        elif self.is_spent(job):
            job.last_error = error.text
            self.end(job, held, JobState.DEAD, Outcome.EXPIRED, now, error)
        else:
            self.back_to_waiting(job, held, Outcome.EXPIRED, now, error)

    def is_spent(self, job: JobRecord) -> bool:
        if job.max_stalls:
            return job.attempts >= job.max_attempts or job.stalls >= job.max_stalls
        return job.attempts + job.stalls >= job.max_attempts

    def end(
        self,
        job: JobRecord,
        held: JobRecord,
        state: JobState,
        outcome: Outcome,
        now: Micros,
        error: Failure | None = None,
    ) -> None:
        job.state = state
        job.finished_at_us = self.ended_at(held, now)
        self.totals[job.queue, state] = self.totals.get((job.queue, state), 0) + 1
        self.append(job, held, outcome, now, error)
        if held.state is JobState.INFLIGHT:
            blocked = self.of_key(job, lambda other: other is JobState.BLOCKED)
            if blocked is not None:
                self.unblock(blocked, now)
            if self.settings(job.queue).max_inflight is not None:
                self.wake(job.queue)
        failure_queue = self.settings(job.queue).failure_queue
        if state is JobState.DEAD and failure_queue is not None:
            self.serve_failure_queue(job, failure_queue, now)

    def unblock(self, blocked: JobRecord, now: Micros) -> None:
        self.line_up(blocked, now)

    def serve_failure_queue(self, dead: JobRecord, queue: str, now: Micros) -> None:
        job_id = self.failure_id_for(dead, queue)
        self.enqueue_one(contract.failure_record(dead, job_id=job_id, queue=queue, now=now), now)

    def back_to_waiting(
        self, job: JobRecord, held: JobRecord, outcome: Outcome, now: Micros, error: Failure | None = None
    ) -> None:
        blocked = self.of_key(job, lambda state: state is JobState.BLOCKED)
        if blocked is not None:
            self.absorb(job, blocked)
            self.absorbed.add(self.next_seq)
        self.line_up(job, now)
        self.append(job, held, outcome, now, error)
        if blocked is not None:
            self.end(blocked, copy.copy(blocked), JobState.CANCELLED, Outcome.MERGED, now)

    def absorb(self, survivor: JobRecord, blocked: JobRecord) -> None:
        change(survivor, blocked, flags_of(blocked))
        blocked.merged_into = survivor.id

    def ended_at(self, held: JobRecord, now: Micros) -> Micros:
        """The end of a lease that ends now: never before its beginning, however early `now` was read."""
        return max(now, held.reserved_at_us or now)

    def append(
        self, job: JobRecord, held: JobRecord, outcome: Outcome, now: Micros, error: Failure | None = None
    ) -> None:
        """`held` is the job as it was under the lease: the row tells of that execution."""
        end = self.ended_at(held, now)
        if held.expires_at_us is not None:
            self.note_end(job.queue, min(end, held.expires_at_us))
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
                state=job.state,
                error_type=None if error is None else error.type,
                error_message=None if error is None else error.message,
                payload_size=len(held.payload),
            )
        )
        self.next_seq += 1

    def note_end(self, queue: str, end: Micros) -> None:
        self.latest_end[queue] = max(end, self.latest_end.get(queue, end))

    # -- the rules they share -----------------------------------------------------------------------------

    def promote(self, now: Micros) -> None:
        """Promote due jobs. Only the caller's clock decides: a job that is due by one clock may not be due by the next one."""
        for job in self.jobs.values():
            if job.state is JobState.SCHEDULED and job.run_at_us <= now:
                self.line_up(job, now)
            elif job.state is JobState.READY and job.run_at_us > now:
                job.state = JobState.SCHEDULED

    def line_up(self, job: JobRecord, now: Micros) -> None:
        """The job waits for its turn, and a worker may be waiting for the job."""
        job.state = JobState.SCHEDULED if job.run_at_us > now else JobState.READY
        self.wake(job.queue)

    def settings(self, queue: str) -> QueueSettings:
        return self.configured.get(queue, QueueSettings())

    def of_key(self, like: JobRecord, wanted: Callable[[JobState], bool]) -> JobRecord | None:
        if like.key is None:
            return None
        found = (job for job in self.jobs_of(like.key) if wanted(job.state))
        return next((job for job in found if self.shares_keys(job, like)), None)

    def jobs_of(self, key: str) -> list[JobRecord]:
        """The jobs of this key in any queue."""
        return [self.jobs[job_id] for job_id in self.keyed.get(key, ())]

    def shares_keys(self, job: JobRecord, other: JobRecord) -> bool:
        return job.queue == other.queue

    def is_blocked(self, job: JobRecord) -> bool:
        return self.of_key(job, lambda state: state is JobState.INFLIGHT) is not None

    def wake(self, queue: str) -> None:
        self.versions[queue] = self.versions.get(queue, 0) + 1
        self.notifications.notify((queue,))

    def next_due(self, queues: Sequence[str], since: Micros) -> Micros | None:
        """The instant after `since` at which a scheduled job or an expiring lease of these queues comes due."""
        jobs = [job for job in self.jobs.values() if job.queue in queues]
        waiting = [job.run_at_us for job in jobs if job.state in (JobState.SCHEDULED, JobState.READY)]
        instants = waiting + [job.expires_at_us for job in jobs if job.expires_at_us]
        return min((instant for instant in instants if instant > since), default=None)
