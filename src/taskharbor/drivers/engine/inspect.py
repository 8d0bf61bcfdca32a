"""Looking without touching: on the reader's connection, so no look ever waits for a writer or holds one up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from taskharbor.drivers.contract import AttemptPage, JobFilter, Page, QueueSettings, QueueStats
from taskharbor.drivers.engine.tables import State, Transaction, load, record_from_row, to_json
from taskharbor.drivers.records import STATE_NUMBERS, STATES, cursor_number, loaded, numbered_attempt
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros

_SQL = load("inspect")

_FEW = 10_000
"""Up to so many jobs in the wanted states are gathered by index and sorted; more are dense enough to scan."""
FOREVER = 2**63 - 1

_decode_versions = msgspec.json.Decoder(list[tuple[str, int]]).decode


def get(transaction: Transaction, job_ids: Sequence[str], now: Micros) -> list[JobRecord | None]:
    wanted = list(dict.fromkeys(job_ids))
    rows = transaction.execute(_SQL["by_id"], (to_json(wanted),)).fetchall()
    by_id = {row[1]: row for row in rows}
    found = {job_id: loaded(job_id, record_from_row, row, now) for job_id, row in by_id.items()}
    return [found.get(job_id) for job_id in job_ids]


def list_jobs(
    transaction: Transaction, selection: JobFilter, now: Micros, limit: int, cursor: str | None
) -> Page:
    before = FOREVER if cursor is None else cursor_number(cursor)
    until = 0 if selection.until is None else cursor_number(selection.until)
    # One more than asked for tells whether anything follows.
    found = find_jobs(transaction, selection, now, limit + 1, before, until)
    page = found[:limit]
    return Page([job for _, job in page], str(page[-1][0]) if len(found) > limit else None)


def find_jobs(
    transaction: Transaction, selection: JobFilter, now: Micros, limit: int, before: int, until: int = 0
) -> list[tuple[int, JobRecord]]:
    """Jobs with their numbers, the newest first, from below `before` down to `until`."""
    seqs = _seqs(transaction, selection, now, limit, before, until)
    rows = transaction.execute(_SQL["by_seq"], (to_json(seqs),)).fetchall()
    return [(row[0], loaded(str(row[1]), record_from_row, row, now)) for row in rows]


def _seqs(
    transaction: Transaction, selection: JobFilter, now: Micros, limit: int, before: int, until: int
) -> list[int]:
    numbers = None if selection.states is None else sorted(STATE_NUMBERS[state] for state in selection.states)
    queue: int | None = None
    counters: Sequence[int] = ()
    if selection.queue is not None:
        row = transaction.execute(_SQL["counters"], (selection.queue,)).fetchone()
        if row is None:
            return []
        queue, *counters = row
    values = {
        "before": before,
        "until": until,
        "queue": queue,
        "states": None if numbers is None else to_json(numbers),
        "types": None if selection.types is None else to_json(sorted(selection.types)),
        "key": selection.key,
        "worker": selection.worker,
        "finished_before": selection.finished_before_us,
        "now": now,
        "limit": limit,
    }
    if queue is not None and numbers is not None and JobState.BLOCKED not in (selection.states or ()):
        # A scheduled job that is due reads as ready, so a filter for ready jobs reads both states.
        stored = set(numbers) | ({State.SCHEDULED} if State.READY in numbers else set())
        if sum(counters[number] for number in stored) <= _FEW:
            flags = {state.value: number in stored for number, state in enumerate(STATES)}
            return [seq for (seq,) in transaction.execute(_SQL["gather"], values | flags)]
    return [seq for (seq,) in transaction.execute(_SQL["scan"], values)]


def stats(transaction: Transaction, now: Micros, queue: str | None) -> list[QueueStats]:
    rows = transaction.execute(_SQL["stats"], {"queue": queue}).fetchall()
    if queue is not None and not rows:
        return [QueueStats(queue=queue, counts=dict.fromkeys(STATES, 0))]
    return [_stats_from(transaction, row, now) for row in rows]


def _stats_from(transaction: Transaction, row: tuple[Any, ...], now: Micros) -> QueueStats:
    number = row[1]
    counts = dict(zip(STATES, row[2:9], strict=True))
    heads: list[tuple[int, int]] = []
    if counts[JobState.READY]:
        # Somebody who deletes rows by hand leaves the counters behind.
        heads += transaction.execute(_SQL["head_ready"], (number,))
    if counts[JobState.SCHEDULED]:
        levels = transaction.fetch(_SQL["due_scheduled"], {"queue": number, "now": now})
        for priority, run_at, due in levels:
            counts[JobState.SCHEDULED] -= due
            counts[JobState.READY] += due
            heads += [] if run_at is None else [(priority, run_at)]
    return QueueStats(
        queue=row[0],
        counts=counts,
        done_total=row[9],
        dead_total=row[10],
        cancelled_total=row[11],
        head_run_at_us=min(heads)[1] if heads else None,
        settings=_settings_from(row[12:]),
    )


def settings(transaction: Transaction, queue: str) -> QueueSettings:
    row = transaction.execute(_SQL["settings"], (queue,)).fetchone()
    return QueueSettings() if row is None else _settings_from(row)


def _settings_from(row: Sequence[Any]) -> QueueSettings:
    paused, *others = row
    return QueueSettings(**dict(zip(QueueSettings.__struct_fields__, (bool(paused), *others), strict=True)))


def read_attempts(transaction: Transaction, after: str | None, limit: int) -> AttemptPage:
    start = 0 if after is None else cursor_number(after)
    found = attempts_between(transaction, start, FOREVER, limit)
    return AttemptPage(found, str(found[-1].seq if found else start))


def attempts_between(transaction: Transaction, after: int, until: int, limit: int) -> list[Attempt]:
    rows = transaction.execute(_SQL["attempts"], (after, until, limit)).fetchall()
    return [numbered_attempt(row) for row in rows]


def job_attempts(transaction: Transaction, job_id: str) -> list[Attempt]:
    is_kept = transaction.execute(_SQL["is_kept"], {"id": job_id}).fetchone() is not None
    rows = transaction.execute(
        _SQL["job_attempts" if is_kept else "removed_job_attempts"], {"id": job_id}
    ).fetchall()
    return [numbered_attempt(row) for row in rows]


def watch(
    transaction: Transaction, queues: Sequence[str], since: Micros
) -> tuple[dict[str, int], Micros | None]:
    """Versions of the queues, and when the next scheduled job or lease comes due after `since`."""
    text, run_at, expires_at = transaction.execute(
        _SQL["watch"], {"queues": to_json(list(queues)), "since": since}
    ).fetchone()
    due = [instant for instant in (run_at, expires_at) if instant is not None]
    return dict(_decode_versions(text)), min(due, default=None)
