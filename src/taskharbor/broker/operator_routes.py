"""Routes of operators: the broker's health, inspection of jobs and queues, cancel, requeue, purge, settings."""

from __future__ import annotations

import functools

import msgspec
from msgspec import UnsetType

import taskharbor
from taskharbor.broker import request_models as requests
from taskharbor.broker import response_models as responses
from taskharbor.broker.operations import Call, Reply, check_batch, route
from taskharbor.broker.problems import invalid
from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.dispatch import check
from taskharbor.drivers.operations import Cancel, Requeue
from taskharbor.errors import JobError, JobNotFound, TaskHarborError
from taskharbor.jobs import SECOND, JobState, Micros, to_micros

# -- the broker ---------------------------------------------------------------------------------------------

_state = functools.partial(route, "GET", tag="broker", on_standby=True)


@_state("/health", "Whether the process lives. Needs no token.", is_public=True)
async def health(call: Call) -> responses.Health:
    return responses.Health(status="alive", version=taskharbor.__version__)


@_state(
    "/ready",
    "Whether this broker answers calls: it leads, and its store answers. Needs no token.",
    is_public=True,
    answer=responses.Health,
    answers=((503, responses.Health),),
)
async def ready(call: Call) -> responses.Health | Reply:
    service = call.service
    if service.stopping.is_set():
        return Reply(503, responses.Health(status="not ready", reason="stopping"))
    if not service.is_leading:
        return Reply(503, responses.Health(status="not ready", reason="standby"))
    try:
        # A leader's term says that the store answers; asking it for the time can be a write.
        if service.leads is None:
            await service.driver.time()
    except (TaskHarborError, OSError):
        return Reply(503, responses.Health(status="not ready", reason="the store does not answer"))
    return responses.Health(status="ready")


@_state("/v1/leader", "Which broker leads.")
async def leader(call: Call) -> responses.Leader:
    service = call.service
    return responses.Leader(service.is_leading, service.leads is not None, service.leader_url)


@_state("/v1/time", "The time that leases are measured by.", on_standby=False)
async def time(call: Call) -> responses.Time:
    now = call.service.now()
    return responses.Time(responses.instant(now), now)


# -- inspection ---------------------------------------------------------------------------------------------

_get = functools.partial(route, "GET", tag="look")


@_get("/v1/jobs", "Jobs by filter, newest accepted first.", query=requests.JobsQuery)
async def list_jobs(call: Call) -> responses.Jobs:
    wanted: requests.JobsQuery = call.query
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
    return responses.Jobs(
        [responses.job_of(record, payload=wanted.payload) for record in page.jobs], page.cursor
    )


def _instant(text: str | UnsetType) -> Micros | None:
    if isinstance(text, UnsetType):
        return None
    try:
        return to_micros(msgspec.convert(text, requests.Instant))
    except msgspec.ValidationError:
        raise invalid("finished_before must be a time with a zone, like 2026-08-01T09:30:00Z") from None


@_get("/v1/jobs/{id}", "One job, with its payload and result.", problems=(404,))
async def get_job(call: Call) -> responses.Job:
    job_id, service = call.names["id"], call.service
    (record,) = await service.driver.get([job_id], now=service.now())
    if record is None:
        raise JobNotFound(job_id)
    return responses.job_of(record, payload=True)


@_get("/v1/jobs/{id}/attempts", "How the leases of one job ended, in order.")
async def job_attempts(call: Call) -> responses.JobAttempts:
    rows = await call.service.driver.job_attempts(call.names["id"])
    return responses.JobAttempts([responses.attempt_row(row) for row in rows])


@_get(
    "/v1/attempts",
    "The attempt log of all queues, from the beginning or after a cursor.",
    query=requests.AttemptsQuery,
)
async def read_attempts(call: Call) -> responses.Attempts:
    wanted: requests.AttemptsQuery = call.query
    page = await call.service.driver.read_attempts(after=wanted.after or None, limit=wanted.limit)
    return responses.Attempts([responses.attempt_row(row) for row in page.attempts], page.cursor)


