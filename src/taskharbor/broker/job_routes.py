"""Routes of producers and workers: submit, claim, heartbeat, settle, by the core's own rules for limits and back-off."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from taskharbor.broker import models
from taskharbor.broker.exchange import ClientGone, Departure
from taskharbor.broker.problems import Problem, invalid
from taskharbor.broker.routes import Reply, RouteCall, check_batch, decoded, route, route_many, route_one
from taskharbor.drivers.operations import Enqueue, Wait
from taskharbor.drivers.records import Ack, Discard, Extension, Fail, Release, Retry, Settlement
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
    Micros,
    to_datetime,
    to_micros,
)
from taskharbor.requests import EncodedPayload, RecordBuilder
from taskharbor.retry import DEFAULT_RETRY

TURN_SECONDS = 0.02
T = TypeVar("T")


async def in_turns(items: Iterable[T]) -> list[T]:
    """Return the items of a batch. Checking them may take seconds, so other requests get their turns meanwhile."""
    made: list[T] = []
    began = time.perf_counter()
    for item in items:
        made.append(item)
        if time.perf_counter() - began > TURN_SECONDS:
            await asyncio.sleep(0)
            began = time.perf_counter()
    return made


# -- payloads, results, progress ----------------------------------------------------------------------------
# Kept as the text that came, checked but not rebuilt: a number keeps its digits, and a batch costs no more than its bytes.

_decode = msgspec.json.Decoder().decode
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def _content(
    value: models.AnyJSON, data: bytes | None, call: RouteCall, most: int, name: str
) -> bytes | None:
    """Return the bytes of a JSON value or of a text in base64. A request has at most one of them. `most`: the limit in bytes."""
    if isinstance(value, UnsetType):
        return None if data is None else _checked_size(data, most, name)
    if data is not None:
        raise invalid(f"give either {name} or {name}_base64, not both")
    text = _checked_size(bytes(value), most, name)
    max_depth = call.service.config.max_depth
    # Most values have fewer brackets than the allowed depth.
    if text.count(b"[") + text.count(b"{") > max_depth and _is_deeper(text, max_depth):
        raise Problem("too_deep", f"the {name} is nested more than {max_depth} deep")
    try:
        _decode(text)
    except (ValueError, RecursionError) as error:
        raise Problem("bad_json", f"the {name} is not valid JSON: {_reason(error)}") from None
    return text


def _checked_size(data: bytes, most: int, name: str) -> bytes:
    if len(data) > most:
        detail = f"{name} of {len(data)} bytes: at most {most} are kept"
        raise invalid(detail, hint="store it elsewhere and send a reference to it")
    return data


def _reason(error: Exception) -> str:
    """Return the reason and the place of a bad value, without its content."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)


def _is_deeper(data: bytes, max_depth: int) -> bool:
    """Return True if the nesting is deeper. Each round removes the innermost brackets, which is quicker than a loop over all of
    them."""
    brackets = _STRING.sub(b"", data).translate(_ONE_KIND, _NO_BRACKET)
    for _ in range(max_depth):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


# -- submitting ---------------------------------------------------------------------------------------------

_builder = RecordBuilder()


class _Shape(msgspec.Struct):
    """Just enough fields to distinguish the two forms."""

    jobs: msgspec.Raw | UnsetType = UNSET


_shape = msgspec.json.Decoder(_Shape).decode
_one = msgspec.json.Decoder(models.NewJob).decode
_many = msgspec.json.Decoder(models.NewJobs).decode


@route(
    "POST",
    "/v1/jobs",
    "Submit one job, or several that are stored all or not at all.",
    tag="produce",
    scope="produce",
    body_choices=(models.NewJob, models.NewJobs),
    answer=models.Submitted,
    status=201,
    answers=((201, models.SubmittedJobs), (200, models.Submitted), (200, models.SubmittedJobs)),
    still_holds=lambda answer, now: True,
)
async def submit(call: RouteCall) -> Any:
    """Stores one job, or several all or not at all."""
    data: bytes = call.body
    is_single = decoded(_shape, data).jobs is UNSET
    jobs = [decoded(_one, data)] if is_single else decoded(_many, data).jobs
    check_batch(len(jobs), call.service.config.max_batch)
    now = call.service.now()
    records = _builder.build(await in_turns(_request(job, call) for job in jobs), now)
    accepted = await call.service.driver.run(Enqueue(records, now, new_ids=True))
    status = 200 if all(one.existed for one in accepted) else 201
    return Reply(status, accepted[0] if is_single else {"jobs": accepted})


