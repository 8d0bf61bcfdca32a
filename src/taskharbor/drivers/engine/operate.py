"""The operator's changes to single jobs: cancel and requeue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taskharbor.drivers.engine.rows import (
    BLOCKED,
    CANCELLED,
    DEAD,
    DONE,
    INFLIGHT,
    OUTCOME_NUMBERS,
    READY,
    STATES,
)
from taskharbor.drivers.engine.statements import Transaction
from taskharbor.drivers.engine.unit import Unit
from taskharbor.errors import JobError, JobFinished, JobNotDead, JobNotFound, KeyConflict
from taskharbor.jobs import JobState, Micros, Outcome

_CANCELLED, _REQUEUED = OUTCOME_NUMBERS[Outcome.CANCELLED], OUTCOME_NUMBERS[Outcome.REQUEUED]


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
        unit.end(job, CANCELLED, _CANCELLED)
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
    unit.log(job, _REQUEUED, job.state)
    return STATES[job.state]
