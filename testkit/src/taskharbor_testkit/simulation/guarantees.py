"""The guarantees of the model (section 5), by name: each judges a finished run and says what broke it.

Positive statements about the whole system, in the model's words. They know the books and the log, and nothing of how
workers or drivers do their work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import msgspec

from taskharbor.drivers.contract import EXPIRED_ERROR, FAILURE_TYPE, FailurePayload
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros, Outcome
from taskharbor_testkit.simulation.handlers import RETURNED
from taskharbor_testkit.simulation.ledger import LeaseSeen, Ledger
from taskharbor_testkit.simulation.process import CLOCK_TOLERANCE, Process


class Evidence(msgspec.Struct, kw_only=True):
    """All that is known when a run is over."""

    ledger: Ledger
    jobs: Sequence[JobRecord]
    """Every job in the store at the end."""
    workers: Mapping[str, Process]
    is_drained: bool
    failure_queues: Mapping[str, str]
    clock_errors: Sequence[str]
    mishaps: Sequence[str]
    """Processes that crashed, hung or did not stop."""
    unrepeated: Sequence[str]
    """Settlements that were lost on the way and given up."""
    patience_us: Micros
    """How long a handler may go on after its lease: a heartbeat to notice, a moment to wind up."""


Guarantee: TypeAlias = Callable[[Evidence], Iterator[str]]


def nothing_lost(seen: Evidence) -> Iterator[str]:
    """An accepted job is never lost: after any crash it ends in exactly one terminal state."""
    shown: dict[str, JobRecord] = {}
    for job in seen.jobs:
        if job.id in shown:
            yield f"job {job.id} is there twice"
        shown[job.id] = job
        if not job.state.is_terminal:
            yield f"job {job.id} never ended: {job.state}, fence {job.fence}, held by {job.worker}"
        if job.id not in seen.ledger.accepted and job.type != FAILURE_TYPE:
            yield f"job {job.id} was never accepted"
    for job_id in seen.ledger.accepted:
        if job_id not in shown:
            yield f"job {job_id} was accepted and is gone"
    if not seen.is_drained:
        yield "the queues did not drain after everything was healed"


def terminal_is_forever(seen: Evidence) -> Iterator[str]:
    """done, dead, cancelled are terminal; only an operator's requeue leads out of dead."""
    ends: dict[str, JobState] = {}
    for row in seen.ledger.rows:
        ended = ends.pop(row.job_id, None)
        if ended is not None and not (ended is JobState.DEAD and row.outcome is Outcome.REQUEUED):
            yield f"job {row.job_id} was {ended} and then {row.outcome} at {row.ended_at_us} (lease {row.fence})"
        if row.state.is_terminal:
            ends[row.job_id] = row.state
    for job in seen.jobs:
        if job.state.is_terminal and ends.get(job.id) is not job.state:
            yield f"job {job.id} is {job.state}, its last row says {ends.get(job.id)}"


def no_double_lease(seen: Evidence) -> Iterator[str]:
    """No two valid leases for one job overlap."""
    for leases in _by_job(seen.ledger.leases).values():
        for earlier, later in pairwise(leases):
            if earlier.ended_in is None or earlier.ended_in > later.granted_in:
                yield f"{earlier} overlaps {later}"
    for lease in seen.ledger.leases:
        row = lease.ended
        if row is None or row.outcome is not Outcome.EXPIRED:
            continue
        assert lease.ended_us is not None
        if row.ended_at_us < lease.expires_at_us or lease.ended_us < lease.expires_at_us - CLOCK_TOLERANCE:
            yield f"{lease} was taken away before it was over"


def fence_strictly_increasing(seen: Evidence) -> Iterator[str]:
    """Fences strictly increase."""
    for leases in _by_job(seen.ledger.leases).values():
        for earlier, later in pairwise(leases):
            if later.fence <= earlier.fence:
                yield f"{later} came after {earlier}"


def stale_worker_changes_nothing(seen: Evidence) -> Iterator[str]:
    """A stale worker changes nothing."""
    for claim in seen.ledger.claims:
        if claim.is_valid:
            continue
        if claim.changed:
            yield f"without a valid lease, and yet the job changed: {claim}"
        elif claim.answer is None and not claim.repeats:
            yield f"without a valid lease, and yet: {claim}"


