"""The operator's changes: cancel and requeue single jobs, and remove what has ended, by a filter or by retention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import astuple, replace

from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.engine.inspect import settings as settings_of
from taskharbor.drivers.engine.loaded_jobs import JobRow, Unit
from taskharbor.drivers.engine.tables import Counts, State, Transaction, load, to_json
from taskharbor.drivers.records import STATE_NUMBERS, STATES, FieldNames, changed_fields
from taskharbor.errors import JobError, JobFinished, JobNotDead, JobNotFound, KeyConflict
from taskharbor.jobs import TERMINAL_STATES, JobState, Micros, Outcome

_SQL = load("operate")
_FOREVER = 2**63 - 1
_ANY = JobFilter()


def cancel(
    transaction: Transaction, job_ids: Sequence[str], now: Micros, only_waiting: bool
) -> list[JobState | JobError]:
    return _change_each(transaction, job_ids, now, partial(_cancel, only_waiting=only_waiting))


def cancel_keys(
    transaction: Transaction, keys: Sequence[str], queue: str, now: Micros, only_waiting: bool
) -> list[int]:
    number = transaction.known_queue_id(queue)
    if number is None:
        return [0] * len(keys)
    unit = Unit(transaction, now, ())
    unit.load_keys({(number, key) for key in keys})
    counts = []
    for key in keys:
        of_key = unit.waiting(number, key), None if only_waiting else unit.inflight(number, key)
        counts.append(len([_cancel(unit, job) for job in of_key if job is not None]))
    unit.flush()
    return counts


def requeue(
    transaction: Transaction, job_ids: Sequence[str], now: Micros, run_at: Micros | None, keep_counts: bool
) -> list[JobState | JobError]:
    change = partial(_requeue, run_at=now if run_at is None else run_at, keep_counts=keep_counts)
    return _change_each(transaction, job_ids, now, change)


def _change_each(
    transaction: Transaction,
    job_ids: Sequence[str],
    now: Micros,
    change: Callable[[Unit, JobRow], JobState | JobError],
) -> list[JobState | JobError]:
    unit = Unit(transaction, now, job_ids)
    jobs = [(job_id, unit.job(job_id)) for job_id in job_ids]
    answers = [JobNotFound(job_id) if job is None else change(unit, job) for job_id, job in jobs]
    unit.flush()
    return answers


def _cancel(unit: Unit, job: JobRow, only_waiting: bool = False) -> JobState | JobError:
    if job.state in (State.DONE, State.DEAD):
        return JobFinished(job.id)
    if job.state == State.INFLIGHT:
        if not only_waiting:
            job.cancel_requested = 1
            unit.touch(job)
    elif job.state != State.CANCELLED:
        unit.end(job, State.CANCELLED, Outcome.CANCELLED)
    return STATES[job.state]


def _requeue(unit: Unit, job: JobRow, run_at: Micros, keep_counts: bool) -> JobState | JobError:
    if job.state != State.DEAD:
        return JobNotDead(job.id)
    if unit.waiting(job.queue_id, job.key) is not None:
        return KeyConflict(job.id)
    job.run_at = run_at
    if not keep_counts:
        job.attempts = job.stalls = 0
    job.finished_at = None
    if unit.inflight(job.queue_id, job.key) is None:
        unit.wait_by_run_at(job)
    else:
        unit.place(job, State.BLOCKED)
    unit.log(job, Outcome.REQUEUED, job.state)
    return STATES[job.state]


def configure(
    transaction: Transaction,
    queue: str,
    settings: QueueSettings,
    _: Micros,
    fields: FieldNames,
    declares: bool,
) -> None:
    number = transaction.queue_id(queue)
    kept = settings_of(transaction, queue)
    if declares and kept.declaration == settings.declaration:
        return
    changed = replace(kept, **{name: getattr(settings, name) for name in changed_fields(fields, declares)})
    transaction.execute(_SQL["configure"], (*astuple(changed), number))
    transaction.notifies = True


def purge(transaction: Transaction, selection: JobFilter, limit: int) -> int:
    if selection.worker is not None:
        # A job that ended is nobody's.
        return 0
    states = TERMINAL_STATES if selection.states is None else TERMINAL_STATES & selection.states
    before = _FOREVER if selection.finished_before_us is None else selection.finished_before_us
    removed = 0
    for queue in transaction.fetch(_SQL["queues"], {"name": selection.queue}):
        for state in sorted(STATE_NUMBERS[one] for one in states):
            removed += _remove(transaction, queue, state, before, limit - removed, selection)
    return removed


def prune(transaction: Transaction, now: Micros, limit: int) -> int:
    jobs, rows = prune_up_to(transaction, now, limit, limit)
    return jobs + rows


def prune_up_to(transaction: Transaction, now: Micros, most_jobs: int, most_rows: int) -> tuple[int, int]:
    """Remove what retention gives up, at most so many jobs and rows of the log; how many of each."""
    jobs = rows = 0
    for queue, keep_done, keep_dead, keep_attempts in transaction.fetch(_SQL["retention"]):
        for state, keep in ((State.DONE, keep_done), (State.CANCELLED, keep_done), (State.DEAD, keep_dead)):
            if keep is not None:
                jobs += _remove(transaction, queue, state, now - keep + 1, most_jobs - jobs, _ANY)
        if keep_attempts is not None and rows < most_rows:
            gone = transaction.execute(
                _SQL["attempts"], (queue, now - keep_attempts, most_rows - rows)
            ).fetchall()
            rows += len(gone)
            if gone:
                transaction.execute(_SQL["trimmed"], max(gone))
    return jobs, rows


def _remove(
    transaction: Transaction, queue: int, state: int, before: Micros, limit: int, selection: JobFilter
) -> int:
    """Remove up to `limit` jobs that ended before an instant, by type and key of a filter, with all that belongs to them."""
    if limit < 1:
        return 0
    types = None if selection.types is None else to_json(sorted(selection.types))
    values = {"queue": queue, "state": state, "before": before, "types": types, "key": selection.key}
    seqs = transaction.fetch(_SQL["ended"], values | {"limit": limit})
    return remove_jobs(transaction, [(seq, queue, state) for seq in seqs])


def remove_jobs(transaction: Transaction, jobs: Sequence[tuple[int, int, int]]) -> int:
    """Jobs that have ended, by number, queue and state, with everything that belongs to them. How many."""
    if jobs:
        seqs = to_json([seq for seq, _, _ in jobs])
        for table in ("payloads", "results", "idempotency", "jobs"):
            transaction.execute(_SQL[table], (seqs,))
        counts = Counts(transaction)
        for (queue, state), removed in Counter([job[1:] for job in jobs]).items():
            counts.move(queue, state, None, removed)
        counts.flush()
    return len(jobs)
