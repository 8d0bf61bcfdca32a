"""Taking jobs and keeping them: claims, long polls, heartbeats."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from msgspec import UnsetType

from taskharbor.broker.answered import ClaimedJobs, Held, HeldItems
from taskharbor.broker.asked import AnyJSON, Beat, BeatOf, Beats, ByHolder, Claim
from taskharbor.broker.exchange import ClientGone, Departure
from taskharbor.broker.json_values import checked_json
from taskharbor.broker.operations import Call, route
from taskharbor.broker.problems import Problem
from taskharbor.broker.submitting import check_batch
from taskharbor.broker.views import claimed_of, held_item, instant
from taskharbor.context import MAX_PROGRESS_BYTES
from taskharbor.drivers.contract import Driver, Extension, Release
from taskharbor.drivers.operations import Wait
from taskharbor.errors import JobError, JobNotFound, LeaseMismatch
from taskharbor.jobs import SECOND, JobRecord, Lease, Micros


def _are_still_leased(claimed: ClaimedJobs, now: Micros) -> bool:
    """An answer with nothing in it holds nothing: whoever asks again wants jobs."""
    return bool(claimed.jobs) and all(
        job.expires_at is not None and job.expires_at > instant(now) for job in claimed.jobs
    )


_post = functools.partial(route, "POST", tag="work", scope="work")


@_post(
    "/v1/jobs/claim",
    "Lease runnable jobs; with wait_seconds, wait until there is one.",
    body=Claim,
    still_holds=_are_still_leased,
)
async def claim(call: Call) -> ClaimedJobs:
    asked: Claim = call.body
    worker = asked.worker or asked.worker_camel or call.caller.name
    if asked.wait_seconds <= 0:
        return ClaimedJobs([claimed_of(record) for record in await _reserve(call, asked, worker)])
    with Departure(call.request) as departure:
        records = await _wait_for_jobs(call, asked, worker, departure)
        if departure.has_left and records:
            await _give_back(call.service.driver, records, call.service.now())
            raise ClientGone
    return ClaimedJobs([claimed_of(record) for record in records])


async def _reserve(call: Call, asked: Claim, worker: str) -> list[JobRecord]:
    service = call.service
    return await service.driver.reserve(
        asked.queue,
        limit=asked.limit,
        lease_for=_micros(asked.lease_seconds),
        now=service.now(),
        worker=worker,
        types=asked.types,
    )


async def _wait_for_jobs(call: Call, asked: Claim, worker: str, departure: Departure) -> list[JobRecord]:
    service, queues = call.service, [asked.queue]
    loop = asyncio.get_running_loop()
    end = loop.time() + min(asked.wait_seconds, service.config.max_wait_seconds)
    # Taken before the first claim: a change after it ends the wait.
    seen = (await service.long_polls.wait(Wait(queues, service.now(), 0.0))).seen
    while True:
        records = await _reserve(call, asked, worker)
        if records:
            return records
        poll = Wait(queues, service.now(), end - loop.time(), seen)
        woken = await departure.unless_left(service.long_polls.wait(poll))
        if not woken.woken:
            return []
        seen = woken.seen


async def _give_back(driver: Driver, records: list[JobRecord], now: Micros) -> None:
    """Nobody is there any more to do the work: it need not wait for the leases to end."""
    await driver.settle([Release(record.id, record.token or "") for record in records], now=now)


@_post(
    "/v1/jobs/{id}/heartbeat",
    "Extend one lease, report progress, and learn of a requested cancel.",
    body=Beat,
    problems=(404, 409),
)
async def heartbeat(call: Call) -> Held:
    asked: Beat = call.body
    job_id = call.names["id"]
    (answer,) = await _extend(call, [(job_id, asked)], asked.lease_seconds)
    if isinstance(answer, JobError):
        raise answer
    return Held(
        id=job_id,
        token=answer.token,
        expires_at=instant(answer.expires_at_us),
        cancel_requested=answer.cancel_requested,
    )


@_post("/v1/jobs/heartbeat", "Extend the leases of many jobs; each answer stands for itself.", body=Beats)
async def heartbeat_many(call: Call) -> HeldItems:
    asked: Beats = call.body
    check_batch(len(asked.jobs), call.service.config.max_batch)
    answers = await _extend(call, [(one.id, one) for one in asked.jobs], asked.lease_seconds)
    return HeldItems([held_item(one.id, answer) for one, answer in zip(asked.jobs, answers, strict=True)])


async def _extend(
    call: Call, beats: Sequence[tuple[str, Beat | BeatOf]], lease_seconds: float
) -> list[Lease | JobError]:
    service = call.service
    now = service.now()
    nameless = [job_id for job_id, beat in beats if beat.token is None]
    records = (
        dict(zip(nameless, await service.driver.get(nameless, now=now), strict=True)) if nameless else {}
    )
    tokens = [token_of(job_id, beat, records.get(job_id)) for job_id, beat in beats]
    extensions = [
        Extension(job_id, token, _progress(beat.progress, call))
        for (job_id, beat), token in zip(beats, tokens, strict=True)
        if isinstance(token, str)
    ]
    answers = iter(
        await service.driver.extend_lease(extensions, lease_for=_micros(lease_seconds), now=now)
        if extensions
        else ()
    )
    return [next(answers) if isinstance(token, str) else token for token in tokens]


def _progress(value: AnyJSON, call: Call) -> bytes | None:
    if isinstance(value, UnsetType):
        return None
    data = checked_json(value, call.service.config.max_depth, "progress")
    if len(data) > MAX_PROGRESS_BYTES:
        raise Problem(
            422, "invalid_request", f"progress of {len(data)} bytes: at most {MAX_PROGRESS_BYTES} are kept"
        )
    return data


def _micros(seconds: float) -> Micros:
    return round(seconds * SECOND)


_NO_LEASE = "none"
"""Where a job is not inflight, the driver has the right word for it whatever the token."""


def token_of(job_id: str, asked: ByHolder, record: JobRecord | None) -> str | JobError:
    """The token to act under. The record is looked at only where the caller gave no token.

    A worker's name, as the original protocol has it, is the weaker proof: a worker that lost a job and claimed it again under
    the same name is taken for the one it was.
    """
    if asked.token is not None:
        return asked.token
    worker = asked.worker or asked.worker_camel
    if worker is None:
        raise Problem(
            422,
            "invalid_request",
            "the request does not say who holds the job",
            hint="send the token that the claim gave, or the worker's name as worker",
        )
    if record is None:
        return JobNotFound(job_id)
    if record.token is None:
        return _NO_LEASE
    return record.token if record.worker == worker else LeaseMismatch(job_id)