@_get("/v1/stats", "Every queue, or one, at a glance.", query=requests.StatsQuery)
async def stats(call: Call) -> responses.Stats:
    wanted: requests.StatsQuery = call.query
    now = call.service.now()
    queues = [
        responses.queue_numbers(one, now)
        for one in await call.service.driver.stats(now=now, queue=wanted.queue or None)
    ]
    return responses.Stats(completed_total=sum(one.done_total for one in queues), queues=queues)


@_get("/v1/queues/{name}", "A queue's settings; the defaults where none were made.")
async def get_queue(call: Call) -> responses.QueueView:
    name = call.names["name"]
    return responses.queue_view(name, await call.service.driver.settings(name))


# -- changes ------------------------------------------------------------------------------------------------

_post = functools.partial(route, "POST", tag="operate", scope="admin")
_post_to_job = functools.partial(_post, body=requests.Nothing, is_body_optional=True, problems=(404, 409))


async def _change_one(call: Call, operation: type[Cancel | Requeue]) -> responses.State:
    job_id = call.names["id"]
    (answer,) = await _change(call, operation, [job_id])
    if isinstance(answer, JobError):
        raise answer
    return responses.State(job_id, answer)


async def _change_many(call: Call, operation: type[Cancel | Requeue]) -> responses.StateItems:
    ids: list[str] = call.body.ids
    check_batch(len(ids), call.service.config.max_batch)
    answers = await _change(call, operation, ids)
    return responses.StateItems(responses.items(responses.StateItem, responses.State, ids, answers))


async def _change(call: Call, operation: type[Cancel | Requeue], ids: list[str]) -> list[JobState | JobError]:
    return await call.service.driver.run(check(operation(ids, call.service.now())))


@_post_to_job(
    "/v1/jobs/{id}/cancel", "A waiting job ends at once; a running one is told by its next heartbeat."
)
async def cancel(call: Call) -> responses.State:
    return await _change_one(call, Cancel)


@_post_to_job("/v1/jobs/{id}/requeue", "Send a dead job round again, with fresh attempts.")
async def requeue(call: Call) -> responses.State:
    return await _change_one(call, Requeue)


@_post("/v1/jobs/cancel", "Cancel many jobs; each answer stands for itself.", body=requests.Ids)
async def cancel_many(call: Call) -> responses.StateItems:
    return await _change_many(call, Cancel)


@_post(
    "/v1/jobs/requeue", "Send many dead jobs round again; each answer stands for itself.", body=requests.Ids
)
async def requeue_many(call: Call) -> responses.StateItems:
    return await _change_many(call, Requeue)


@_post("/v1/purge", "Remove jobs that have ended.", body=requests.Purge)
async def purge(call: Call) -> responses.Removed:
    wanted: requests.Purge = call.body
    selection = JobFilter(
        queue=wanted.queue,
        states=None if wanted.states is None else frozenset(wanted.states),
        types=None if wanted.types is None else frozenset(wanted.types),
        key=wanted.key,
        finished_before_us=None if wanted.finished_before is None else to_micros(wanted.finished_before),
    )
    return responses.Removed(await call.service.driver.purge(selection, limit=wanted.limit))


@route(
    "PUT",
    "/v1/queues/{name}",
    "Replace a queue's settings.",
    tag="operate",
    scope="admin",
    body=requests.Settings,
)
async def configure_queue(call: Call) -> responses.QueueView:
    wanted: requests.Settings = call.body
    name, service = call.names["name"], call.service
    settings = QueueSettings(
        paused=wanted.paused,
        max_inflight=wanted.max_inflight,
        failure_queue=wanted.failure_queue,
        keep_done_us=_kept(wanted.keep_done_seconds),
        keep_dead_us=_kept(wanted.keep_dead_seconds),
        keep_attempts_us=_kept(wanted.keep_attempts_seconds),
    )
    await service.driver.configure(name, settings, now=service.now())
    return responses.queue_view(name, settings)


def _kept(seconds: float | None) -> Micros | None:
    return None if seconds is None else round(seconds * SECOND)
