"""One driver call as data, and its replay on the model.

The replay asks the driver's own answer for what the driver may choose (tokens, ids of failure jobs, which rows a
limit leaves for later) and decides everything else itself. Calls as data are also what lets concurrent calls be
checked: some order of them must explain what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from taskharbor.drivers.contract import FAILURE_TYPE, Driver, FailurePayload
from taskharbor.errors import JobNotInflight, LeaseExpired, LeaseMismatch
from taskharbor.jobs import JobRecord, JobState, Lease, Micros, Outcome
from taskharbor_testkit.conformance.snapshot import Mismatch, Snapshot, same_answer
from taskharbor_testkit.model import Model


class Call(msgspec.Struct, frozen=True):
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}

    def __str__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.method}({', '.join(given)})"


async def perform(driver: Driver, call: Call) -> Any:
    return await getattr(driver, call.method)(*call.args, **call.kwargs)


def replay(
    model: Model, call: Call, answer: Any, after: Snapshot, busy: Collection[str] = frozenset()
) -> None:
    """Apply the call to the model; raise Mismatch where the driver's answer cannot be right.

    `busy`: jobs that calls beside this one were changing, where the driver may pass over those."""
    if call.method == "reserve":
        model.passed_over = frozenset(busy) - {job.id for job in answer}
        held = {(job.id, job.token) for job in after.jobs if job.token is not None}
        model.left_expired = frozenset(
            job.id for job in model.jobs.values() if job.id in busy and (job.id, job.token) in held
        )
    model.failure_id_for = lambda dead, queue: _failure_id(model, after, dead, queue)
    special = _SPECIAL.get(call.method)
    if special is not None:
        expected = special(model, call, answer, after)
    else:
        expected = getattr(model, call.method)(*call.args, **call.kwargs)
    if call.method in ("settle", "extend_lease"):
        expected = [_seen_meanwhile(want, got, busy) for want, got in zip(expected, answer, strict=True)]
    wrong = same_answer(expected, answer)
    if wrong:
        raise Mismatch(f"{call.method} {wrong}")
    _adopt_flags(model, after)


def _seen_meanwhile(want: Any, got: Any, busy: Collection[str]) -> Any:
    """A call without the lease of a job that another call is changing is refused; by which error depends on the moment."""
    lost = (JobNotInflight, LeaseMismatch, LeaseExpired)
    is_either = isinstance(want, lost) and isinstance(got, lost) and want.job_id == got.job_id
    return got if is_either and want.job_id in busy else want


def touched(model: Model, call: Call, answer: Any) -> set[str]:
    """The jobs a call may have been changing, and all that share a key with one of them."""
    ids: set[str] = set()
    keys: set[tuple[str, str | None]] = set()
    if call.method in ("reserve", "reclaim"):
        queue = call.args[0] if call.method == "reserve" else call.kwargs.get("queue")
        ids |= set(model.expired(call.kwargs["now"], queue))
        if call.method == "reserve":
            ids |= {job.id for job in answer}
    elif call.method == "enqueue":
        ids |= {record.id for record in call.args[0]} | {one.id for one in answer}
        keys |= {(record.queue, record.key) for record in call.args[0]}
    elif call.method in ("settle", "extend_lease"):
        ids |= {one.job_id for one in call.args[0]}
    elif call.method in ("cancel", "requeue"):
        ids |= set(call.args[0])
    keys |= {(job.queue, job.key) for job in model.jobs.values() if job.id in ids}
    same_key = {job.id for job in model.jobs.values() if job.key is not None and (job.queue, job.key) in keys}
    return ids | same_key


def _reserve(model: Model, call: Call, answer: list[JobRecord], after: Snapshot) -> list[JobRecord]:
    tokens = {job.id: job.token for job in answer}

    def token_for(job: JobRecord) -> str:
        token = tokens.get(job.id)
        if not token:
            raise Mismatch(f"reserve should have leased job {job.id}; it answered {list(tokens)}")
        return token

    model.token_for = token_for
    return model.reserve(*call.args, **call.kwargs)


def _extend(model: Model, call: Call, answer: list[Any], after: Snapshot) -> list[Any]:
    expected: list[Any] = []
    for extension, got in zip(call.args[0], answer, strict=True):
        token = got.token if isinstance(got, Lease) else extension.token
        model.token_for = lambda job, token=token: token  # type: ignore[misc]
        expected += model.extend_lease([extension], **call.kwargs)
    return expected


def _reclaim(model: Model, call: Call, answer: int, after: Snapshot) -> int:
    now, limit = call.kwargs["now"], call.kwargs.get("limit", 1000)
    due = model.expired(now, call.kwargs.get("queue"))
    if len(due) > limit:
        known = {row.seq for row in model.log}
        ended = [row.job_id for row in after.rows if row.seq not in known and row.outcome is Outcome.EXPIRED]
        due = _chosen("reclaim", ended, due, (), limit)
    model.reclaim_jobs(due, now=now)
    return len(due)


def _purge(model: Model, call: Call, answer: int, after: Snapshot) -> int:
    gone = model.jobs.keys() - {job.id for job in after.jobs}
    chosen = _chosen("purge", gone, model.purgeable(call.args[0]), (), call.kwargs.get("limit", 1000))
    model.forget(chosen)
    return len(chosen)


def _prune(model: Model, call: Call, answer: int, after: Snapshot) -> int:
    now, limit = call.kwargs["now"], call.kwargs.get("limit", 1000)
    ages = {job.id: model.overdue(job, now) for job in model.jobs.values()}
    gone = model.jobs.keys() - {job.id for job in after.jobs}
    jobs = _chosen("prune (jobs)", gone, *_by_age(ages), limit)
    model.forget(jobs)
    row_ages = {row.seq: model.overdue_row(row, now) for row in model.log}
    gone_rows = row_ages.keys() - {row.seq for row in after.rows}
    rows = set(_chosen("prune (attempt log)", gone_rows, *_by_age(row_ages), limit))
    model.log = [row for row in model.log if row.seq not in rows]
    return len(jobs) + len(rows)


_SPECIAL: dict[str, Callable[[Model, Call, Any, Snapshot], Any]] = {
    "reserve": _reserve,
    "extend_lease": _extend,
    "reclaim": _reclaim,
    "purge": _purge,
    "prune": _prune,
}


def _by_age(ages: dict[Any, Micros | None]) -> tuple[list[Any], list[Any]]:
    """Those that must go, and those whose time is exactly up: the contract leaves that instant open."""
    due = [one for one, age in ages.items() if age is not None and age > 0]
    return due, [one for one, age in ages.items() if age == 0]


def _chosen(
    what: str, gone: Collection[Any], due: list[Any], open_: Collection[Any], limit: int
) -> list[Any]:
    """The items that the driver took, if it was free to take just those."""
    wrongly = [one for one in gone if one not in due and one not in open_]
    if wrongly:
        raise Mismatch(f"{what} took {wrongly}, which it must not touch; due were {due}")
    if len(gone) > limit:
        raise Mismatch(f"{what} took {len(gone)}, more than its limit of {limit}")
    if len(gone) < min(limit, len(due)) or (len(due) + len(open_) <= limit and not set(due) <= set(gone)):
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
    for job in model.jobs.values():
        if job.state is JobState.BLOCKED and job.fence > 0:
            shown = after.job(job.id)
            if shown is not None and shown.update is None:
                job.update = None
