"""The replay of a driver's call on the model.

The replay takes from the driver's own answer the values that the driver may choose (tokens, ids of failure jobs, the rows that
a limit leaves for later) and decides everything else itself. It also checks concurrent calls: some order of them must explain
the outcome.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar, cast

import msgspec

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import FAILURE_TYPE, Driver, FailurePayload
from taskharbor.errors import JobNotInflight, LeaseExpired, LeaseMismatch
from taskharbor.jobs import JobRecord, JobState, Lease, Outcome
from taskharbor_testkit.conformance.snapshot import Mismatch, Snapshot, same_answer
from taskharbor_testkit.model import Model

A = TypeVar("A")


async def perform(driver: Driver, call: op.Operation[A]) -> A:
    """Make the call by the driver's public method, which also checks it."""
    return cast("A", await getattr(driver, call.name)(**msgspec.structs.asdict(call)))


def replay(
    model: Model, call: op.Operation[Any], answer: Any, after: Snapshot, busy: Collection[str] = frozenset()
) -> None:
    """Apply the call to the model; raise Mismatch where the driver's answer cannot be right.

    `busy`: jobs that calls beside this one were changing, where the driver may pass over those."""
    model.failure_id_for = lambda dead, queue: _failure_id(model, after, dead, queue)
    match call:
        case op.Reserve():
            expected: Any = _reserve(model, call, answer, after, busy)
        case op.ExtendLease():
            expected = _extend(model, call, answer)
        case op.Reclaim():
            expected = _reclaim(model, call, after)
        case op.Purge():
            expected = _purge(model, call, after)
        case op.Prune():
            expected = _prune(model, call, after)
        case _:
            expected = getattr(model, call.name)(**msgspec.structs.asdict(call))
    if isinstance(call, op.Settle | op.ExtendLease):
        expected = [_seen_meanwhile(want, got, busy) for want, got in zip(expected, answer, strict=True)]
    wrong = same_answer(expected, answer)
    if wrong:
        raise Mismatch(f"{call.name} {wrong}")
    _adopt_flags(model, after)


def _seen_meanwhile(want: Any, got: Any, busy: Collection[str]) -> Any:
    """A call without the lease of a job that another call is changing is refused; by which error depends on the moment."""
    lost = (JobNotInflight, LeaseMismatch, LeaseExpired)
    is_either = isinstance(want, lost) and isinstance(got, lost) and want.job_id == got.job_id
    return got if is_either and want.job_id in busy else want


def touched(model: Model, call: op.Operation[Any], answer: Any) -> set[str]:
    """The jobs a call may have been changing, and all that share a key with one of them."""
    ids: set[str] = set()
    keys: set[tuple[str, str | None]] = set()
    match call:
        case op.Reserve():
            ids = {*model.expired(call.now, call.queue), *(job.id for job in answer)}
        case op.Reclaim():
            ids = set(model.expired(call.now, call.queue))
        case op.Enqueue(records=records):
            ids = {record.id for record in records} | {one.id for one in answer}
            keys = {(record.queue, record.key) for record in records}
        case op.Settle(settlements=batch) | op.ExtendLease(extensions=batch):
            ids = {one.job_id for one in batch}
        case op.CancelJobs(job_ids=job_ids) | op.Requeue(job_ids=job_ids):
            ids = set(job_ids)
        case op.CancelKeys(keys=named, queue=queue):
            keys = {(queue, key) for key in named}
    keys |= {(job.queue, job.key) for job in model.jobs.values() if job.id in ids}
    same_key = {job.id for job in model.jobs.values() if job.key is not None and (job.queue, job.key) in keys}
    return ids | same_key


def _reserve(
    model: Model, call: op.Reserve, answer: list[JobRecord], after: Snapshot, busy: Collection[str]
) -> list[JobRecord]:
    tokens = {job.id: job.token for job in answer}
    held = {(job.id, job.token) for job in after.jobs if job.token is not None}
    model.passed_over = frozenset(busy) - tokens.keys()
    model.left_expired = frozenset(
        one for one in busy if one in model.jobs and (one, model.jobs[one].token) in held
    )

    def token_for(job: JobRecord) -> str:
        token = tokens.get(job.id)
        if not token:
            raise Mismatch(f"reserve should have leased job {job.id}; it answered {list(tokens)}")
        return token

    model.token_for = token_for
    return model.reserve(**msgspec.structs.asdict(call))


def _extend(model: Model, call: op.ExtendLease, answer: list[Any]) -> list[Any]:
    expected: list[Any] = []
    for extension, got in zip(call.extensions, answer, strict=True):
        token = got.token if isinstance(got, Lease) else extension.token
        model.token_for = lambda job, token=token: token  # type: ignore[misc]
        expected += model.extend_lease([extension], lease_for=call.lease_for, now=call.now)
    return expected


def _reclaim(model: Model, call: op.Reclaim, after: Snapshot) -> int:
    due = model.expired(call.now, call.queue)
    if len(due) > call.limit:
        known = {row.seq for row in model.log}
        ended = [row.job_id for row in after.rows if row.seq not in known and row.outcome is Outcome.EXPIRED]
        due = _chosen("reclaim", ended, due, call.limit)
    return model.reclaim_jobs(due, now=call.now)


def _purge(model: Model, call: op.Purge, after: Snapshot) -> int:
    gone = model.jobs.keys() - {job.id for job in after.jobs}
    return model.forget(_chosen("purge", gone, model.purgeable(call.selection), call.limit))


def _prune(model: Model, call: op.Prune, after: Snapshot) -> int:
    gone = model.jobs.keys() - {job.id for job in after.jobs}
    jobs = _chosen("prune (jobs)", gone, model.prunable(call.now), call.limit)
    gone_rows = {row.seq for row in model.log} - {row.seq for row in after.rows}
    rows = _chosen("prune (attempt log)", gone_rows, model.prunable_rows(call.now), call.limit)
    return model.forget(jobs) + model.forget_rows(rows)


def _chosen(what: str, gone: Collection[Any], due: list[Any], limit: int) -> list[Any]:
    """The items that the driver took, as many as the limit allows of those that are due."""
    wrongly = [one for one in gone if one not in due]
    if wrongly:
        raise Mismatch(f"{what} took {wrongly}, which it must not touch; due were {due}")
    if len(gone) > limit:
        raise Mismatch(f"{what} took {len(gone)}, more than its limit of {limit}")
    if len(gone) < min(limit, len(due)):
        raise Mismatch(f"{what} took {sorted(gone)}, but due were {due} with a limit of {limit}")
    return list(gone)


def _failure_id(model: Model, after: Snapshot, dead: JobRecord, queue: str) -> str:
    for job in after.jobs:
        if job.type == FAILURE_TYPE and job.queue == queue and job.id not in model.jobs:
            try:
                payload = msgspec.json.decode(job.payload, type=FailurePayload)
            except msgspec.MsgspecError as broken:
                raise Mismatch(f"failure job {job.id} carries no FailurePayload: {job.payload!r}") from broken
            if payload.job_id == dead.id:
                return job.id
    raise Mismatch(f"job {dead.id} died, but the failure queue {queue!r} received no job for it")


def _adopt_flags(model: Model, after: Snapshot) -> None:
    """A dead job that is requeued as blocked has the flags it came with or, if those were dropped, the default."""
    for shown in after.jobs:
        job = model.jobs.get(shown.id)
        if job and job.state is JobState.BLOCKED and job.fence > 0 and shown.update is None:
            job.update = None
