"""Ending and extending leases, and ending those that are over.

A batch of plain acks is checked in one row and applied in three statements. Anything else (another settlement, a key, an
error, a job twice) goes through a `Unit`, which knows every rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from taskharbor.drivers import records as rec
from taskharbor.drivers.engine.loaded_jobs import UNIT, JobRow, Unit
from taskharbor.drivers.engine.tables import TOKEN_LENGTH, State, Transaction, lease_token, load, to_json
from taskharbor.errors import JobError, JobNotFound, JobNotInflight, LeaseExpired, LeaseMismatch
from taskharbor.jobs import Failure, Lease, Micros, Outcome

_SQL = load("settle")

_AGREED: dict[type, tuple[int, ...]] = {
    rec.Ack: (State.DONE,),
    rec.Fail: (State.DONE, State.DEAD),
    rec.Discard: (State.CANCELLED,),
}
"""Ends that a settlement may find already reached: it succeeds and changes nothing."""


def settle(
    transaction: Transaction, settlements: Sequence[rec.Settlement], now: Micros
) -> list[JobError | None]:
    acks = [one for one in settlements if type(one) is rec.Ack]
    if (
        acks
        and len({one.job_id for one in settlements}) == len(settlements)
        and _settle_acks(transaction, acks, now)
    ):
        others = [one for one in settlements if type(one) is not rec.Ack]
        if not others:
            return [None] * len(settlements)
        answers = iter(_settle_by_rules(transaction, others, now))
        return [None if type(one) is rec.Ack else next(answers) for one in settlements]
    return _settle_by_rules(transaction, settlements, now)


def _settle_acks(transaction: Transaction, acks: Sequence[rec.Ack], now: Micros) -> bool:
    """Apply them all, if every one is a valid ack of a job without a key, ended at `now`; else change nothing."""
    try:
        seqs = [int(ack.token[TOKEN_LENGTH:], 16) for ack in acks]
    except ValueError:
        return False
    wanted = to_json(seqs)
    count, low, high, expires_at, keyed, queue, last_queue, reserved_at, ids, secrets = transaction.execute(
        _SQL["check_acks"], (wanted,)
    ).fetchone()
    if not (
        count == len(acks)
        and low == high == State.INFLIGHT
        and expires_at > now >= reserved_at
        and not keyed
        and ids == "\n".join([ack.job_id for ack in acks])
        and ids.count("\n") == count - 1
        and secrets == "\n".join([ack.token[:TOKEN_LENGTH] for ack in acks])
    ):
        return False
    if queue == last_queue:
        per_queue = {queue: count}
    else:
        per_queue = Counter(transaction.fetch(_SQL["queues_of"], (wanted,)))
    transaction.execute(_SQL["log_acks"], (now, wanted))
    transaction.execute(_SQL["finish_acks"], (now, wanted))
    results = [(seq, ack.result) for seq, ack in zip(seqs, acks, strict=True) if ack.result is not None]
    transaction.insert_rows(UNIT["insert_result"], results)
    for number, jobs in per_queue.items():
        (max_inflight,) = transaction.execute(_SQL["count_acks"], (jobs, jobs, jobs, now, number)).fetchone()
        if max_inflight is not None:
            transaction.notifies = True
    return True


def _settle_by_rules(
    transaction: Transaction, settlements: Sequence[rec.Settlement], now: Micros
) -> list[JobError | None]:
    unit = Unit(transaction, now, [one.job_id for one in settlements])
    answers = [_settle_one(unit, one) for one in settlements]
    unit.flush()
    return answers


def _settle_one(unit: Unit, settlement: rec.Settlement) -> JobError | None:
    job = unit.job(settlement.job_id)
    if job is None:
        return JobNotFound(settlement.job_id)
    if job.state > State.INFLIGHT:
        return settle_ended(settlement, job.state)
    refused = _refusal(
        settlement.job_id, job.state, job.full_token, job.expires_at, settlement.token, unit.now
    )
    if refused is not None:
        return refused
    match settlement:
        case rec.Ack(result=result):
            job.result = result
            unit.end(job, State.DONE, Outcome.DONE)
        case rec.RetryAt(run_at_us=run_at, attempts=attempts, error=error):
            _record_failure(job, attempts, error, unit.now)
            if job.cancel_requested:
                unit.end(job, State.CANCELLED, Outcome.CANCELLED, error)
            else:
                unit.back_to_waiting(job, Outcome.RETRIED, run_at, error)
        case rec.Fail(attempts=attempts, error=error):
            _record_failure(job, attempts, error, unit.now)
            unit.end(job, State.DEAD, Outcome.DEAD, error)
        case rec.Release(run_at_us=later):
            if job.cancel_requested:
                unit.end(job, State.CANCELLED, Outcome.CANCELLED)
            else:
                unit.back_to_waiting(job, Outcome.RELEASED, later)
        case rec.Discard(reason=reason):
            if reason is not None:
                job.last_error = reason.text
            unit.end(job, State.CANCELLED, Outcome.CANCELLED, reason)
    return None


def settle_ended(settlement: rec.Settlement, state: int) -> JobError | None:
    """The answer to a settlement of a job that has ended already."""
    return None if state in _AGREED.get(type(settlement), ()) else JobNotInflight(settlement.job_id)


def _record_failure(job: JobRow, attempts: int, error: Failure, now: Micros) -> None:
    job.attempts = attempts
    job.last_error = error.text
    job.failed_at = now


def _refusal(
    job_id: str, state: int, token: str | None, expires_at: Micros | None, given: str, now: Micros
) -> JobError | None:
    if state != State.INFLIGHT:
        return JobNotInflight(job_id)
    if token != given:
        return LeaseMismatch(job_id)
    if expires_at is None or expires_at <= now:
        return LeaseExpired(job_id)
    return None


def extend_lease(
    transaction: Transaction, extensions: Sequence[rec.Extension], lease_for: Micros, now: Micros
) -> list[Lease | JobError]:
    found = transaction.fetch(_SQL["leases"], (to_json([one.job_id for one in extensions]),))
    jobs = {row[1]: row for row in found}
    expires_at = now + lease_for
    extended: list[int] = []
    answers: list[Lease | JobError] = []
    for one in extensions:
        row = jobs.get(one.job_id)
        if row is None:
            answers.append(JobNotFound(one.job_id))
            continue
        seq, job_id, state, secret, held_until, cancel_requested = row
        token = None if secret is None else lease_token(secret, seq)
        refused = _refusal(job_id, state, token, held_until, one.token, now)
        if refused is not None:
            answers.append(refused)
            continue
        # A heartbeat that arrives late, with an old `now`, takes nothing away.
        until = expires_at if held_until is None else max(held_until, expires_at)
        answers.append(Lease(job_id, one.token, until, bool(cancel_requested)))
        extended.append(seq)
        if one.progress is not None:
            transaction.execute(_SQL["set_progress"], (one.progress, seq))
    if extended:
        transaction.execute(_SQL["extend"], (expires_at, to_json(extended)))
    return answers


def reclaim(transaction: Transaction, now: Micros, queue: str | None, limit: int) -> int:
    ended = 0
    for number in transaction.fetch(_SQL["queues_with_leases"], {"name": queue}):
        ended += reclaim_queue(transaction, number, now, limit - ended)
    return ended


def reclaim_queue(transaction: Transaction, queue: int, now: Micros, limit: int) -> int:
    if limit < 1:
        return 0
    job_ids = transaction.fetch(_SQL["expired"], (queue, now, limit))
    if not job_ids:
        return 0
    unit = Unit(transaction, now, job_ids)
    for job_id in job_ids:
        job = unit.job(job_id)
        assert job is not None
        _expire(unit, job)
    unit.flush()
    return len(job_ids)


def _expire(unit: Unit, job: JobRow) -> None:
    job.stalls += 1
    counted = 0 if job.max_stalls else job.stalls
    if job.cancel_requested:
        unit.end(job, State.CANCELLED, Outcome.EXPIRED, rec.EXPIRED_ERROR)
    elif job.attempts + counted >= job.max_attempts or 0 < job.max_stalls <= job.stalls:
        job.last_error = rec.EXPIRED_ERROR.text
        unit.end(job, State.DEAD, Outcome.EXPIRED, rec.EXPIRED_ERROR)
    else:
        unit.back_to_waiting(job, Outcome.EXPIRED, error=rec.EXPIRED_ERROR)
