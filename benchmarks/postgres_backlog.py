"""Millions of jobs put straight into the driver's tables, because enqueueing and running that many would take hours.

The rows are those that the driver itself would have written, counters included (`moves` is folded into `totals`
afterwards). Written against the tables of `drivers/postgres/migrations/`: who changes those changes this.
"""

from __future__ import annotations

import psycopg

SCHEMA = "taskharbor"
QUEUE = "default"

# As long as real ones, and in the order of their numbers.
_ID = "'0000000{}-0000-7000-8000-' || lpad(n::text, 12, '0')"
_WAITING_ID, _SCHEDULED_ID, _DONE_ID = (_ID.format(kind) for kind in range(3))
_NOW = "(extract(epoch from now()) * 1000000)::bigint"

_WAITING = f"""
    insert into jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload)
    select {_WAITING_ID}, %(queue)s, 'bench', {_NOW} - %(count)s + n, {_NOW} - %(count)s + n, 0, 3, 1, '0'
    from generate_series(1, %(count)s) as n
"""

# Due a day from now and later, a millisecond apart.
_SCHEDULED = f"""
    insert into jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload)
    select {_SCHEDULED_ID}, %(queue)s, 'bench', {_NOW} + 86400000000 + n * 1000, {_NOW}, 0, 3, 0, '0'
    from generate_series(1, %(count)s) as n
"""

# One done job and its row of the log per number, ten microseconds apart, the last of them a minute ago.
_FINISHED = f"""
    insert into finished (seq, run_at, created_at, finished_at, fence, queue_id, max_attempts, attempts, stalls, rank,
                          state, id, type, payload)
    select nextval('job_seq'), ended, ended, ended, 1, %(queue)s, 3, 0, 0, 0, 4, {_DONE_ID}, 'bench', '0'
    from generate_series(1, %(count)s) as n,
         lateral (select {_NOW} - 60000000 - (%(count)s - n) * 10 as ended) as at
"""
_LOGGED = f"""
    insert into attempts (job_id, queue_id, type, rank, fence, worker, created_at, run_at, reserved_at, lease_expires_at,
                          ended_at, outcome, state, payload_size)
    select {_DONE_ID}, %(queue)s, 'bench', 0, 1, 'bench', ended, ended, ended, ended + 60000000, ended, 0, 4, 1
    from generate_series(1, %(count)s) as n,
         lateral (select {_NOW} - 60000000 - (%(count)s - n) * 10 as ended) as at
"""


def fill_waiting(url: str, count: int) -> None:
    """`count` jobs that could be claimed at once."""
    _fill(
        url,
        count,
        _WAITING,
        "insert into moves (queue_id, ready, ranks, low_run_at, high_run_at) "
        "select %(queue)s, %(count)s, '{0}', min(run_at), max(run_at) from jobs where state = 1",
    )


def fill_scheduled(url: str, count: int) -> None:
    """`count` jobs that will be due, none of them today."""
    _fill(
        url,
        count,
        _SCHEDULED,
        "insert into moves (queue_id, scheduled, ranks, low_run_at) "
        "select %(queue)s, %(count)s, '{0}', min(run_at) from jobs where state = 0",
    )


def fill_history(url: str, count: int) -> None:
    """`count` jobs that are done and `count` rows of the attempt log."""
    _fill(
        url,
        count,
        _FINISHED,
        _LOGGED,
        "insert into moves (queue_id, done, done_total, latest_end) "
        "select %(queue)s, %(count)s, %(count)s, max(finished_at) from finished",
    )


def _fill(url: str, count: int, *statements: str) -> None:
    """The tables must be there already: whoever opens the store makes them."""
    with psycopg.connect(url, autocommit=True, options=f"-c search_path={SCHEMA}") as connection:
        with connection.transaction():
            row = connection.execute("select queue_id_of(%s)", (QUEUE,)).fetchone()
            for statement in statements:
                # Every bit of these comes from this file.
                connection.execute(statement, {"queue": row[0] if row else None, "count": count})  # type: ignore[arg-type]
            connection.execute("select fold()")
        connection.execute("vacuum analyze")
