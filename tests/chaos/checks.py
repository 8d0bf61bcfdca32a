"""What must be true of every job, and of the whole log, when a chaos run is over."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from chaos.batches import CONTENTS, LASTING, LIMIT
from taskharbor.jobs import Attempt, JobRecord, JobState, Outcome
from taskharbor_testkit.conformance.invariants import check_no_overlap, most_at_once, spans

MEANT = {
    (type, queue): {JobState.DEAD if type == "doomed" else JobState.DONE}
    for queue, type in (*CONTENTS, LASTING)
} | {("quick", "keyed"): {JobState.DONE, JobState.CANCELLED}}


def check_jobs(jobs: Sequence[JobRecord], answered: set[str]) -> None:
    assert len({job.id for job in jobs}) == len(jobs)
    assert {job.id for job in jobs} == answered
    for job in jobs:
        assert job.state in MEANT[job.type, job.queue], job
        # Only who waits behind another of its key is ever merged into it.
        assert (job.state is JobState.CANCELLED) == (job.merged_into is not None), job


def check_log(jobs: Sequence[JobRecord], attempts: Sequence[Attempt]) -> None:
    assert len({row.seq for row in attempts}) == len(attempts)
    rows: defaultdict[str, list[Attempt]] = defaultdict(list)
    for row in sorted(attempts, key=lambda row: row.seq):
        rows[row.job_id].append(row)
    assert rows.keys() == {job.id for job in jobs}
    for job in jobs:
        of_job = rows[job.id]
        # Every lease that was granted has left one row, in the order of their fences.
        leased = [row for row in of_job if row.reserved_at_us is not None]
        assert [row.fence for row in leased] == list(range(1, job.fence + 1)), of_job
        assert [row.state.is_terminal for row in of_job] == [False] * (len(of_job) - 1) + [True], of_job
        assert of_job[-1].state is job.state
        outcomes = Counter(row.outcome for row in of_job)
        assert job.stalls == outcomes[Outcome.EXPIRED], of_job
        assert job.attempts == outcomes[Outcome.RETRIED] + outcomes[Outcome.DEAD], of_job
        for row in leased:
            assert row.reserved_at_us is not None
            assert row.reserved_at_us >= row.run_at_us >= row.created_at_us, row
    leases = spans(attempts, ())
    check_no_overlap(leases)
    limited = {job.id for job in jobs if job.queue == "limited"}
    assert most_at_once(lease for lease in leases if lease.job_id in limited) == LIMIT


def check_executions(attempts: Sequence[Attempt], executions: Counter[tuple[str, int]]) -> None:
    """Each was begun once and under a lease of its own; whatever ended by its handler had been begun."""
    assert [lease for lease, times in executions.items() if times > 1] == []
    leases = {(row.job_id, row.fence) for row in attempts if row.reserved_at_us is not None}
    assert executions.keys() <= leases
    by_handler = (Outcome.DONE, Outcome.RETRIED, Outcome.DEAD)
    assert {(row.job_id, row.fence) for row in attempts if row.outcome in by_handler} <= executions.keys()
