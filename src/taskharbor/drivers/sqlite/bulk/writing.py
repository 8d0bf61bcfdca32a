"""Bulk writing: tasks stage chunks in short transactions, publishing moves them all into the queue in one.

One writer at a time is SQLite's rule, so publishing holds up everybody else for as long as it takes (about ten microseconds
per job): keep a single write below what `busy_timeout` of the others allows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TypeVar

import msgspec

from taskharbor.bulk.chunks import chunked, pack, unpack
from taskharbor.bulk.contract import BulkStore, StagingLost
from taskharbor.bulk.write_ids import SINGLE, series_of
from taskharbor.drivers.contract import DAY
from taskharbor.drivers.sqlite.connection import Connection, begin, open_connection, translated
from taskharbor.drivers.sqlite.counts import Counts
from taskharbor.drivers.sqlite.database import Transaction
from taskharbor.drivers.sqlite.enqueue import enqueue
from taskharbor.drivers.sqlite.migrations import apply_pending
from taskharbor.drivers.sqlite.notifications import notify
from taskharbor.drivers.sqlite.options import Options, parse_url
from taskharbor.drivers.sqlite.rows import STATES, to_json
from taskharbor.drivers.sqlite.statements import load
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import JobRecord, JobState, Micros

T = TypeVar("T")

KEEP_STAGED = 3 * DAY
KEEP_PUBLISHED = 30 * DAY
KEEP_SERIES = 400 * DAY

_SQL = load("bulk_writing")
_REMOVE = load("remove")
_decode_found = msgspec.json.Decoder(list[tuple[str, int, int, int]]).decode


class SQLiteWriting(BulkStore):
    """Every call opens a connection of its own: it may run in another process than the one before."""

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        options = parse_url(self.url)
        place = series_of(write)
        count = number = 0
        with closing(_open(options)) as connection:
            # What is staged reaches the disk with the commit that publishes it; until then nobody relies on it.
            connection.execute("PRAGMA synchronous = NORMAL")

            def put(chunk: bytes | None) -> None:
                def insert(transaction: Transaction) -> None:
                    values = (write, task, number, time.time_ns() // 1000, chunk, *place)
                    transaction.connection.execute(_SQL["stage"], values)

                _run(connection, options, insert)

            for jobs in chunked(batches):
                put(pack(jobs))
                number += 1
                count += len(jobs)
            put(None)
        return count

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros) -> int:
        options = parse_url(self.url)
        with closing(_open(options)) as connection:
            return _run(connection, options, lambda transaction: _publish(transaction, write, tasks, now))

    def abandon(self, write: str) -> None:
        options = parse_url(self.url)

        def forget(transaction: Transaction) -> None:
            series, number = series_of(write)
            if number == SINGLE:
                # A task that comes late must leave nothing behind. A series goes on, and may stage this write again.
                transaction.connection.execute(_SQL["mark"], (series, number, time.time_ns() // 1000, None))
            transaction.connection.execute(_SQL["forget"], (write,))

        with closing(_open(options)) as connection:
            _run(connection, options, forget)

    def remove(self, job_ids: Sequence[str]) -> list[JobState | JobError]:
        options = parse_url(self.url)
        with closing(_open(options)) as connection:
            return _run(connection, options, lambda transaction: _remove(transaction, job_ids))


def _open(options: Options) -> Connection:
    connection = open_connection(options, writing=True)
    try:
        apply_pending(connection, options)
    except BaseException as error:
        connection.close()
        if isinstance(error, Exception):
            raise translated(error, options.path) from error
        raise
    return connection


def _run(connection: Connection, options: Options, work: Callable[[Transaction], T]) -> T:
    """One transaction, and a notification of waiters where there is something for them."""
    try:
        begin(connection, options.busy_timeout)
        transaction = Transaction(connection)
        try:
            answer = work(transaction)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    except Exception as error:
        raise translated(error, options.path) from error
    if transaction.notifies:
        notify(os.path.realpath(options.path))
    return answer


def _publish(transaction: Transaction, write: str, tasks: Sequence[str], now: Micros) -> int:
    execute = transaction.connection.execute
    series, number = series_of(write)
    known = execute(_SQL["published"], (series,)).fetchone()
    if known is not None and known[0] >= number:
        execute(_SQL["forget"], (write,))
        return known[1] or 0 if known[0] == number else 0
    complete = {task for (task,) in execute(_SQL["complete_tasks"], (write,))}
    missing = [task for task in tasks if task not in complete]
    if missing:
        raise StagingLost(
            f"what the tasks {', '.join(missing)} of {write} had staged is gone: nothing was published, write it again"
        )
    added = 0
    for task in dict.fromkeys(tasks):
        for (chunk,) in execute(_SQL["chunks"], (write, task)):
            added += sum(not answer.existed for answer in enqueue(transaction, unpack(chunk), now))
    execute(_SQL["forget"], (write,))
    clock = time.time_ns() // 1000
    execute(_SQL["mark"], (series, number, clock, added))
    execute(_SQL["forget_old_staged"], (clock - KEEP_STAGED,))
    execute(_SQL["forget_old_published"], (clock - KEEP_PUBLISHED, clock - KEEP_SERIES))
    return added


def _remove(transaction: Transaction, job_ids: Sequence[str]) -> list[JobState | JobError]:
    execute = transaction.connection.execute
    (text,) = execute(_SQL["find"], (to_json(list(dict.fromkeys(job_ids))),)).fetchone()
    counts = Counts(transaction)
    answers: dict[str, JobState | JobError] = {}
    gone: list[int] = []
    for job_id, seq, queue, number in _decode_found(text):
        state = STATES[number]
        if state.is_terminal:
            gone.append(seq)
            counts.move(queue, number, None)
            answers[job_id] = state
        else:
            answers[job_id] = JobError(job_id, f"the job is {state} and has not ended: cancel it first")
    for table in ("payloads", "results", "idempotency", "jobs"):
        execute(_REMOVE[table], (to_json(gone),))
    counts.flush()
    return [answers.get(job_id) or JobNotFound(job_id) for job_id in job_ids]
