"""Routes of producers and workers: submit, claim, heartbeat, settle.

Settling follows the core's rules, so that a client in any language gets the same retries as a worker of ours.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from taskharbor.broker import request_models as requests
from taskharbor.broker import response_models as responses
from taskharbor.broker.exchange import ClientGone, Departure
from taskharbor.broker.operations import Call, Reply, check_batch, decoded, route
from taskharbor.broker.problems import invalid
from taskharbor.drivers.contract import Ack, Discard, Extension, Fail, Release, Retry, Settlement
from taskharbor.drivers.operations import Enqueue, Wait
from taskharbor.errors import JobError, JobNotFound, LeaseMismatch
from taskharbor.jobs import (
    LATEST,
    MAX_PAYLOAD_BYTES,
    MAX_PROGRESS_BYTES,
    MAX_RESULT_BYTES,
    SECOND,
    Failure,
    JobRecord,
    JobRequest,
    JobState,
    Lease,
    Micros,
    UpdateFlags,
    to_micros,
)
from taskharbor.requests import EncodedPayload, RecordBuilder
from taskharbor.retry import DEFAULT_RETRY

TURN_SECONDS = 0.02
T = TypeVar("T")


async def in_turns(items: Iterable[T]) -> list[T]:
    """The items of a batch. Checking their values may take seconds, in which other requests get their turns."""
    made: list[T] = []
    began = time.perf_counter()
    for item in items:
        made.append(item)
        if time.perf_counter() - began > TURN_SECONDS:
            await asyncio.sleep(0)
            began = time.perf_counter()
    return made


# -- submitting ---------------------------------------------------------------------------------------------

_builder = RecordBuilder()


class _Shape(msgspec.Struct):
    """Just enough to see which of the two it is."""

    jobs: msgspec.Raw | UnsetType = UNSET


_shape = msgspec.json.Decoder(_Shape).decode
_one = msgspec.json.Decoder(requests.NewJob).decode
_many = msgspec.json.Decoder(requests.NewJobs).decode


@route(
    "POST",
    "/v1/jobs",
    "Submit one job, or several that are stored all or not at all.",
    tag="produce",
    scope="produce",
    body_choices=(requests.NewJob, requests.NewJobs),
    answer=responses.Submitted,
    status=201,
    answers=((201, responses.SubmittedJobs), (200, responses.Submitted), (200, responses.SubmittedJobs)),
    still_holds=lambda answer, now: True,
)
async def submit(call: Call) -> Any:
    data: bytes = call.body
    if decoded(_shape, data).jobs is UNSET:
        jobs, is_single = [decoded(_one, data)], True
    else:
        jobs, is_single = decoded(_many, data).jobs, False
    config, driver, now = call.service.config, call.service.driver, call.service.now()
    check_batch(len(jobs), config.max_batch)
    records = _builder.build(await in_turns(_request(job, config.max_depth) for job in jobs), now)
    accepted = await driver.run(Enqueue(records, now, new_ids=True))
    answers = [responses.Submitted(one.id, one.existed) for one in accepted]
    status = 200 if all(one.existed for one in accepted) else 201
    return Reply(status, answers[0] if is_single else responses.SubmittedJobs(answers))


_SHARED = set(JobRequest.__struct_fields__) & set(requests.NewJob.__struct_fields__) - {"payload"}


def _request(job: requests.NewJob, max_depth: int) -> JobRequest:
    request = JobRequest(
        payload=EncodedPayload(_payload(job, max_depth)), **{name: getattr(job, name) for name in _SHARED}
    )
    if job.max_attempts_camel is not None:
        request.max_attempts = job.max_attempts_camel
    if job.update is not None:
        request.update = UpdateFlags(*msgspec.structs.astuple(job.update))
    return request


def _payload(job: requests.NewJob, max_depth: int) -> bytes:
    if job.payload_base64 is not None:
        if not isinstance(job.payload, UnsetType):
            raise invalid("give either payload or payload_base64, not both")
        return job.payload_base64
    if job.codec not in (None, "json"):
        raise invalid(
            "a payload in another codec than json cannot be written as a JSON value",
            hint="encode it yourself and send the bytes as payload_base64",
        )
    if isinstance(job.payload, UnsetType):
        return b"null"
    return requests.checked_json(job.payload, max_depth, MAX_PAYLOAD_BYTES, "payload")


# -- claiming and heartbeats --------------------------------------------------------------------------------


def _are_still_leased(claimed: responses.ClaimedJobs, now: Micros) -> bool:
    """An answer with nothing in it holds nothing: whoever asks again wants jobs."""
    return bool(claimed.jobs) and all(
        job.expires_at is not None and job.expires_at > responses.instant(now) for job in claimed.jobs
    )


_post = functools.partial(route, "POST", tag="work", scope="work")


@_post(
    "/v1/jobs/claim",
    "Lease runnable jobs; with wait_seconds, wait until there is one.",
    body=requests.Claim,
    still_holds=_are_still_leased,
)
async def claim(call: Call) -> responses.ClaimedJobs:
    if call.body.wait_seconds <= 0:
        records = await _reserve(call)
    else:
        with Departure(call.request) as departure:
            records = await _wait_for_jobs(call, departure)
            if departure.has_left and records:
                # Nobody is there any more to do the work: it need not wait for the leases to end.
                unused = [Release(record.id, record.token or "") for record in records]
                await call.service.driver.settle(unused, now=call.service.now())
                raise ClientGone
    return responses.ClaimedJobs([responses.claimed_of(record) for record in records])


async def _reserve(call: Call) -> list[JobRecord]:
    wanted: requests.Claim = call.body
    return await call.service.driver.reserve(
        wanted.queue,
        limit=wanted.limit,
        lease_for=_micros(wanted.lease_seconds),
        now=call.service.now(),
        worker=wanted.worker or wanted.worker_camel or call.caller.name,
        types=wanted.types,
    )


async def _wait_for_jobs(call: Call, departure: Departure) -> list[JobRecord]:
    service, queues = call.service, [call.body.queue]
    loop = asyncio.get_running_loop()
    end = loop.time() + min(call.body.wait_seconds, service.config.max_wait_seconds)
    # Taken before the first claim: a change after it ends the wait.
    seen = (await service.long_polls.wait(Wait(queues, service.now(), 0.0))).seen
    while True:
        records = await _reserve(call)
        if records:
            return records
        poll = Wait(queues, service.now(), end - loop.time(), seen)
        woken = await departure.unless_left(service.long_polls.wait(poll))
        if not woken.woken:
            return []
        seen = woken.seen


@_post(
    "/v1/jobs/{id}/heartbeat",
    "Extend one lease, report progress, and learn of a requested cancel.",
    body=requests.Beat,
    problems=(404, 409),
)
async def heartbeat(call: Call) -> responses.Held:
    beat: requests.Beat = call.body
    job_id = call.names["id"]
    (answer,) = await _extend(call, [(job_id, beat)], beat.lease_seconds)
    if isinstance(answer, JobError):
        raise answer
    return responses.held(job_id, answer)


@_post(
    "/v1/jobs/heartbeat",
    "Extend the leases of many jobs; each answer stands for itself.",
    body=requests.Beats,
)
async def heartbeat_many(call: Call) -> responses.HeldItems:
    beats: requests.Beats = call.body
    check_batch(len(beats.jobs), call.service.config.max_batch)
    answers = await _extend(call, [(one.id, one) for one in beats.jobs], beats.lease_seconds)
    ids = [one.id for one in beats.jobs]
    return responses.HeldItems(responses.items(responses.HeldItem, responses.held, ids, answers))


async def _extend(
    call: Call, beats: Sequence[tuple[str, requests.Beat | requests.BeatOf]], lease_seconds: float
) -> list[Lease | JobError]:
    service = call.service
    now = service.now()
    nameless = [job_id for job_id, beat in beats if beat.token is None]
    records = dict(zip(nameless, await service.driver.get(nameless, now=now), strict=True))
    tokens = [_token_of(job_id, beat, records.get(job_id)) for job_id, beat in beats]
    extensions = await in_turns(
        Extension(job_id, token, _progress(beat.progress, call))
        for (job_id, beat), token in zip(beats, tokens, strict=True)
        if isinstance(token, str)
    )
    answers = iter(await service.driver.extend_lease(extensions, lease_for=_micros(lease_seconds), now=now))
    return [next(answers) if isinstance(token, str) else token for token in tokens]


def _progress(value: requests.AnyJSON, call: Call) -> bytes | None:
    if isinstance(value, UnsetType):
        return None
    return requests.checked_json(value, call.service.config.max_depth, MAX_PROGRESS_BYTES, "progress")


def _micros(seconds: float) -> Micros:
    return round(seconds * SECOND)


_NO_LEASE = "none"
"""Where a job is not inflight, the driver has the right word for it whatever the token."""


def _token_of(job_id: str, proof: requests.ByHolder, record: JobRecord | None) -> str | JobError:
    """The token to act under. The record is looked at only where the caller gave no token.

    A worker's name, as the original protocol has it, is the weaker proof: a worker that lost a job and claimed it again under
    the same name is taken for the one it was.
    """
    if proof.token is not None:
        return proof.token
    worker = proof.worker or proof.worker_camel
    if worker is None:
        raise invalid(
            "the request does not say who holds the job",
            hint="send the token that the claim gave, or the worker's name as worker",
        )
    if record is None:
        return JobNotFound(job_id)
    if record.token is None:
        return _NO_LEASE
    return record.token if record.worker == worker else LeaseMismatch(job_id)


# -- settling -----------------------------------------------------------------------------------------------

_APPLIED: dict[type, responses.Applied] = {
    Ack: "complete",
    Retry: "retry",
    Fail: "fail",
    Release: "release",
    Discard: "discard",
}


async def settle_one(call: Call) -> responses.Settled:
    job_id = call.names["id"]
    (answer,) = await _settle(call, [(job_id, call.body)])
    if isinstance(answer, JobError):
        raise answer
    return _settled(job_id, answer)


@_post(
    "/v1/jobs/settle", "End many leases at once; each is applied and answered on its own.", body=requests.Ends
)
async def settle(call: Call) -> responses.SettledItems:
    ends: list[requests.EndOf] = call.body.settlements
    check_batch(len(ends), call.service.config.max_batch)
    answers = await _settle(call, [(one.id, one) for one in ends])
    ids = [one.id for one in ends]
    return responses.SettledItems(responses.items(responses.SettledItem, _settled, ids, answers))


async def _settle(call: Call, ends: Sequence[tuple[str, requests.End]]) -> list[Settlement | JobError]:
    """The settlement that was written for each job, or the error that kept it from being written."""
    service = call.service
    now = service.now()
    depth = service.config.max_depth
    needed = [job_id for job_id, end in ends if end.token is None or isinstance(end, _FAILING)]
    # Attempts cannot change under a lease, so what is read here still holds when the token is checked.
    records = dict(zip(needed, await service.driver.get(needed, now=now), strict=True))
    answers = await in_turns(
        _settlement(job_id, end, records.get(job_id), now, depth) for job_id, end in ends
    )
    settlements = [answer for answer in answers if not isinstance(answer, JobError)]
    errors = iter(await service.driver.settle(settlements, now=now))
    return [answer if isinstance(answer, JobError) else next(errors) or answer for answer in answers]


def _settled(job_id: str, settlement: Settlement) -> responses.Settled:
    run_at = settlement.run_at_us if isinstance(settlement, (Retry, Release)) else None
    at = None if run_at is None else responses.instant(run_at)
    return responses.Settled(id=job_id, applied=_APPLIED[type(settlement)], run_at=at)


_FAILING = (requests.Retry, requests.Fail)


def _settlement(
    job_id: str, end: requests.End, record: JobRecord | None, now: Micros, max_depth: int
) -> Settlement | JobError:
    token = _token_of(job_id, end, record)
    if isinstance(token, JobError):
        return token
    if isinstance(end, requests.Complete):
        return Ack(job_id, token, _result(end, max_depth))
    if isinstance(end, requests.Release):
        return Release(job_id, token, _when(end, now))
    if isinstance(end, requests.Discard):
        return Discard(job_id, token, None if end.reason is None else _failure(end.reason))
    if record is None:
        return JobNotFound(job_id)
    attempts, failure = record.attempts + 1, _failure(end.error)
    is_wanted = isinstance(end, requests.Retry) or end.retryable
    has_ended = record.state in (JobState.DONE, JobState.DEAD)
    if not is_wanted or has_ended or attempts + record.stalls >= record.max_attempts:
        # Of a job that has ended, a failure that is told again is no error.
        return Fail(job_id, token, attempts, failure)
    run_at = _when(end, now) if isinstance(end, requests.Retry) else None
    if run_at is None:
        run_at = now + DEFAULT_RETRY.next_delay(record, attempts)
    return Retry(job_id, token, min(run_at, LATEST), attempts, failure)


def _when(end: requests.Retry | requests.Release, now: Micros) -> Micros | None:
    if end.run_at is not None:
        if end.delay_seconds is not None:
            raise invalid("give either run_at or delay_seconds, not both")
        return to_micros(end.run_at)
    return None if end.delay_seconds is None else min(now + round(end.delay_seconds * SECOND), LATEST)


def _result(end: requests.Complete, max_depth: int) -> bytes | None:
    data = end.result_base64
    if isinstance(end.result, UnsetType):
        return None if data is None else requests.checked_size(data, MAX_RESULT_BYTES, "result")
    if data is not None:
        raise invalid("give either result or result_base64, not both")
    return requests.checked_json(end.result, max_depth, MAX_RESULT_BYTES, "result")


def _failure(error: str | requests.ErrorReport) -> Failure:
    report = requests.ErrorReport(message=error) if isinstance(error, str) else error
    return Failure.of(report.type or "Error", report.message, report.detail)


for _name, _summary, _body in (
    ("complete", "The job is done.", requests.Complete),
    ("retry", "The execution failed; run the job again, at a time of your choice.", requests.Retry),
    ("fail", "The execution failed; the job's own limits and back-off apply.", requests.Fail),
    ("release", "Give the job back unspent, now or for later.", requests.Release),
    ("discard", "End the job as cancelled.", requests.Discard),
):
    _post(f"/v1/jobs/{{id}}/{_name}", _summary, name=_name, body=_body, problems=(404, 409))(settle_one)
