"""Routes of operators: the broker's health, inspection of jobs and queues, cancel, requeue, purge, settings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UnsetType

import taskharbor
from taskharbor.broker import models
from taskharbor.broker.problems import invalid
from taskharbor.broker.routes import HandleJobs, Reply, RouteCall, route, route_many, route_one
from taskharbor.drivers.dispatch import check
from taskharbor.drivers.operations import Cancel, Requeue
from taskharbor.drivers.records import JobFilter, QueueSettings
from taskharbor.errors import JobError, JobNotFound, TaskHarborError
from taskharbor.jobs import Micros, to_datetime, to_micros

# -- the broker ---------------------------------------------------------------------------------------------

_state = functools.partial(route, "GET", tag="broker", on_standby=True)


@_state("/health", "Whether the process lives. Needs no token.", is_public=True)
async def health(call: RouteCall) -> models.Health:
    """Answers while the process lives."""
    return models.Health(status="alive", version=taskharbor.__version__)


@_state(
    "/ready",
    "Whether this broker answers calls: it leads, and its store answers. Needs no token.",
    is_public=True,
    answer=models.Health,
    answers=((503, models.Health),),
)
async def ready(call: RouteCall) -> models.Health | Reply:
    """Answers 503 while this broker does not lead, is stopping, or its store does not answer."""
    service = call.service
    if service.stopping.is_set():
        return Reply(503, models.Health(status="not ready", reason="stopping"))
    if not service.is_leading:
        return Reply(503, models.Health(status="not ready", reason="standby"))
    try:
        # A leader's term shows that the store answers. Asking the store for the time can be a write.
        if service.leads is None:
            await service.driver.time()
    except (TaskHarborError, OSError):
        return Reply(503, models.Health(status="not ready", reason="the store does not answer"))
    return models.Health(status="ready")


@_state("/v1/leader", "Which broker leads.")
async def leader(call: RouteCall) -> models.LeaderView:
    """Names the broker that leads."""
    service = call.service
    return models.LeaderView(service.is_leading, service.leads is not None, service.leader_url)


@_state("/v1/time", "The time that leases are measured by.", on_standby=False)
async def time(call: RouteCall) -> models.BrokerTime:
    """The broker's clock."""
    now = call.service.now()
    return models.BrokerTime(to_datetime(now), now)


# -- inspection ---------------------------------------------------------------------------------------------

_get = functools.partial(route, "GET", tag="look")


@_get("/v1/jobs", "Jobs by filter, newest accepted first.", query=models.JobsQuery)
async def list_jobs(call: RouteCall) -> models.JobViewPage:
    """A page of jobs, newest accepted first."""
    wanted: models.JobsQuery = call.query
    service = call.service
    selection = JobFilter(
        queue=wanted.queue or None,
        states=frozenset(wanted.state) or None,
        types=frozenset(wanted.type) or None,
        key=wanted.key or None,
        worker=wanted.worker or None,
        finished_before_us=_instant(wanted.finished_before),
    )
    page = await service.driver.list_jobs(
        selection, now=service.now(), limit=wanted.limit, cursor=wanted.cursor or None
    )
    return models.JobViewPage(
        [models.job_view(record, payload=wanted.payload) for record in page.jobs], page.cursor
    )


def _instant(text: str | UnsetType) -> Micros | None:
    if isinstance(text, UnsetType):
        return None
    try:
        return to_micros(msgspec.convert(text, models.AwareTime))
    except msgspec.ValidationError:
        raise invalid("finished_before must be a time with a zone, like 2026-08-01T09:30:00Z") from None


@_get("/v1/jobs/{id}", "One job, with its payload and result.", problems=(404,))
async def get_job(call: RouteCall) -> models.JobView:
    """One job, with payload and result. Raises JobNotFound."""
    job_id, service = call.names["id"], call.service
    (record,) = await service.driver.get([job_id], now=service.now())
    if record is None:
        raise JobNotFound(job_id)
    return models.job_view(record, payload=True)


@_get("/v1/jobs/{id}/attempts", "How the leases of one job ended, in order.")
async def job_attempts(call: RouteCall) -> models.JobAttemptViews:
    """The attempt log of one job."""
    rows = await call.service.driver.job_attempts(call.names["id"])
    return models.JobAttemptViews([models.model_of(models.AttemptView, row) for row in rows])


@_get(
    "/v1/attempts",
    "The attempt log of all queues, from the beginning or after a cursor.",
    query=models.AttemptsQuery,
)
async def read_attempts(call: RouteCall) -> models.AttemptLogPage:
    """A page of the attempt log."""
    wanted: models.AttemptsQuery = call.query
    page = await call.service.driver.read_attempts(after=wanted.after or None, limit=wanted.limit)
    return models.AttemptLogPage(
        [models.model_of(models.AttemptView, row) for row in page.attempts], page.cursor
    )


@_get("/v1/stats", "Every queue, or one, at a glance.", query=models.StatsQuery)
async def stats(call: RouteCall) -> models.StatsView:
    """Every queue, or one, at a glance."""
    now = call.service.now()
    queue = call.query.queue or None
    return models.stats_view(await call.service.driver.stats(now=now, queue=queue), now)


@_get("/v1/queues/{name}", "A queue's settings; the defaults where none were made.")
async def get_queue(call: RouteCall) -> models.QueueView:
    """A queue's settings."""
    name = call.names["name"]
    return models.queue_view(name, await call.service.driver.settings(name))


# -- changes ------------------------------------------------------------------------------------------------

_ADMIN: dict[str, Any] = {"tag": "operate", "scope": "admin"}


def _change(operation: type[Cancel | Requeue]) -> HandleJobs:
    async def change(call: RouteCall, jobs: Sequence[tuple[str, Any]]) -> list[models.ChangedJob | JobError]:
        ids = [job_id for job_id, _ in jobs]
        states = await call.service.driver.run(check(operation(ids, call.service.now())))
        return [
            state if isinstance(state, JobError) else models.ChangedJob(job_id, state)
            for job_id, state in zip(ids, states, strict=True)
        ]

    return change


for _operation, _one, _many in (
    (Cancel, "A waiting job ends at once; a running one is told by its next heartbeat.", "Cancel many jobs"),
    (Requeue, "Send a dead job round again, with fresh attempts.", "Send many dead jobs round again"),
):
    _name, _handle = _operation.name, _change(_operation)
    _more: dict[str, Any] = {**_ADMIN, "answer": models.ChangedJob}
    route_one(_name, _one, _handle, body=models.EmptyRequest, is_body_optional=True, **_more)
    _summary = f"{_many}; each answer stands for itself."
    route_many(_name, _summary, _handle, "ids", body=models.JobIds, **_more)


@route("POST", "/v1/purge", "Remove jobs that have ended.", body=models.PurgeRequest, **_ADMIN)
async def purge(call: RouteCall) -> models.RemovedJobs:
    """Removes jobs that have ended."""
    selection = models.record_of(JobFilter, call.body)
    return models.RemovedJobs(await call.service.driver.purge(selection, limit=call.body.limit))


@route("PUT", "/v1/queues/{name}", "Replace a queue's settings.", body=models.QueueSettingsRequest, **_ADMIN)
async def configure_queue(call: RouteCall) -> models.QueueView:
    """Replaces a queue's settings."""
    name, service = call.names["name"], call.service
    settings = models.record_of(QueueSettings, call.body)
    await service.driver.configure(name, settings, now=service.now())
    return models.queue_view(name, settings)
