"""Ending leases that are over: the job goes back to its place, or ends where it has stalled too often."""

from __future__ import annotations

import msgspec

from taskharbor.drivers.contract import EXPIRED_ERROR
from taskharbor.drivers.engine.job import Job
from taskharbor.drivers.engine.queues import known_queue_id
from taskharbor.drivers.engine.rows import CANCELLED, DEAD
from taskharbor.drivers.engine.statements import Transaction, load
from taskharbor.drivers.engine.unit import EXPIRED, Unit
from taskharbor.jobs import Micros

_SQL = load("unit")
_decode_ids = msgspec.json.Decoder(list[str]).decode
_decode_queues = msgspec.json.Decoder(list[int]).decode


def reclaim(transaction: Transaction, now: Micros, queue: str | None, limit: int) -> int:
    if queue is not None:
        number = known_queue_id(transaction, queue)
        return 0 if number is None else reclaim_queue(transaction, number, now, limit)
    (text,) = transaction.connection.execute(_SQL["queues_with_leases"]).fetchone()
    ended = 0
    for number in _decode_queues(text):
        ended += reclaim_queue(transaction, number, now, limit - ended)
    return ended


def reclaim_queue(transaction: Transaction, queue: int, now: Micros, limit: int) -> int:
    if limit < 1:
        return 0
    (text,) = transaction.connection.execute(_SQL["load_expired"], (queue, now, limit)).fetchone()
    job_ids = _decode_ids(text)
    if not job_ids:
        return 0
    unit = Unit(transaction, now)
    unit.load(job_ids)
    for job_id in job_ids:
        job = unit.job(job_id)
        assert job is not None
        _expire(unit, job)
    unit.flush()
    return len(job_ids)


def _expire(unit: Unit, job: Job) -> None:
    job.stalls += 1
    if job.cancel_requested:
        unit.end(job, CANCELLED, EXPIRED, EXPIRED_ERROR)
    elif job.attempts + job.stalls >= job.max_attempts or 0 < job.max_stalls <= job.stalls:
        job.last_error = EXPIRED_ERROR.text
        unit.end(job, DEAD, EXPIRED, EXPIRED_ERROR)
    else:
        unit.back_to_waiting(job, EXPIRED, error=EXPIRED_ERROR)
