"""A snapshot of all that a store shows, and its differences from the model.

A case rarely knows all that it should assert. The comparison of *everything visible* after every call finds errors that nobody
thought of. If the contract leaves something open (order of log rows within one call, whether flags outlive the blocked state),
the comparison leaves it open too, and only this module says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from taskharbor.drivers.contract import FAILURE_TYPE, AttemptPage, Driver, JobFilter, QueueStats
from taskharbor.errors import JobError
from taskharbor.jobs import DEFAULT_FLAGS, Attempt, JobRecord, JobState, Micros, Outcome
from taskharbor_testkit.model import Model

_BACK_TO_WAITING = {JobState.READY, JobState.SCHEDULED}


class Mismatch(AssertionError):
    """The driver and the contract disagree."""


class Snapshot(msgspec.Struct):
    jobs: list[JobRecord]
    """Newest accepted first, as listed."""
    stats: list[QueueStats]
    rows: list[Attempt]


async def take(driver: Driver, now: Micros) -> Snapshot:
    jobs = await list_all(driver, JobFilter(), now)
    return Snapshot(jobs, await driver.stats(now=now), (await read_log(driver)).attempts)


async def list_all(
    driver: Driver, selection: JobFilter, now: Micros, limit: int = 1000, cursor: str | None = None
) -> list[JobRecord]:
    jobs: list[JobRecord] = []
    while True:
        page = await driver.list_jobs(selection, now=now, limit=limit, cursor=cursor)
        jobs += page.jobs
        cursor = page.cursor
        if cursor is None:
            return jobs


async def read_log(driver: Driver, after: str | None = None, limit: int = 1000) -> AttemptPage:
    """Every row after the cursor, read page by page."""
    rows: list[Attempt] = []
    while True:
        page = await driver.read_attempts(after=after, limit=limit)
        rows += page.attempts
        after = page.cursor
        if not page.attempts:
            return AttemptPage(rows, page.cursor)


def compare(model: Model, shown: Snapshot, now: Micros, known_rows: set[int], known_jobs: set[str]) -> None:
    """Raise Mismatch with every difference; else let the model adopt what the driver was free to choose."""
    wrong = [
        *_compare_jobs(model, shown, now, known_jobs),
        *_compare_stats(model, shown, now),
        *_compare_rows(model, shown, known_rows),
    ]
    if wrong:
        raise Mismatch("\n".join(wrong))


def _compare_jobs(model: Model, shown: Snapshot, now: Micros, known: set[str]) -> Iterable[str]:
    expected = {job.id: job for job in model.listing(JobFilter(), now=now)}
    ids = [job.id for job in shown.jobs]
    if len(set(ids)) != len(ids):
        yield f"list_jobs shows a job more than once: {ids}"
    for missing in expected.keys() - set(ids):
        yield f"job {missing} is gone; it should be {expected[missing].state}"
    for job in shown.jobs:
        if job.id in expected:
            yield from (f"job {job.id}: {text}" for text in differences(expected[job.id], job))
        else:
            yield f"job {job.id} ({job.type} in {job.queue}, {job.state}) should not exist"
    new_failures = {job.id for job in shown.jobs if job.type == FAILURE_TYPE and job.id not in known}
    wanted_order = [job_id for job_id in expected if job_id not in new_failures]
    shown_order = [job_id for job_id in ids if job_id in expected and job_id not in new_failures]
    if wanted_order != shown_order and set(wanted_order) == set(shown_order):
        yield f"list_jobs is not newest accepted first: {shown_order}, should be {wanted_order}"
    elif set(ids) == set(expected):
        model.jobs = {job_id: model.jobs[job_id] for job_id in reversed(ids)}


def _compare_stats(model: Model, shown: Snapshot, now: Micros) -> Iterable[str]:
    expected = model.stats(now=now)
    names = [stats.queue for stats in shown.stats]
    if names != [stats.queue for stats in expected]:
        yield f"stats lists queues {names}, should list {[stats.queue for stats in expected]}"
        return
    for want, got in zip(expected, shown.stats, strict=True):
        if model.expired(now, want.queue):
            # Whether a lease that is over but not yet reclaimed counts as the head is left open.
            got = msgspec.structs.replace(got, head_run_at_us=want.head_run_at_us)
        yield from (f"stats of {want.queue}: {text}" for text in differences(want, got))


def _compare_rows(model: Model, shown: Snapshot, known: set[int]) -> Iterable[str]:
    seqs = [row.seq for row in shown.rows]
    if len(set(seqs)) < len(seqs):
        yield f"a number of the attempt log names two rows: {seqs}"
    newest: dict[str, int] = {}
    for row in shown.rows:
        # Of several writers who commit at once the log shows the rows in the order of commits; of one job in its own.
        if row.seq < newest.get(row.job_id, row.seq):
            yield f"the attempt log's seq does not increase for job {row.job_id}: {seqs}"
        newest[row.job_id] = row.seq
    old = [row for row in model.log if row.seq in known]
    if old != shown.rows[: len(old)]:
        yield f"rows of the attempt log changed or vanished: had {old}, now {shown.rows[: len(old)]}"
        return
    new = sorted((row for row in model.log if row.seq not in known), key=_row_key)
    got = sorted(shown.rows[len(old) :], key=_row_key)
    if [_row_key(row) for row in new] != [_row_key(row) for row in got]:
        yield f"new rows of the attempt log: {_brief(got)}, should be {_brief(new)}"
        return
    wrong = False
    for want, row in zip(new, got, strict=True):
        for text in differences(want, _row_as_open_as(want, row, want.seq in model.absorbed)):
            wrong = True
            yield f"log row {row.outcome} of job {row.job_id}: {text}"
    if not wrong:
        model.log = list(shown.rows)
        model.next_seq = max([model.next_seq, *(seq + 1 for seq in seqs)])
        model.absorbed = set()


def _row_key(row: Attempt) -> tuple[str, int, str, Micros]:
    return (row.job_id, row.fence, row.outcome, row.ended_at_us)


def _row_as_open_as(want: Attempt, row: Attempt, absorbed: bool) -> Attempt:
    changes: dict[str, Any] = {"seq": want.seq}
    if want.outcome is Outcome.REQUEUED:
        # "When the job was due for this execution": there was none, so any instant will do.
        changes["run_at_us"] = want.run_at_us
    if absorbed and {want.state, row.state} <= _BACK_TO_WAITING:
        # The row may tell of the job before or after it absorbed the blocked one.
        changes["state"] = want.state
    return msgspec.structs.replace(row, **changes)


def _brief(rows: Sequence[Attempt]) -> list[str]:
    return [f"{row.job_id} {row.outcome}->{row.state} fence {row.fence} at {row.ended_at_us}" for row in rows]


def differences(want: msgspec.Struct, got: msgspec.Struct) -> list[str]:
    wanted, shown = msgspec.structs.asdict(comparable(want)), msgspec.structs.asdict(comparable(got))
    wrong = [field for field in wanted if shown[field] != wanted[field]]
    return [f"{field} is {shown[field]!r}, should be {wanted[field]!r}" for field in wrong]


def comparable(item: msgspec.Struct) -> msgspec.Struct:
    """Flags mean something only while blocked, where none given means the default ones."""
    if isinstance(item, JobRecord):
        blocked = item.state is JobState.BLOCKED
        return msgspec.structs.replace(item, update=(item.update or DEFAULT_FLAGS) if blocked else None)
    return item


def same_answer(want: Any, got: Any) -> str | None:
    """None, or what is wrong with an answer."""
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return f"answered {got!r}, should answer {want!r}"
        texts = [same_answer(one, other) for one, other in zip(want, got, strict=True)]
        return next((f"item {n}: {text}" for n, text in enumerate(texts) if text), None)
    if isinstance(want, JobError):
        fits = type(got) is type(want) and got.job_id == want.job_id
        return None if fits else f"answered {got!r}, should answer {want!r}"
    if isinstance(want, msgspec.Struct) and type(want) is type(got):
        return "; ".join(differences(want, got)) or None
    return None if type(want) is type(got) and want == got else f"answered {got!r}, should answer {want!r}"
