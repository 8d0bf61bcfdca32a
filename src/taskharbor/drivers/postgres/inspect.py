"""Looking without touching: plain reads that never wait for a writer or hold one up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, LiteralString

from taskharbor.drivers.contract import JobFilter, Page, QueueSettings, QueueStats
from taskharbor.drivers.postgres import arrays
from taskharbor.drivers.postgres.connections import Session
from taskharbor.drivers.postgres.rows import (
    DEAD,
    INFLIGHT,
    READY,
    SCHEDULED,
    STATE_NUMBERS,
    STATES,
    record_from_row,
)
from taskharbor.drivers.postgres.statements import load
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, Micros

_WINDOW = 10_000
"""Numbers looked through for jobs that ended before a listing looks further back, ten times as far each time."""


@cache
def _with_columns(name: str, schema: str) -> LiteralString:
    sql = load("inspect", schema)
    return (
        sql[name]
        .replace("/*live_columns*/", sql["live_columns"])
        .replace("/*ended_columns*/", sql["ended_columns"])
    )


async def get(session: Session, schema: str, job_ids: Sequence[str], now: Micros) -> list[JobRecord | None]:
    wanted = arrays.text_array(list(dict.fromkeys(job_ids)))
    rows = await session.rows(_with_columns("get", schema), {"ids": wanted})
    by_id = {row[2]: row for row in rows}
    return [record_from_row(by_id[job_id], now) if job_id in by_id else None for job_id in job_ids]


async def list_jobs(
    session: Session, schema: str, selection: JobFilter, now: Micros, limit: int, cursor: str | None
) -> Page:
    before = await session.value(load("inspect", schema)["newest"]) if cursor is None else _number(cursor)
    values: dict[str, Any] = {
        "before": before,
        # One more than asked for tells whether anything follows.
        "limit": limit + 1,
        "now": now,
        "queue": selection.queue,
        "types": None if selection.types is None else arrays.text_array(sorted(selection.types)),
        "key": selection.key,
        "worker": selection.worker,
        "finished_before": selection.finished_before_us,
    }
    parts = _parts(schema, selection)
    if not parts:
        return Page([], None)
    statement = load("inspect", schema)["list"].replace("/*parts*/", " UNION ALL ".join(parts))
    window = max(_WINDOW, 10 * limit)
    while True:
        values["from"] = max(before - window, 0)
        rows = await session.rows(statement, values)
        if (len(rows) > limit and rows[limit][0] >= values["from"]) or values["from"] == 0:
            break
        window *= 10
    if selection.until is not None:
        last = _number(selection.until)
        rows = [row for row in rows if row[0] >= last]
    jobs = [record_from_row(row, now) for row in rows[:limit]]
    return Page(jobs, str(rows[limit - 1][0]) if len(rows) > limit else None)


def _parts(schema: str, selection: JobFilter) -> list[LiteralString]:
    """One query per table that can hold what is asked for, with conditions its indexes know."""
    states = range(7) if selection.states is None else sorted(STATE_NUMBERS[one] for one in selection.states)
    filters = [
        condition
        for is_given, condition in (
            (selection.queue is not None, "q.name = %(queue)s"),
            (selection.types is not None, "j.type = ANY (%(types)s::text[])"),
            (selection.key is not None, "j.key = %(key)s"),
        )
        if is_given
    ]
    parts = []
    live = [_LIVE[state] for state in states if state <= INFLIGHT]
    if live and selection.finished_before_us is None:
        worker = [] if selection.worker is None else ["j.worker = %(worker)s", "j.state = 3"]
        parts.append(_part("list_live", schema, live, filters + worker))
    if selection.worker is None:
        # A job that ended is nobody's.
        ended = [] if selection.finished_before_us is None else ["j.finished_at < %(finished_before)s"]
        finished = [f"j.state = {state}" for state in states if state > INFLIGHT and state != DEAD]
        if finished:
            parts.append(_part("list_finished", schema, finished, filters + ended))
        if DEAD in states:
            parts.append(_part("list_dead", schema, ["true"], filters + ended))
    return parts


_LIVE = {
    SCHEDULED: "j.state <= 1 AND j.run_at > %(now)s",
    READY: "j.state <= 1 AND j.run_at <= %(now)s",
    2: "j.state = 2",
    INFLIGHT: "j.state = 3",
}


def _part(
    name: str, schema: str, states: Sequence[LiteralString], filters: Sequence[LiteralString]
) -> LiteralString:
    statement = _with_columns(name, schema).replace("/*states*/", " OR ".join(states))
    return statement.replace("/*filters*/", "".join([f"AND {condition} " for condition in filters]))


async def stats(session: Session, schema: str, now: Micros, queue: str | None) -> list[QueueStats]:
    rows = await session.rows(load("inspect", schema)["stats"], {"now": now, "queue": queue})
    if queue is not None and not rows:
        return [QueueStats(queue=queue, counts=dict.fromkeys(STATES, 0))]
    return [
        QueueStats(
            queue=row[0],
            counts=dict(zip(STATES, row[7:14], strict=True)),
            done_total=row[14],
            dead_total=row[15],
            cancelled_total=row[16],
            head_run_at_us=row[17],
            settings=settings_from(row[1:7]),
        )
        for row in rows
    ]


def settings_from(row: Sequence[Any]) -> QueueSettings:
    paused, max_inflight, failure_queue, keep_done, keep_dead, keep_attempts = row
    return QueueSettings(
        paused=paused,
        max_inflight=max_inflight,
        failure_queue=failure_queue,
        keep_done_us=keep_done,
        keep_dead_us=keep_dead,
        keep_attempts_us=keep_attempts,
    )


def _number(cursor: str) -> int:
    if not (cursor.isdecimal() and len(cursor) < 19):
        raise InvalidRequest(f"{cursor!r} is not a cursor of this store: pass on what the last page gave")
    return int(cursor)