def _request(job: models.NewJob, call: RouteCall) -> JobRequest:
    if job.payload_base64 is None and job.codec not in (None, "json"):
        raise invalid(
            "a payload in another codec than json cannot be written as a JSON value",
            hint="encode it yourself and send the bytes as payload_base64",
        )
    payload = _content(job.payload, job.payload_base64, call, MAX_PAYLOAD_BYTES, "payload")
    return models.job_request(job, EncodedPayload(b"null" if payload is None else payload))


# -- claiming -----------------------------------------------------------------------------------------------

_WORK: dict[str, Any] = {"tag": "work", "scope": "work"}


def _are_still_leased(claimed: models.ClaimedJobs, now: Micros) -> bool:
    """Return True if the leases of an answer are still valid. An empty answer holds nothing: a repeated request wants jobs."""
    return bool(claimed.jobs) and all(
        job.expires_at is not None and job.expires_at > to_datetime(now) for job in claimed.jobs
    )


@route(
    "POST",
    "/v1/jobs/claim",
    "Lease runnable jobs; with wait_seconds, wait until there is one.",
    body=models.ClaimRequest,
    still_holds=_are_still_leased,
    **_WORK,
)
async def claim(call: RouteCall) -> models.ClaimedJobs:
    """Leases runnable jobs, after a wait where the client asks for one."""
    if call.body.wait_seconds <= 0:
        records = await _reserve(call)
    else:
        with Departure(call.request) as departure:
            records = await _wait_for_jobs(call, departure)
            if departure.has_left and records:
                # Nobody is left to do the work, so it need not wait for the leases to expire.
                unused = [Release(record.id, record.token or "") for record in records]
                await call.service.driver.settle(unused, now=call.service.now())
                raise ClientGone
    return models.ClaimedJobs([models.claimed_job(record) for record in records])


async def _reserve(call: RouteCall) -> list[JobRecord]:
    wanted: models.ClaimRequest = call.body
    return await call.service.driver.reserve(
        wanted.queue,
        limit=wanted.limit,
        lease_for=round(wanted.lease_seconds * SECOND),
        now=call.service.now(),
        worker=wanted.worker or wanted.worker_camel or call.caller.name,
        types=wanted.types,
    )


async def _wait_for_jobs(call: RouteCall, departure: Departure) -> list[JobRecord]:
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


# -- heartbeats ---------------------------------------------------------------------------------------------


async def extend(
    call: RouteCall, beats: Sequence[tuple[str, models.HeartbeatRequest | models.HeartbeatItem]]
) -> list[models.HeldLease | JobError]:
    """Return the new lease of each job, or its error."""
    driver, now = call.service.driver, call.service.now()
    nameless = [job_id for job_id, beat in beats if beat.token is None]
    records = dict(zip(nameless, await driver.get(nameless, now=now), strict=True))
    tokens = [_token_of(job_id, beat, records.get(job_id)) for job_id, beat in beats]
    extensions = await in_turns(
        Extension(job_id, token, _content(beat.progress, None, call, MAX_PROGRESS_BYTES, "progress"))
        for (job_id, beat), token in zip(beats, tokens, strict=True)
        if isinstance(token, str)
    )
    lease_for = round(call.body.lease_seconds * SECOND)
    leases = iter(await driver.extend_lease(extensions, lease_for=lease_for, now=now))
    answers = [next(leases) if isinstance(token, str) else token for token in tokens]
    return [one if isinstance(one, JobError) else models.model_of(models.HeldLease, one) for one in answers]


_NO_LEASE = "none"
"""A token for a job that is not inflight. The driver then returns the right error, whatever the token."""


def _token_of(job_id: str, proof: models.LeaseProof, record: JobRecord | None) -> str | JobError:
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


_beat: dict[str, Any] = {**_WORK, "answer": models.HeldLease}
_beat_one = "Extend one lease, report progress, and learn of a requested cancel."
route_one("heartbeat", _beat_one, extend, body=models.HeartbeatRequest, **_beat)
_beat_many = "Extend the leases of many jobs; each answer stands for itself."
route_many("heartbeat", _beat_many, extend, "jobs", body=models.HeartbeatBatch, **_beat)

