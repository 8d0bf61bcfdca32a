"""The operator's changes: cancel and requeue single jobs, and remove what has ended, by a filter or by retention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import astuple

from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.engine.loaded_jobs import Unit
from taskharbor.drivers.engine.tables import (
    BLOCKED,
    CANCELLED,
    DEAD,
    DONE,
    INFLIGHT,
    READY,
    STATE_NUMBERS,
    STATES,
    Counts,
    Transaction,
    fetch,
    load,
    queue_id,
    queue_ids,
    to_json,
)
from taskharbor.errors import JobError, JobFinished, JobNotDead, JobNotFound, KeyConflict
from taskharbor.jobs import TERMINAL_STATES, JobState, Micros, Outcome

_SQL = load("operate")
_FOREVER = 2**63 - 1


def cancel(transaction: Transaction, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    return _change_each(transaction, job_ids, now, _cancel)


def requeue(transaction: Transaction, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    return _change_each(transaction, job_ids, now, _requeue)


def _change_each(
    transaction: Transaction,
    job_ids: Sequence[str],
    now: Micros,
    change: Callable[[Unit, str], JobState | JobError],
) -> list[JobState | JobError]:
    unit = Unit(transaction, now)
    unit.load(job_ids)
    answers = [change(unit, job_id) for job_id in job_ids]
    unit.flush()
    return answers


def _cancel(unit: Unit, job_id: str) -> JobState | JobError:
    job = unit.job(job_id)
    if job is None:
        return JobNotFound(job_id)
    if job.state in (DONE, DEAD):
        return JobFinished(job_id)
    if job.state == INFLIGHT:
        job.cancel_requested = 1
        unit.touch(job)
    elif job.state != CANCELLED:
        unit.end(job, CANCELLED, Outcome.CANCELLED)
    return STATES[job.state]


def _requeue(unit: Unit, job_id: str) -> JobState | JobError:
    job = unit.job(job_id)
    if job is None:
        return JobNotFound(job_id)
    if job.state != DEAD:
        return JobNotDead(job_id)
    if unit.waiting(job.queue_id, job.key) is not None:
        return KeyConflict(job_id)
    job.run_at = unit.now
    job.attempts = job.stalls = 0
    job.finished_at = None
    unit.place(job, READY if unit.inflight(job.queue_id, job.key) is None else BLOCKED)
    unit.log(job, Outcome.REQUEUED, job.state)
    return STATES[job.state]


def configure(transaction: Transaction, queue: str, settings: QueueSettings, now: Micros) -> None:
    number = queue_id(transaction, queue)
    transaction.connection.execute(_SQL["configure"], (*astuple(settings), number))
    transaction.notifies = True


def purge(transaction: Transaction, selection: JobFilter, limit: int) -> int:
    if selection.worker is not None:
        # A job that ended is nobody's.
        return 0
    states = TERMINAL_STATES if selection.states is None else TERMINAL_STATES & selection.states
    types = None if selection.types is None else to_json(sorted(selection.types))
    before = _FOREVER if selection.finished_before_us is None else selection.finished_before_us
    removed = 0
    for queue in queue_ids(transaction, selection.queue):
        for state in sorted(STATE_NUMBERS[one] for one in states):
            removed += _remove(transaction, queue, state, before, limit - removed, types, selection.key)
    return removed


def prune(transaction: Transaction, now: Micros, limit: int) -> int:
    jobs, rows = prune_up_to(transaction, now, limit, limit)
    return jobs + rows


def prune_up_to(transaction: Transaction, now: Micros, most_jobs: int, most_rows: int) -> tuple[int, int]:
    """Remove what retention gives up, at most so many jobs and rows of the log; how many of each."""
    execute = transaction.connection.execute
    jobs = rows = 0
    for queue, keep_done, keep_dead, keep_attempts in fetch(transaction, _SQL["retention"]):
        for state, keep in ((DONE, keep_done), (CANCELLED, keep_done), (DEAD, keep_dead)):
            if keep is not None:
                jobs += _remove(transaction, queue, state, now - keep + 1, most_jobs - jobs)
        if keep_attempts is not None and rows < most_rows:
            gone = execute(_SQL["attempts"], (queue, now - keep_attempts, most_rows - rows)).fetchall()
            rows += len(gone)
            if gone:
                execute(_SQL["trimmed"], max(gone))
    return jobs, rows


def _remove(
    transaction: Transaction,
    queue: int,
    state: int,
    before: Micros,
    limit: int,
    types: str | None = None,
    key: str | None = None,
) -> int:
    """Up to `limit` jobs that ended before an instant, with everything that belongs to them."""
    if limit < 1:
        return 0
    values = {"queue": queue, "state": state, "before": before, "types": types, "key": key, "limit": limit}
    seqs = fetch(transaction, _SQL["ended"], values)
    return remove_jobs(transaction, [(seq, queue, state) for seq in seqs])


def remove_jobs(transaction: Transaction, jobs: Sequence[tuple[int, int, int]]) -> int:
    """Jobs that have ended, by number, queue and state, with everything that belongs to them. How many."""
    if jobs:
        seqs = to_json([seq for seq, _, _ in jobs])
        for table in ("payloads", "results", "idempotency", "jobs"):
            transaction.connection.execute(_SQL[table], (seqs,))
        counts = Counts(transaction)
        for (queue, state), removed in Counter([job[1:] for job in jobs]).items():
            counts.move(queue, state, None, removed)
        counts.flush()
    return len(jobs)