def holder_is_heard(seen: Evidence) -> Iterator[str]:
    """The holder of a valid lease is never refused."""
    for claim in seen.ledger.claims:
        if claim.is_valid and claim.answer is not None:
            yield f"refused under a valid lease: {claim}"


def reservable_once_over(seen: Evidence) -> Iterator[str]:
    """A dead worker's job is reservable again as soon as its lease is over."""
    for who, now, lease in seen.ledger.overdue:
        yield f"{who} looked for work at {now} and left alone {lease}"


def healthy_workers_keep_their_leases(seen: Evidence) -> Iterator[str]:
    """A lease runs out only under a worker that was killed, frozen or cut off; no handler can make it."""
    for lease in seen.ledger.leases:
        if lease.ended is None or lease.ended.outcome is not Outcome.EXPIRED:
            continue
        process = seen.workers.get(lease.worker or "")
        if process is None or not process.was_disturbed(
            lease.granted_us, lease.expires_at_us + CLOCK_TOLERANCE
        ):
            yield f"{lease} ran out and nothing had happened to its worker"


def never_early(seen: Evidence) -> Iterator[str]:
    """No job runs before run_at."""
    due: dict[tuple[str, int], LeaseSeen] = {}
    for lease in seen.ledger.leases:
        due[lease.job_id, lease.fence] = lease
        if lease.stamped_us < lease.run_at_us:
            yield f"due at {lease.run_at_us}, leased at {lease.stamped_us}: {lease}"
    for execution in seen.ledger.executions:
        granted = due.get((execution.job_id, execution.fence))
        if granted is not None and execution.started_us < granted.run_at_us - CLOCK_TOLERANCE:
            yield f"due at {granted.run_at_us}: {execution}"


def no_start_without_lease(seen: Evidence) -> Iterator[str]:
    """A handler does not begin under a lease that is over, however late its worker comes to it."""
    for execution in seen.ledger.executions:
        if execution.started_us >= execution.lease_until_us + CLOCK_TOLERANCE:
            yield f"its lease was over at {execution.lease_until_us or 'an earlier time'}: {execution}"


def lost_lease_stops_the_handler(seen: Evidence) -> Iterator[str]:
    """A lost lease cancels the handler and nothing is written for it."""
    leases = {(lease.job_id, lease.fence): lease for lease in seen.ledger.leases}
    for execution in seen.ledger.executions:
        lease = leases.get((execution.job_id, execution.fence))
        process = seen.workers.get(execution.worker)
        if lease is None or lease.ended is None or process is None or execution.ended_us is None:
            continue
        if process.is_dead or process.frozen_until or process.had_blocking_handlers:
            continue
        overrun = execution.ended_us - lease.expires_at_us
        if lease.ended.outcome is Outcome.EXPIRED and overrun > seen.patience_us:
            yield f"{overrun / SECOND:.3f} s after {lease}: {execution}"


def w_never_exceeded(seen: Evidence) -> Iterator[str]:
    """No more than W at once."""
    for limit, crowd in seen.ledger.crowds:
        if len(crowd) > limit:
            yield f"W is {limit}, and valid at once were: {'; '.join(map(str, crowd))}"


def one_inflight_per_key(seen: Evidence) -> Iterator[str]:
    """Never two inflight for one key."""
    by_key: defaultdict[tuple[str, str], list[LeaseSeen]] = defaultdict(list)
    for lease in seen.ledger.leases:
        if lease.key is not None:
            by_key[lease.queue, lease.key].append(lease)
    for (_, key), leases in by_key.items():
        for earlier, later in pairwise(leases):
            if earlier.ended_in is None or earlier.ended_in > later.granted_in:
                yield f"key {key!r}: {earlier} and {later}"


def every_lease_logged(seen: Evidence) -> Iterator[str]:
    """Whenever a lease ends, the same transaction appends one row."""
    for lease in seen.ledger.leases:
        if lease.ended is None:
            yield f"no row for {lease}"
    for row in seen.ledger.unknown_rows:
        yield f"row {row.seq} ({row.outcome}) ends lease {row.fence} of job {row.job_id}, which nobody held"


