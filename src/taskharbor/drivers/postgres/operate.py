"""The operator's changes, and the upkeep that workers do on the side."""

from __future__ import annotations

from collections.abc import Sequence

from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.postgres import arrays
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.inspect import settings_from
from taskharbor.drivers.postgres.rows import STATE_NUMBERS, STATES
from taskharbor.drivers.postgres.statements import load
from taskharbor.errors import JobError, JobFinished, JobNotDead, JobNotFound, KeyConflict
from taskharbor.jobs import TERMINAL_STATES, JobState, Micros

_CANCEL_ERRORS: dict[int, type[JobError]] = {-1: JobNotFound, -2: JobFinished}
_REQUEUE_ERRORS: dict[int, type[JobError]] = {-1: JobNotFound, -2: JobNotDead, -3: KeyConflict}
_FOREVER = 2**63 - 1


async def cancel(
    session: Session, schema: str, job_ids: Sequence[str], now: Micros, stir: int
) -> list[JobState | JobError]:
    codes = await session.value(load("operate", schema)["cancel"], [_ids(job_ids), now, stir])
    return _answers(job_ids, codes, _CANCEL_ERRORS)


async def requeue(
    session: Session, schema: str, job_ids: Sequence[str], now: Micros, stir: int, again: bool
) -> list[JobState | JobError]:
    codes = await session.value(load("operate", schema)["requeue"], [_ids(job_ids), now, stir, again])
    return _answers(job_ids, codes, _REQUEUE_ERRORS)


def _ids(job_ids: Sequence[str]) -> str:
    return arrays.text_array(list(job_ids))


def _answers(
    job_ids: Sequence[str], codes: Sequence[int], errors: dict[int, type[JobError]]
) -> list[JobState | JobError]:
    return [
        STATES[code] if code >= 0 else errors[code](job_id)
        for job_id, code in zip(job_ids, codes, strict=True)
    ]


async def purge(session: Session, schema: str, selection: JobFilter, limit: int) -> int:
    if selection.worker is not None:
        # A job that ended is nobody's.
        return 0
    states = TERMINAL_STATES if selection.states is None else TERMINAL_STATES & selection.states
    removed: int = await session.value(
        load("operate", schema)["purge"],
        [
            selection.queue,
            arrays.int_array(sorted(STATE_NUMBERS[state] for state in states)),
            None if selection.types is None else arrays.text_array(sorted(selection.types)),
            selection.key,
            _FOREVER if selection.finished_before_us is None else selection.finished_before_us,
            limit,
        ],
    )
    return removed


async def configure(session: Session, schema: str, queue: str, settings: QueueSettings, stir: int) -> None:
    values = [
        queue,
        settings.paused,
        settings.max_inflight,
        settings.failure_queue,
        settings.keep_done_us,
        settings.keep_dead_us,
        settings.keep_attempts_us,
        stir,
    ]
    await session.rows(load("operate", schema)["configure"], values)


async def settings_of(session: Session, schema: str, queue: str) -> QueueSettings:
    rows = await session.rows(load("operate", schema)["settings"], [queue])
    return settings_from(rows[0]) if rows else QueueSettings()


async def remove(session: Session, schema: str, job_ids: Sequence[str]) -> list[JobState | JobError]:
    rows = await session.rows(load("operate", schema)["remove"], {"ids": _ids(job_ids)})
    found: dict[str, int] = dict(rows)
    return [_removed(job_id, found.get(job_id)) for job_id in job_ids]


def _removed(job_id: str, state: int | None) -> JobState | JobError:
    if state is None:
        return JobNotFound(job_id)
    if not STATES[state].is_terminal:
        return JobError(job_id, f"the job is {STATES[state]} and has not ended: cancel it first")
    return STATES[state]
