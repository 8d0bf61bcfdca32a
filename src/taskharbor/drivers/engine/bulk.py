"""Bulk reading and writing: the attempt log as one dense stream, blobs in a table, publishing in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from taskharbor.bulk.publish_staged import KEEP_SERIES, KEEP_SINGLE
from taskharbor.bulk.stage import unpack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import JobShare, LogPage, LogState, LogStream
from taskharbor.drivers.engine.enqueue import enqueue
from taskharbor.drivers.engine.inspect import attempts_between
from taskharbor.drivers.engine.operate import remove_jobs
from taskharbor.drivers.engine.tables import Transaction, load, to_json
from taskharbor.drivers.records import STATES
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import JobState

_SQL = load("bulk")


def log_streams(transaction: Transaction) -> LogState:
    """One writer at a time: numbers are in the order of commits."""
    store_id, trimmed, last = transaction.execute(_SQL["log"]).fetchone()
    return LogState(store_id, [LogStream(name="", queue=None, last=last, trimmed=trimmed, is_dense=True)])


def read_log(transaction: Transaction, stream: str, after: int, until: int, limit: int) -> LogPage:
    found = attempts_between(transaction, after, until, limit)
    return LogPage(found, found[-1].seq if len(found) == limit else until)


def split_jobs(transaction: Transaction, queue: str | None, parts: int) -> list[JobShare]:
    first, last = transaction.execute(_SQL["range_of_jobs"]).fetchone()
    # Newest first: a listing goes on below its cursor.
    inner = sorted({first + (last + 1 - first) * n // parts for n in range(1, parts)}, reverse=True)
    edges = [None, *map(str, inner), None]
    return [JobShare(queue=queue, after=after, until=until) for after, until in pairwise(edges)]


def remove(transaction: Transaction, job_ids: Sequence[str]) -> list[JobState | JobError]:
    answers: dict[str, JobState | JobError] = {}
    gone: list[tuple[int, int, int]] = []
    wanted = to_json(list(dict.fromkeys(job_ids)))
    for job_id, seq, queue, number in transaction.fetch(_SQL["find"], (wanted,)):
        state = STATES[number]
        if state.is_terminal:
            gone.append((seq, queue, number))
            answers[job_id] = state
        else:
            answers[job_id] = JobError(job_id, f"the job is {state} and has not ended: cancel it first")
    remove_jobs(transaction, gone)
    return [answers.get(job_id) or JobNotFound(job_id) for job_id in job_ids]


# -- blobs ----------------------------------------------------------------------------------------------------


def put_blob(transaction: Transaction, name: str, data: bytes, swaps: bool, expected: bytes | None) -> bool:
    how = "put" if not swaps else "create" if expected is None else "replace"
    values = {"name": name, "data": data, "expected": expected}
    return transaction.execute(_SQL[how], values).rowcount == 1


def read_blobs(transaction: Transaction, names: Sequence[str]) -> list[bytes | None]:
    rows = [transaction.execute(_SQL["blob"], (name,)).fetchone() for name in names]
    return [None if row is None else row[0] for row in rows]


def list_blobs(transaction: Transaction, folder: str) -> list[str]:
    return [name for (name,) in transaction.execute(_SQL["names"], (folder,))]


def drop_blobs(transaction: Transaction, names: Sequence[str]) -> list[None]:
    transaction.execute(_SQL["drop"], (to_json(list(names)),))
    return [None] * len(names)


def publish_blobs(transaction: Transaction, *fields: Any) -> dict[str, int]:
    call = op.PublishBlobs(*fields)

    def add() -> int:
        added = 0
        for name in call.names:
            (data,) = read_blobs(transaction, [name])
            jobs = [] if data is None else unpack(data)
            added += sum(not answer.existed for answer in enqueue(transaction, jobs, call.now))
        return added

    return {"": publish_once(transaction, call, add)}


def publish_once(transaction: Transaction, call: op.PublishBlobs, add: Callable[[], int]) -> int:
    """Add the jobs of a portion unless the store has them; how many of the write's jobs became jobs so far."""
    known = transaction.execute(_SQL["portion"], (call.series,)).fetchone() or (call.number, 0, 0)
    added: int = known[2] if known[0] == call.number else 0
    if known[:2] < (call.number, call.portion):
        added += add()
        transaction.execute(_SQL["note"], (call.series, call.number, call.portion, added, call.now))
        transaction.execute(_SQL["forget_notes"], (call.now - KEEP_SINGLE, call.now - KEEP_SERIES))
    return added