def executions_match_leases(seen: Evidence) -> Iterator[str]:
    """A handler runs once per lease that reaches it, and what is written is how it ended."""
    leases = {(lease.job_id, lease.fence): lease for lease in seen.ledger.leases}
    results: dict[tuple[str, int], str] = {}
    for execution in seen.ledger.executions:
        lease = leases.get((execution.job_id, execution.fence))
        if lease is None or lease.worker != execution.worker or execution.started_us < lease.granted_us:
            yield f"no lease for {execution}"
        if (execution.job_id, execution.fence) in results:
            yield f"the second under one lease: {execution}"
        results[execution.job_id, execution.fence] = execution.result
    for key, lease in leases.items():
        if lease.ended is None or lease.ended.outcome not in _WRITTEN_BY_RESULT:
            continue
        error = lease.ended.error_type
        wanted = RETURNED if lease.ended.outcome is Outcome.DONE else error
        if error in _WITHOUT_EXECUTION or (error == "JobTimeout" and key in results):
            continue
        if results.get(key) != wanted:
            yield f"written as {lease.ended.outcome} ({error}), ran as {results.get(key)!r}: {lease}"


_WRITTEN_BY_RESULT = {Outcome.DONE, Outcome.RETRIED, Outcome.DEAD}
_WITHOUT_EXECUTION = {"PayloadInvalid", "HandlerMissing", EXPIRED_ERROR.type}


def one_job_per_idempotency_key(seen: Evidence) -> Iterator[str]:
    """idempotency_key dedupes within (queue, key), however often a client tries."""
    first: dict[tuple[str, str], str] = {}
    for job_id, record in seen.ledger.accepted.items():
        if record.idempotency_key is not None:
            other = first.setdefault((record.queue, record.idempotency_key), job_id)
            if other != job_id:
                yield f"jobs {other} and {job_id} in {record.queue} with key {record.idempotency_key!r}"


def failure_queue_served(seen: Evidence) -> Iterator[str]:
    """The very transition that makes a job dead also enqueues a job in the failure queue."""
    told: defaultdict[str, int] = defaultdict(int)
    for job in seen.jobs:
        if job.type == FAILURE_TYPE:
            told[msgspec.json.decode(job.payload, type=FailurePayload).job_id] += 1
    deaths: defaultdict[str, int] = defaultdict(int)
    for row in seen.ledger.rows:
        if row.state is JobState.DEAD and row.queue in seen.failure_queues:
            deaths[row.job_id] += 1
    for job_id in {**deaths, **told}:
        if deaths[job_id] != told[job_id]:
            yield f"job {job_id} died {deaths[job_id]} times, the failure queue was told {told[job_id]} times"


def backend_time_holds(seen: Evidence) -> Iterator[str]:
    """A worker whose own clock is an hour wrong neither steals a lease nor runs a job early."""
    yield from seen.clock_errors


def nobody_crashes(seen: Evidence) -> Iterator[str]:
    """No worker ends, hangs or loses a task for anything a backend or a handler does."""
    yield from seen.mishaps


def outages_lose_nothing(seen: Evidence) -> Iterator[str]:
    """Backend outage: keep retrying with backoff, lose nothing."""
    yield from seen.unrepeated


GUARANTEES: dict[str, Guarantee] = {
    "nothingLost": nothing_lost,
    "terminalIsForever": terminal_is_forever,
    "noDoubleLease": no_double_lease,
    "fenceStrictlyIncreasing": fence_strictly_increasing,
    "staleWorkerChangesNothing": stale_worker_changes_nothing,
    "holderIsHeard": holder_is_heard,
    "reservableOnceOver": reservable_once_over,
    "healthyWorkersKeepTheirLeases": healthy_workers_keep_their_leases,
    "neverEarly": never_early,
    "noStartWithoutLease": no_start_without_lease,
    "lostLeaseStopsTheHandler": lost_lease_stops_the_handler,
    "wNeverExceeded": w_never_exceeded,
    "oneInflightPerKey": one_inflight_per_key,
    "everyLeaseLogged": every_lease_logged,
    "executionsMatchLeases": executions_match_leases,
    "oneJobPerIdempotencyKey": one_job_per_idempotency_key,
    "failureQueueServed": failure_queue_served,
    "backendTimeHolds": backend_time_holds,
    "nobodyCrashes": nobody_crashes,
    "outagesLoseNothing": outages_lose_nothing,
}


def _by_job(leases: Sequence[LeaseSeen]) -> dict[str, list[LeaseSeen]]:
    by_job: defaultdict[str, list[LeaseSeen]] = defaultdict(list)
    for lease in leases:
        by_job[lease.job_id].append(lease)
    return by_job
