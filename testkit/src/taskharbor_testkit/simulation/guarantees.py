"""The guarantees of the model (section 5), by name: each judges a finished run and tells every violation.

They are positive statements about the whole system, in the model's words. They know the ledger and the attempt log,
and nothing of how workers or drivers work.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import isfunction
from itertools import pairwise

import msgspec

from taskharbor.drivers.contract import EXPIRED_ERROR, FAILURE_TYPE, FailurePayload
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros, Outcome
from taskharbor_testkit.simulation.actors import RETURNED
from taskharbor_testkit.simulation.backend import CLOCK_TOLERANCE
from taskharbor_testkit.simulation.ledger import GrantedLease, Ledger
from taskharbor_testkit.simulation.scheduler import Process

_WRITTEN_BY_RESULT = {Outcome.DONE, Outcome.RETRIED, Outcome.DEAD}
_WITHOUT_EXECUTION = {"PayloadInvalid", "HandlerMissing", EXPIRED_ERROR.type}


class Evidence(msgspec.Struct, kw_only=True):
    """The record of a finished run. Every public method is a guarantee and yields a message per violation."""

    ledger: Ledger
    jobs: Sequence[JobRecord]
    """Every job in the store at the end."""
    workers: Mapping[str, Process]
    is_drained: bool
    with_failure_queue: Collection[str]
    """Queues whose dead jobs are told to a failure queue."""
    patience_us: Micros
    """The time that a handler may go on after its lease: a heartbeat to notice, a moment to finish."""

    def nothing_lost(self) -> Iterator[str]:
        """An accepted job is never lost: after any crash it ends in exactly one terminal state."""
        for job in self.jobs:
            if not job.state.is_terminal:
                yield f"job {job.id} never ended: {job.state}, fence {job.fence}, held by {job.worker}"
            if job.id not in self.ledger.accepted and job.type != FAILURE_TYPE:
                yield f"job {job.id} was never accepted"
        stored = Counter(job.id for job in self.jobs)
        for job_id in stored | Counter(self.ledger.accepted.keys()):
            if stored[job_id] != 1:
                yield f"job {job_id} is in the store {stored[job_id]} times"
        if not self.is_drained:
            yield "the queues did not drain after everything was healed"

    def terminal_is_forever(self) -> Iterator[str]:
        """done, dead, cancelled are terminal; only an operator's requeue leads out of dead."""
        ends: dict[str, JobState] = {}
        for row in self.ledger.rows:
            ended = ends.pop(row.job_id, None)
            if ended is not None and not (ended is JobState.DEAD and row.outcome is Outcome.REQUEUED):
                yield f"job {row.job_id} was {ended} and then {row.outcome} at {row.ended_at_us} (lease {row.fence})"
            if row.state.is_terminal:
                ends[row.job_id] = row.state
        for job in self.jobs:
            if job.state.is_terminal and ends.get(job.id) is not job.state:
                yield f"job {job.id} is {job.state}, its last row says {ends.get(job.id)}"

    def no_double_lease(self) -> Iterator[str]:
        """No two valid leases for one job overlap."""
        for earlier, later in self._successive("id"):
            if earlier.overlaps(later):
                yield f"{earlier} overlaps {later}"
        for lease in self.ledger.leases:
            until = lease.lease.expires_at_us
            if lease.ended is None or not lease.has_expired:
                continue
            if lease.ended.ended_at_us < until or lease.ended_us < until - CLOCK_TOLERANCE:
                yield f"{lease} was taken away before it was over"

    def fence_strictly_increasing(self) -> Iterator[str]:
        """Fences strictly increase."""
        for earlier, later in self._successive("id"):
            if later.job.fence <= earlier.job.fence:
                yield f"{later} came after {earlier}"

    def stale_worker_changes_nothing(self) -> Iterator[str]:
        """A stale worker changes nothing."""
        for claim in self.ledger.claims:
            if not claim.is_valid and claim.changed:
                yield f"without a valid lease, and yet the job changed: {claim}"
            elif not claim.is_valid and claim.answer is None and not claim.is_repeated:
                yield f"without a valid lease, and yet: {claim}"

    def holder_is_heard(self) -> Iterator[str]:
        """The holder of a valid lease is never refused."""
        for claim in self.ledger.claims:
            if claim.is_valid and claim.answer is not None:
                yield f"refused under a valid lease: {claim}"

    def reservable_once_over(self) -> Iterator[str]:
        """A dead worker's job is reservable again as soon as its lease is over."""
        for who, now, lease in self.ledger.overdue:
            yield f"{who} looked for work at {now} and left alone {lease}"

    def healthy_workers_keep_their_leases(self) -> Iterator[str]:
        """A lease expires only under a worker that was killed, frozen or cut off; no handler can make it."""
        for lease in self.ledger.leases:
            process = self.workers.get(lease.job.worker or "")
            until = lease.lease.expires_at_us + CLOCK_TOLERANCE
            is_disturbed = process is not None and process.was_disturbed(lease.granted_us, until)
            if lease.has_expired and not is_disturbed:
                yield f"{lease} ran out and nothing had happened to its worker"

    def never_early(self) -> Iterator[str]:
        """No job runs before run_at."""
        for lease in self.ledger.leases:
            if lease.stamped_us < lease.job.run_at_us:
                yield f"due at {lease.job.run_at_us}, leased at {lease.stamped_us}: {lease}"
        for run in self.ledger.executions:
            if run.lease is not None and run.started_us < run.lease.job.run_at_us - CLOCK_TOLERANCE:
                yield f"due at {run.lease.job.run_at_us}: {run}"

    def no_start_without_lease(self) -> Iterator[str]:
        """A handler does not begin under a lease that is over, however late its worker comes to it."""
        for run in self.ledger.executions:
            if run.started_us >= run.lease_until_us + CLOCK_TOLERANCE:
                yield f"its lease was over at {run.lease_until_us or 'an earlier time'}: {run}"

    def lost_lease_stops_the_handler(self) -> Iterator[str]:
        """A lost lease cancels the handler and nothing is written for it."""
        for run in self.ledger.executions:
            process = self.workers.get(run.worker)
            if run.lease is None or not run.lease.has_expired or process is None or run.ended_us is None:
                continue
            if process.is_dead or process.frozen_until or process.had_blocking_handlers:
                continue
            overrun = run.ended_us - run.lease.lease.expires_at_us
            if overrun > self.patience_us:
                yield f"{overrun / SECOND:.3f} s after {run.lease}: {run}"

    def w_never_exceeded(self) -> Iterator[str]:
        """No more than W at once."""
        for limit, leases in self.ledger.inflight:
            if len(leases) > limit:
                yield f"W is {limit}, and valid at once were: {'; '.join(map(str, leases))}"

    def one_inflight_per_key(self) -> Iterator[str]:
        """Never two inflight for one key."""
        for earlier, later in self._successive("key"):
            if earlier.overlaps(later):
                yield f"key {later.job.key!r}: {earlier} and {later}"

    def every_lease_logged(self) -> Iterator[str]:
        """Whenever a lease ends, the same transaction appends one row."""
        for lease in self.ledger.leases:
            if lease.ended is None:
                yield f"no row for {lease}"
        for row in self.ledger.unknown_rows:
            yield f"row {row.seq} ({row.outcome}) ends lease {row.fence} of job {row.job_id}, which nobody held"

    def executions_match_leases(self) -> Iterator[str]:
        """A handler runs once per lease that reaches it, and its result is what is written."""
        results: dict[tuple[str, int], str] = {}
        for run in self.ledger.executions:
            if run.lease is None or run.lease.job.worker != run.worker:
                yield f"no lease for {run}"
            if (run.job_id, run.fence) in results:
                yield f"the second under one lease: {run}"
            results[run.job_id, run.fence] = run.result
        for lease in self.ledger.leases:
            if lease.ended is None or lease.ended.outcome not in _WRITTEN_BY_RESULT:
                continue
            error, result = lease.ended.error_type, results.get((lease.job.id, lease.job.fence))
            if error in _WITHOUT_EXECUTION or (error == "JobTimeout" and result is not None):
                continue
            if result != (RETURNED if lease.ended.outcome is Outcome.DONE else error):
                yield f"written as {lease.ended.outcome} ({error}), ran as {result!r}: {lease}"

    def one_job_per_idempotency_key(self) -> Iterator[str]:
        """idempotency_key dedupes within (queue, key), however often a client tries."""
        first: dict[tuple[str, str], str] = {}
        for job_id, record in self.ledger.accepted.items():
            if record.idempotency_key is not None:
                other = first.setdefault((record.queue, record.idempotency_key), job_id)
                if other != job_id:
                    yield f"jobs {other} and {job_id} in {record.queue} with key {record.idempotency_key!r}"

    def failure_queue_served(self) -> Iterator[str]:
        """The very transition that makes a job dead also enqueues a job in the failure queue."""
        failures = [job.payload for job in self.jobs if job.type == FAILURE_TYPE]
        told = Counter(msgspec.json.decode(one, type=FailurePayload).job_id for one in failures)
        dead = [row for row in self.ledger.rows if row.state is JobState.DEAD]
        deaths = Counter(row.job_id for row in dead if row.queue in self.with_failure_queue)
        for job_id in deaths | told:
            if deaths[job_id] != told[job_id]:
                yield f"job {job_id} died {deaths[job_id]} times, the failure queue was told {told[job_id]} times"

    def backend_time_holds(self) -> Iterator[str]:
        """A worker whose own clock is an hour wrong neither steals a lease nor runs a job early."""
        yield from self.ledger.clock_errors

    def nobody_crashes(self) -> Iterator[str]:
        """No worker ends, hangs or loses a task for anything a backend or a handler does."""
        yield from self.ledger.mishaps

    def outages_lose_nothing(self) -> Iterator[str]:
        """Backend outage: keep retrying with backoff, lose nothing."""
        yield from self.ledger.unrepeated

    def _successive(self, field: str) -> Iterator[tuple[GrantedLease, GrantedLease]]:
        """Each lease with the next one in its queue that has the same value of a job's field."""
        groups: defaultdict[tuple[str, str], list[GrantedLease]] = defaultdict(list)
        for lease in self.ledger.leases:
            if (value := getattr(lease.job, field)) is not None:
                groups[lease.job.queue, value].append(lease)
        for leases in groups.values():
            yield from pairwise(leases)


GUARANTEES: dict[str, Callable[[Evidence], Iterator[str]]] = {
    re.sub("_(.)", lambda found: found[1].upper(), name): guarantee
    for name, guarantee in vars(Evidence).items()
    if isfunction(guarantee) and not name.startswith("_")
}
"""The guarantees by the names that the model gives them."""
