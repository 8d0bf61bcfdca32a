"""What operators do: cancel, requeue, purge, settings."""

from __future__ import annotations

import functools

from taskharbor.broker.answered import QueueView, Removed, State, StateItems
from taskharbor.broker.asked import Ids, Nothing, Purge, Settings
from taskharbor.broker.operations import Call, route
from taskharbor.broker.submitting import check_batch
from taskharbor.broker.views import queue_view, state_item
from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.operations import Cancel, Requeue
from taskharbor.drivers.validation import check
from taskharbor.errors import JobError
from taskharbor.jobs import SECOND, JobState, Micros, to_micros

_post = functools.partial(route, "POST", tag="operate", scope="admin")
_post_to_job = functools.partial(_post, body=Nothing, is_body_optional=True, problems=(404, 409))


async def _change_one(call: Call, operation: type[Cancel | Requeue]) -> State:
    job_id = call.names["id"]
    (answer,) = await _change(call, operation, [job_id])
    if isinstance(answer, JobError):
        raise answer
    return State(job_id, answer)


async def _change_many(call: Call, operation: type[Cancel | Requeue]) -> StateItems:
    ids: list[str] = call.body.ids
    check_batch(len(ids), call.service.config.max_batch)
    answers = await _change(call, operation, ids)
    return StateItems([state_item(*pair) for pair in zip(ids, answers, strict=True)])


async def _change(call: Call, operation: type[Cancel | Requeue], ids: list[str]) -> list[JobState | JobError]:
    return await call.service.driver.run(check(operation(ids, call.service.now())))


@_post_to_job(
    "/v1/jobs/{id}/cancel", "A waiting job ends at once; a running one is told by its next heartbeat."
)
async def cancel(call: Call) -> State:
    return await _change_one(call, Cancel)


@_post_to_job("/v1/jobs/{id}/requeue", "Send a dead job round again, with fresh attempts.")
async def requeue(call: Call) -> State:
    return await _change_one(call, Requeue)


@_post("/v1/jobs/cancel", "Cancel many jobs; each answer stands for itself.", body=Ids)
async def cancel_many(call: Call) -> StateItems:
    return await _change_many(call, Cancel)


@_post("/v1/jobs/requeue", "Send many dead jobs round again; each answer stands for itself.", body=Ids)
async def requeue_many(call: Call) -> StateItems:
    return await _change_many(call, Requeue)


@_post("/v1/purge", "Remove jobs that have ended.", body=Purge)
async def purge(call: Call) -> Removed:
    asked: Purge = call.body
    selection = JobFilter(
        queue=asked.queue,
        states=None if asked.states is None else frozenset(asked.states),
        types=None if asked.types is None else frozenset(asked.types),
        key=asked.key,
        finished_before_us=None if asked.finished_before is None else to_micros(asked.finished_before),
    )
    return Removed(await call.service.driver.purge(selection, limit=asked.limit))


@route("PUT", "/v1/queues/{name}", "Replace a queue's settings.", tag="operate", scope="admin", body=Settings)
async def configure_queue(call: Call) -> QueueView:
    asked: Settings = call.body
    name, service = call.names["name"], call.service
    settings = QueueSettings(
        paused=asked.paused,
        max_inflight=asked.max_inflight,
        failure_queue=asked.failure_queue,
        keep_done_us=_kept(asked.keep_done_seconds),
        keep_dead_us=_kept(asked.keep_dead_seconds),
        keep_attempts_us=_kept(asked.keep_attempts_seconds),
    )
    await service.driver.configure(name, settings, now=service.now())
    return queue_view(name, settings)


def _kept(seconds: float | None) -> Micros | None:
    return None if seconds is None else round(seconds * SECOND)
