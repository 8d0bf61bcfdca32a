"""Inspection: jobs, their history, queues at a glance."""

from __future__ import annotations

import functools

import msgspec
from msgspec import UnsetType

from taskharbor.broker.answered import Attempts, Job, JobAttempts, Jobs, QueueView, Stats
from taskharbor.broker.asked import AttemptsQuery, Instant, JobsQuery, StatsQuery
from taskharbor.broker.operations import Call, route
from taskharbor.broker.problems import Problem
from taskharbor.broker.views import attempt_row, job_of, queue_numbers, queue_view
from taskharbor.drivers.contract import JobFilter
from taskharbor.errors import JobNotFound
from taskharbor.jobs import Micros, to_micros

_get = functools.partial(route, "GET", tag="look")


@_get("/v1/jobs", "Jobs by filter, newest accepted first.", query=JobsQuery)
async def list_jobs(call: Call) -> Jobs:
    asked: JobsQuery = call.query
    service = call.service
    selection = JobFilter(
        queue=asked.queue or None,
        states=frozenset(asked.state) or None,
        types=frozenset(asked.type) or None,
        key=asked.key or None,
        worker=asked.worker or None,
        finished_before_us=_instant(asked.finished_before),
    )
    page = await service.driver.list_jobs(
        selection, now=service.now(), limit=asked.limit, cursor=asked.cursor or None
    )
    return Jobs([job_of(record, payload=asked.payload) for record in page.jobs], page.cursor)


def _instant(text: str | UnsetType) -> Micros | None:
    if isinstance(text, UnsetType):
        return None
    try:
        return to_micros(msgspec.convert(text, Instant))
    except msgspec.ValidationError:
        raise Problem(
            422, "invalid_request", "finished_before must be a time with a zone, like 2026-08-01T09:30:00Z"
        ) from None


@_get("/v1/jobs/{id}", "One job, with its payload and result.", problems=(404,))
async def get_job(call: Call) -> Job:
    job_id, service = call.names["id"], call.service
    (record,) = await service.driver.get([job_id], now=service.now())
    if record is None:
        raise JobNotFound(job_id)
    return job_of(record, payload=True)


@_get("/v1/jobs/{id}/attempts", "How the leases of one job ended, in order.")
async def job_attempts(call: Call) -> JobAttempts:
    rows = await call.service.driver.job_attempts(call.names["id"])
    return JobAttempts([attempt_row(row) for row in rows])


@_get(
    "/v1/attempts",
    "The attempt log of all queues, from the beginning or after a cursor.",
    query=AttemptsQuery,
)
async def read_attempts(call: Call) -> Attempts:
    asked: AttemptsQuery = call.query
    page = await call.service.driver.read_attempts(after=asked.after or None, limit=asked.limit)
    return Attempts([attempt_row(row) for row in page.attempts], page.cursor)


@_get("/v1/stats", "Every queue, or one, at a glance.", query=StatsQuery)
async def stats(call: Call) -> Stats:
    asked: StatsQuery = call.query
    now = call.service.now()
    queues = [
        queue_numbers(one, now) for one in await call.service.driver.stats(now=now, queue=asked.queue or None)
    ]
    return Stats(completed_total=sum(one.done_total for one in queues), queues=queues)


@_get("/v1/queues/{name}", "A queue's settings; the defaults where none were made.")
async def get_queue(call: Call) -> QueueView:
    name = call.names["name"]
    return queue_view(name, await call.service.driver.settings(name))
