"""Routes of operators: the broker's health, inspection of jobs and queues, cancel, requeue, purge, settings, schedules."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

import taskharbor
from taskharbor.broker import models
from taskharbor.broker.calls import CallersDriver, check_queues, queues_of
from taskharbor.broker.error_responses import invalid
from taskharbor.broker.job_routes import content
from taskharbor.broker.routes import Reply, RouteCall, first_sentence, route, route_many, route_one
from taskharbor.client import AsyncClient
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.records import Enqueued, JobFilter, QueueSettings
from taskharbor.errors import JobError, JobNotFound, TaskHarborError
from taskharbor.jobs import MAX_PAYLOAD_BYTES, to_datetime
from taskharbor.queue_settings import check_known
from taskharbor.requests import RecordBuilder
from taskharbor.schedules.client import AsyncSchedules, ScheduleInfo, put
from taskharbor.schedules.specification import Schedule, request_of, stored_schedule

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


# -- schedules ----------------------------------------------------------------------------------------------

_SCHEDULE: dict[str, Any] = {"tag": "schedules", "scope": "produce", "problems": (404,)}


def _schedules(call: RouteCall) -> AsyncSchedules:
    driver = CallersDriver(call.service.calls, call.caller)
    return AsyncSchedules(AsyncClient(driver, clock=call.service.clock))


@_get("/v1/schedules", query=models.SchedulesQuery, tag="schedules")
async def list_schedules(call: RouteCall) -> models.SchedulePage:
    """Schedules, with their next times and what became of the last tick."""
    infos, cursor = await _schedules(call).page(limit=call.query.limit, cursor=call.query.cursor or None)
    return models.SchedulePage(infos, cursor)


@_get("/v1/schedules/{name}", tag="schedules", problems=(404,))
async def get_schedule(call: RouteCall) -> ScheduleInfo:
    """One schedule."""
    return await _schedules(call).get(call.names["name"])


_put_answers = dict.fromkeys((201, 200), (ScheduleInfo,))


@route("PUT", "/v1/schedules/{name}", bodies=(models.NewSchedule,), answers=_put_answers, **_SCHEDULE)
async def put_schedule(call: RouteCall) -> Reply:
    """Store a schedule, or change it."""
    name, given, now = call.names["name"], msgspec.structs.asdict(call.body), call.service.now()
    if given["name"] not in (None, name):
        raise invalid(f"name {given['name']!r}: the path names {name!r}; leave it out of the body")
    payload = content(given["payload"], None, call, MAX_PAYLOAD_BYTES, "payload")
    given |= {"name": name, "payload": payload and msgspec.json.decode(payload)}
    schedule, schedules = Schedule(**given), _schedules(call)
    # With a limit, all its ticks are counted, and other requests get their turns meanwhile.
    stored = await asyncio.to_thread(stored_schedule, schedule, request_of(schedule), RecordBuilder(), now)
    is_new = await put(schedules._client.driver, stored, now)
    return Reply(201 if is_new else 200, await schedules.get(name))


@route("DELETE", "/v1/schedules/{name}", **{**_SCHEDULE, "scope": "admin"})
async def delete_schedule(call: RouteCall) -> ScheduleInfo:
    """Delete a schedule. The answer is what it was. The jobs that it made stay."""
    schedules, name = _schedules(call), call.names["name"]
    info = await schedules.get(name)
    await schedules.delete(name)
    return info


@route(
    "POST", "/v1/schedules/{name}/pause", bodies=(models.PauseRequest,), is_body_optional=True, **_SCHEDULE
)
async def pause_schedule(call: RouteCall) -> ScheduleInfo:
    """Pause a schedule: no more ticks until it is resumed."""
    schedules, name = _schedules(call), call.names["name"]
    await schedules.pause(name, call.body.note)
    return await schedules.get(name)


@route("POST", "/v1/schedules/{name}/resume", **_SCHEDULE)
async def resume_schedule(call: RouteCall) -> ScheduleInfo:
    """Undo a pause. Ticks of the pause are not made later."""
    schedules, name = _schedules(call), call.names["name"]
    await schedules.resume(name)
    return await schedules.get(name)


@route("POST", "/v1/schedules/{name}/trigger", still_holds=lambda answer, now: True, **_SCHEDULE)
async def trigger_schedule(call: RouteCall) -> models.Submitted:
    """Make a job of the schedule now, beside its ticks."""
    handle = await _schedules(call).trigger(call.names["name"])
    return models.model_of(models.Submitted, Enqueued(handle.id, handle.existed))


@route("POST", "/v1/schedules/{name}/backfill", bodies=(models.BackfillRequest,), **_SCHEDULE)
async def backfill_schedule(call: RouteCall) -> models.BackfilledJobs:
    """Make the jobs of all ticks of a time in the past."""
    asked = call.body
    made = await _schedules(call).backfill(call.names["name"], asked.start, asked.end)
    return models.BackfilledJobs(made)