# -- settling -----------------------------------------------------------------------------------------------

_ACTIONS: dict[type, models.SettleAction] = {
    Ack: "complete",
    Retry: "retry",
    Fail: "fail",
    Release: "release",
    Discard: "discard",
}


async def settle(
    call: RouteCall, ends: Sequence[tuple[str, models.SettleRequest]]
) -> list[models.SettledJob | JobError]:
    """Settle jobs. Returns the settlement that was written for each, or its error."""
    driver, now = call.service.driver, call.service.now()
    failing = (models.RetryRequest, models.FailRequest)
    needed = [job_id for job_id, end in ends if end.token is None or isinstance(end, failing)]
    # Attempts cannot change under a lease, so the values that are read here still hold when the token is checked.
    records = dict(zip(needed, await driver.get(needed, now=now), strict=True))
    settlements = await in_turns(
        _settlement(job_id, end, records.get(job_id), now, call) for job_id, end in ends
    )
    valid = [one for one in settlements if not isinstance(one, JobError)]
    errors = iter(await driver.settle(valid, now=now))
    return [one if isinstance(one, JobError) else next(errors) or _settled(one) for one in settlements]


def _settled(settlement: Settlement) -> models.SettledJob:
    run_at = settlement.run_at_us if isinstance(settlement, (Retry, Release)) else None
    at = None if run_at is None else to_datetime(run_at)
    return models.SettledJob(id=settlement.job_id, applied=_ACTIONS[type(settlement)], run_at=at)


def _settlement(
    job_id: str, end: models.SettleRequest, record: JobRecord | None, now: Micros, call: RouteCall
) -> Settlement | JobError:
    token = _token_of(job_id, end, record)
    if isinstance(token, JobError):
        return token
    if isinstance(end, models.CompleteRequest):
        return Ack(job_id, token, _content(end.result, end.result_base64, call, MAX_RESULT_BYTES, "result"))
    if isinstance(end, models.ReleaseRequest):
        return Release(job_id, token, _when(end, now))
    if isinstance(end, models.DiscardRequest):
        return Discard(job_id, token, None if end.reason is None else _failure(end.reason))
    if record is None:
        return JobNotFound(job_id)
    attempts, failure = record.attempts + 1, _failure(end.error)
    is_wanted = isinstance(end, models.RetryRequest) or end.retryable
    has_ended = record.state in (JobState.DONE, JobState.DEAD)
    if not is_wanted or has_ended or attempts + record.stalls >= record.max_attempts:
        # A repeated failure of a job that has ended is no error.
        return Fail(job_id, token, attempts, failure)
    run_at = _when(end, now) if isinstance(end, models.RetryRequest) else None
    if run_at is None:
        run_at = now + DEFAULT_RETRY.next_delay(record, attempts)
    return Retry(job_id, token, min(run_at, LATEST), attempts, failure)


def _when(end: models.RetryRequest | models.ReleaseRequest, now: Micros) -> Micros | None:
    if end.run_at is not None:
        if end.delay_seconds is not None:
            raise invalid("give either run_at or delay_seconds, not both")
        return to_micros(end.run_at)
    return None if end.delay_seconds is None else min(now + round(end.delay_seconds * SECOND), LATEST)


def _failure(error: str | models.ErrorReport) -> Failure:
    report = models.ErrorReport(message=error) if isinstance(error, str) else error
    return Failure.of(report.type or "Error", report.message, report.detail)


_SUMMARIES: dict[models.SettleAction, str] = {
    "complete": "The job is done.",
    "retry": "The execution failed; run the job again, at a time of your choice.",
    "fail": "The execution failed; the job's own limits and back-off apply.",
    "release": "Give the job back unspent, now or for later.",
    "discard": "End the job as cancelled.",
}
_end: dict[str, Any] = {**_WORK, "answer": models.SettledJob}
for _action, _body in models.SETTLE_REQUESTS.items():
    route_one(_action, _SUMMARIES[_action], settle, body=_body, **_end)
_ends = "End many leases at once; each is applied and answered on its own."
route_many("settle", _ends, settle, "settlements", name="settle", body=models.SettleBatch, **_end)
