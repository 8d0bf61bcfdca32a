"""Routes of operators: the broker's health, inspection of jobs and queues, cancel, requeue, purge, settings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import taskharbor
from taskharbor.broker import models
from taskharbor.broker.calls import check_queues, queues_of
from taskharbor.broker.routes import Reply, RouteCall, first_sentence, route, route_many, route_one
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.records import JobFilter, QueueSettings
from taskharbor.errors import JobError, JobNotFound, TaskHarborError
from taskharbor.jobs import to_datetime
from taskharbor.queue_settings import check_known

# -- the broker ---------------------------------------------------------------------------------------------

_state = functools.partial(route, "GET", tag="broker", on_standby=True)


@_state("/health", is_public=True)
async def health(call: RouteCall) -> models.Health:
    """Answer while the process lives. No token is needed."""
    return models.Health(status="alive", version=taskharbor.__version__)


@_state("/ready", is_public=True, answers=dict.fromkeys((200, 503), (models.Health,)))
async def ready(call: RouteCall) -> models.Health | Reply:
    """Say if this broker answers calls: it leads, and its store answers. No token is needed."""
    service, reason = call.service, ""
    if service.stopping.is_set():
        reason = "stopping"
    elif not service.is_leading:
        reason = "standby"
    # A leader's term shows that the store answers. Asking the store for the time can be a write.
    elif service.leads is None:
        try:
            await service.driver.time()
        except (TaskHarborError, OSError):
            reason = "the store does not answer"
    if reason:
        return Reply(503, models.Health(status="not ready", reason=reason))
    return models.Health(status="ready")


@_state("/v1/leader")
async def leader(call: RouteCall) -> models.LeaderView:
    """Which broker leads."""
    service = call.service
    return models.LeaderView(service.is_leading, service.leads is not None, service.leader_url)


@_state("/v1/time", on_standby=False)
async def time(call: RouteCall) -> models.BrokerTime:
    """The time that leases are measured by."""
    now = call.service.now()
    return models.BrokerTime(to_datetime(now), now)


# -- inspection ---------------------------------------------------------------------------------------------

_get = functools.partial(route, "GET", tag="look")


@_get("/v1/jobs", query=models.JobsQuery)
async def list_jobs(call: RouteCall) -> models.JobViewPage:
    """Jobs by filter, newest accepted first."""
    wanted: models.JobsQuery = call.query
    service, selection = call.service, models.record_of(JobFilter, wanted)
    page = await call.run(op.ListJobs(selection, service.now(), wanted.limit, wanted.cursor or None))
    jobs = [models.job_view(record, payload=wanted.payload) for record in page.jobs]
    return models.JobViewPage(jobs, page.cursor)


@_get("/v1/jobs/{id}", problems=(404,))
async def get_job(call: RouteCall) -> models.JobView:
    """One job, with its payload and result."""
    job_id, service = call.names["id"], call.service
    (record,) = await call.run(op.Get([job_id], service.now()))
    if record is None:
        raise JobNotFound(job_id)
    return models.job_view(record, payload=True)


@_get("/v1/jobs/{id}/attempts")
async def job_attempts(call: RouteCall) -> models.JobAttemptViews:
    """How the leases of one job ended, in order."""
    rows = await call.run(op.JobAttempts(call.names["id"]))
    return models.JobAttemptViews([models.model_of(models.AttemptView, row) for row in rows])


@_get("/v1/attempts", query=models.AttemptsQuery)
async def read_attempts(call: RouteCall) -> models.AttemptLogPage:
    """The attempt log of all queues, from the beginning or after a cursor."""
    wanted: models.AttemptsQuery = call.query
    page = await call.run(op.ReadAttempts(wanted.after or None, wanted.limit))
    rows = [models.model_of(models.AttemptView, row) for row in page.attempts]
    return models.AttemptLogPage(rows, page.cursor)


@_get("/v1/stats", query=models.StatsQuery)
async def stats(call: RouteCall) -> models.BrokerStats:
    """Every queue, or one, at a glance."""
    now, advertised = call.service.now(), urlsplit(call.service.config.advertise or "").netloc
    found = await call.run(op.Stats(now, call.query.queue or None))
    return models.broker_stats(found, now, advertised or call.request.headers["host"])


@_get("/v1/queues/{name}")
async def get_queue(call: RouteCall) -> models.QueueView:
    """A queue's settings; the defaults where none were made."""
    name = call.names["name"]
    return models.queue_view(name, await call.run(op.Settings(name)))


# -- changes ------------------------------------------------------------------------------------------------

_ADMIN: dict[str, Any] = {"tag": "operate", "scope": "admin"}


def _route_change(operation: type[op.CancelJobs | op.Requeue], one: Any, many: Any) -> None:
    async def change(call: RouteCall, jobs: Sequence[tuple[str, Any]]) -> list[models.ChangedJob | JobError]:
        ids = [job_id for job_id, _ in jobs]
        how = operation(ids, call.service.now(), **models.given_of(call.body))
        states = await call.run(how)
        return [
            state if isinstance(state, JobError) else models.ChangedJob(job_id, state)
            for job_id, state in zip(ids, states, strict=True)
        ]

    name, summary = operation.name, first_sentence(getattr(Driver, operation.name))
    more = {**_ADMIN, "answer": models.ChangedJob, "summary": summary}
    route_one(name, change, one, is_body_optional=True, **more)
    route_many(name, change, many, "ids", **more)


_route_change(op.CancelJobs, models.CancelRequest, models.CancelBatch)
_route_change(op.Requeue, models.RequeueRequest, models.RequeueBatch)


@route("POST", "/v1/queues/{name}/cancel", bodies=(models.KeysRequest,), **_ADMIN)
async def cancel_keys(call: RouteCall) -> models.CancelledKeys:
    """Cancel the jobs of keys in a queue."""
    service, body = call.service, call.body
    keys = list(dict.fromkeys(body.keys))
    call.check_batch(len(keys))
    counts = await call.run(op.CancelKeys(keys, call.names["name"], service.now(), body.only_waiting))
    return models.CancelledKeys(dict(zip(keys, counts, strict=True)))


@route("POST", "/v1/purge", bodies=(models.PurgeRequest,), **_ADMIN)
async def purge(call: RouteCall) -> models.RemovedJobs:
    """Remove jobs that have ended."""
    selection = models.record_of(JobFilter, call.body)
    return models.RemovedJobs(await call.run(op.Purge(selection, call.body.limit)))


@route("PATCH", "/v1/queues/{name}", bodies=(models.QueueSettingsRequest,), problems=(404,), **_ADMIN)
async def configure_queue(call: RouteCall) -> models.QueueView:
    """Change a queue's settings."""
    name, now = call.names["name"], call.service.now()
    changes = models.given_of(call.body)
    change = op.Configure(name, QueueSettings(**changes), now, list(changes))  # type: ignore[arg-type]
    check_queues(call.caller, queues_of(change))
    if not call.body.create:
        await check_known(call.service.driver, name, now)
    await call.run(change)
    return models.queue_view(name, await call.run(op.Settings(name)))
