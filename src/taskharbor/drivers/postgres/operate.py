"""The operator's changes and reads. The reads never wait for a writer and never make one wait."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from taskharbor.drivers.contract import JobFilter, Page, QueueSettings, QueueStats
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import READY, int_array, job_record, text_array
from taskharbor.drivers.records import STATE_NUMBERS, STATES, FieldNames, changed_fields, cursor_number
from taskharbor.errors import JobError, JobFinished, JobNotDead, JobNotFound, KeyConflict
from taskharbor.jobs import TERMINAL_STATES, JobRecord, JobState, Micros

_CANCEL_ERRORS: dict[int, type[JobError]] = {-1: JobNotFound, -2: JobFinished}
_REQUEUE_ERRORS: dict[int, type[JobError]] = {-1: JobNotFound, -2: JobNotDead, -3: KeyConflict}
_WINDOW = 10_000
"""Numbers that a listing searches for ended jobs before it looks further back, ten times as far each time."""


async def cancel(
    session: Session, job_ids: Sequence[str], now: Micros, only_waiting: bool
) -> list[JobState | JobError]:
    codes = await session.call("cancel_jobs", text_array(job_ids), now, only_waiting, session.stir)
    return _answers(job_ids, codes, _CANCEL_ERRORS)


async def cancel_keys(
    session: Session, keys: Sequence[str], queue: str, now: Micros, only_waiting: bool
) -> list[int]:
    how = (now, only_waiting, session.stir, session.is_repeated)
    counts: list[int] = await session.call("cancel_keys", text_array(keys), queue, *how)
    return counts


async def requeue(
    session: Session, job_ids: Sequence[str], now: Micros, run_at_us: Micros | None, keep_counts: bool
) -> list[JobState | JobError]:
    how = (now, run_at_us, keep_counts, session.stir, session.is_repeated)
    codes = await session.call("requeue_jobs", text_array(job_ids), *how)
    return _answers(job_ids, codes, _REQUEUE_ERRORS)


def _answers(
    job_ids: Sequence[str], codes: Sequence[int], errors: dict[int, type[JobError]]
) -> list[JobState | JobError]:
    return [
        STATES[code] if code >= 0 else errors[code](job_id)
        for job_id, code in zip(job_ids, codes, strict=True)
    ]


async def purge(session: Session, selection: JobFilter, limit: int) -> int:
    if selection.worker is not None:
        # A job that has ended has no worker.
        return 0
    ended = TERMINAL_STATES if selection.states is None else TERMINAL_STATES & selection.states
    states = int_array(sorted(STATE_NUMBERS[state] for state in ended))
    types = None if selection.types is None else text_array(sorted(selection.types))
    removed: int = await session.call(
        "purge", selection.queue, states, types, selection.key, selection.finished_before_us, limit
    )
    return removed


async def configure(
    session: Session, queue: str, settings: QueueSettings, _: Micros, fields: FieldNames, declares: bool
) -> None:
    changes = {name: getattr(settings, name) for name in changed_fields(fields, declares)}
    await session.call("change_settings", queue, msgspec.json.encode(changes).decode(), session.stir)


async def settings(session: Session, queue: str) -> QueueSettings:
    rows = await session.named("inspect", "settings", queue)
    return settings_from(rows[0]) if rows else QueueSettings()


def settings_from(row: Sequence[object]) -> QueueSettings:
    return msgspec.convert(dict(zip(QueueSettings.__struct_fields__, row, strict=True)), QueueSettings)


async def remove(session: Session, job_ids: Sequence[str]) -> list[JobState | JobError]:
    found: dict[str, int] = dict(await session.named("inspect", "remove", text_array(job_ids)))
    return [_removed(job_id, found.get(job_id)) for job_id in job_ids]


def _removed(job_id: str, state: int | None) -> JobState | JobError:
    if state is None:
        return JobNotFound(job_id)
    if not STATES[state].is_terminal:
        return JobError(job_id, f"the job is {STATES[state]} and has not ended: cancel it first")
    return STATES[state]


# -- looking without touching ------------------------------------------------------------------------------------


async def get(session: Session, job_ids: Sequence[str], now: Micros) -> list[JobRecord | None]:
    rows = await session.named("inspect", "get", text_array(job_ids))
    found = {job.id: job for job in (job_record(row, now) for row in rows)}
    return [found.get(job_id) for job_id in job_ids]


async def list_jobs(
    session: Session, selection: JobFilter, now: Micros, limit: int, cursor: str | None
) -> Page:
    before = (await session.named("inspect", "newest"))[0][0] if cursor is None else cursor_number(cursor)
    last = 0 if selection.until is None else cursor_number(selection.until)
    waiting = set(STATES) if selection.states is None else set(selection.states)
    if selection.worker is not None:
        # Only an inflight job has a worker.
        waiting &= {JobState.INFLIGHT}
    states = {STATE_NUMBERS[state] for state in waiting}
    # Only the clock tells which of them a job is.
    stored = states | {0, READY} if states & {0, READY} else states
    types = None if selection.types is None else text_array(sorted(selection.types))
    by_name = [selection.queue, types, selection.key]
    # One more than the limit shows whether anything follows.
    end = [selection.finished_before_us, limit + 1]
    may_live = not waiting <= TERMINAL_STATES
    if waiting == {JobState.DEAD}:
        rows = await session.named("inspect", "list_dead", before, *by_name, *end)
    else:
        window = max(_WINDOW, 10 * limit)
        while True:
            since = max(before - window, 0)
            values = [before, since, int_array(stored), now, int_array(states), may_live, *by_name]
            rows = await session.named("inspect", "list", *values, selection.worker, *end)
            if len(rows) > limit or since == 0:
                break
            window *= 10
    rows = [row for row in rows if row[0] >= last]
    jobs = [job_record(row, now) for row in rows[:limit]]
    return Page(jobs, str(rows[limit - 1][0]) if len(rows) > limit else None)


async def stats(session: Session, now: Micros, queue: str | None) -> list[QueueStats]:
    rows = await session.named("inspect", "stats", now, queue)
    if queue is not None and not rows:
        return [QueueStats(queue=queue, counts=dict.fromkeys(STATES, 0))]
    return [
        QueueStats(
            queue=row[0],
            counts=dict(zip(STATES, row[8:15], strict=True)),
            done_total=row[15],
            dead_total=row[16],
            cancelled_total=row[17],
            head_run_at_us=row[18],
            settings=settings_from(row[1:8]),
        )
        for row in rows
    ]
