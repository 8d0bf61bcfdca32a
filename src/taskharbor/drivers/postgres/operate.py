"""The operator's changes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import STATE_NUMBERS, STATES, int_array, text_array
from taskharbor.drivers.postgres.statements import call, load
from taskharbor.errors import JobError, JobFinished, JobNotDead, JobNotFound, KeyConflict
from taskharbor.jobs import TERMINAL_STATES, JobState, Micros

_CANCEL_ERRORS: dict[int, type[JobError]] = {-1: JobNotFound, -2: JobFinished}
_REQUEUE_ERRORS: dict[int, type[JobError]] = {-1: JobNotFound, -2: JobNotDead, -3: KeyConflict}
_FOREVER = 2**63 - 1


async def cancel(session: Session, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    codes = await session.call("cancel", text_array(job_ids), now, session.stir)
    return _answers(job_ids, codes, _CANCEL_ERRORS)


async def requeue(session: Session, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    codes = await session.call("requeue", text_array(job_ids), now, session.stir, session.is_repeated)
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
        # A job that ended is nobody's.
        return 0
    states = TERMINAL_STATES if selection.states is None else TERMINAL_STATES & selection.states
    removed: int = await session.call(
        "purge",
        selection.queue,
        int_array(sorted(STATE_NUMBERS[state] for state in states)),
        None if selection.types is None else text_array(sorted(selection.types)),
        selection.key,
        _FOREVER if selection.finished_before_us is None else selection.finished_before_us,
        limit,
    )
    return removed


async def configure(session: Session, queue: str, settings: QueueSettings, _: Micros) -> None:
    await session.call("configure", queue, *msgspec.structs.astuple(settings), session.stir)


async def settings_of(session: Session, queue: str) -> QueueSettings:
    rows = await session.rows(load("inspect", session.schema)["settings"], [queue])
    return settings_from(rows[0]) if rows else QueueSettings()


def settings_from(row: Sequence[object]) -> QueueSettings:
    return msgspec.convert(dict(zip(QueueSettings.__struct_fields__, row, strict=True)), QueueSettings)


async def remove(session: Session, job_ids: Sequence[str]) -> list[JobState | JobError]:
    rows = await session.rows(call("remove_jobs", session.schema, 1), [text_array(job_ids)])
    found: dict[str, int] = dict(rows)
    return [_removed(job_id, found.get(job_id)) for job_id in job_ids]


def _removed(job_id: str, state: int | None) -> JobState | JobError:
    if state is None:
        return JobNotFound(job_id)
    if not STATES[state].is_terminal:
        return JobError(job_id, f"the job is {STATES[state]} and has not ended: cancel it first")
    return STATES[state]
