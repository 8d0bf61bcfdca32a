"""Routes of producers and workers: submit, claim, heartbeat, settle, by the core's own rules for limits and back-off."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import UNSET, UnsetType

from taskharbor.broker import models
from taskharbor.broker.calls import check_queues
from taskharbor.broker.error_responses import Problem, invalid
from taskharbor.broker.request_response import ClientGone, unless_left, watched_client
from taskharbor.broker.routes import Reply, RouteCall, decoded, route, route_many, route_one
from taskharbor.drivers.operations import Enqueue, ExtendLease, Operation, Reserve, Settle, Wait
from taskharbor.drivers.records import Ack, Discard, Extension, Fail, Release, RetryAt, Settlement
from taskharbor.errors import JobError, JobNotFound, LeaseMismatch, RemoteError
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
from taskharbor.retry import retry_delay

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


def content(value: models.AnyJSON, data: bytes | None, call: RouteCall, most: int, name: str) -> bytes | None:
    """Return the bytes of a JSON value or of a text in base64. A request has at most one of them. `most`: the limit in bytes."""
    text = data if isinstance(value, UnsetType) else bytes(value)
    if value is not UNSET and data is not None:
        raise invalid(f"give either {name} or {name}_base64, not both")
    if text is not None and len(text) > most:
        detail = f"{name} of {len(text)} bytes: at most {most} are kept"
        raise invalid(detail, hint="store it elsewhere and send a reference to it")
    if text is None or value is UNSET:
        return text
    max_depth = call.service.config.max_depth
    # Most values have fewer brackets than the allowed depth.
    if text.count(b"[") + text.count(b"{") > max_depth and _is_deeper(text, max_depth):
        raise Problem("too_deep", f"the {name} is nested more than {max_depth} deep")
    decoded(_decode, text, name)
    return text


def _is_deeper(data: bytes, max_depth: int) -> bool:
    """Return True if the nesting is deeper. Each round removes the innermost brackets, which is quicker than a loop over all of
    them."""
    brackets = _STRING.sub(b"", data).translate(_ONE_KIND, _NO_BRACKET)
    for _ in range(max_depth):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


# -- submitting ---------------------------------------------------------------------------------------------

_builder = RecordBuilder()


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_one = msgspec.json.Decoder(models.NewJob).decode
_many = msgspec.json.Decoder(models.NewJobs).decode


@route(
    "POST",
    "/v1/jobs",
    tag="produce",
    scope="produce",
    bodies=(models.NewJob, models.NewJobs),
    answers=dict.fromkeys((201, 200), (models.SubmittedJob, models.SubmittedJobs)),
    still_holds=lambda answer, now: True,
)
async def submit(call: RouteCall) -> Reply:
    """Submit one job, or several that are stored all or not at all."""
    data: bytes = call.body
    is_single = "jobs" not in decoded(_fields, data)
    jobs = [decoded(_one, data)] if is_single else decoded(_many, data).jobs
    call.check_batch(len(jobs))
    now = call.service.now()
    records = _builder.build(await in_turns(_request(job, call) for job in jobs), now)
    accepted = await call.run(Enqueue(records, now, new_ids=True))
    status = 200 if all(one.existed for one in accepted) else 201
    if is_single:
        return Reply(status, models.model_of(models.SubmittedJob, accepted[0], job_id=accepted[0].id))
    return Reply(status, {"jobs": accepted})


def _request(job: models.NewJob, call: RouteCall) -> JobRequest:
    if job.payload_base64 is None and job.codec not in (None, "json"):
        raise invalid(
            "a payload in another codec than json cannot be written as a JSON value",
            hint="encode it yourself and send the bytes as payload_base64",
        )
    payload = content(job.payload, job.payload_base64, call, MAX_PAYLOAD_BYTES, "payload")
    return models.job_request(job, EncodedPayload(b"{}" if payload is None else payload))


# -- claiming -----------------------------------------------------------------------------------------------

_WORK: dict[str, Any] = {"tag": "work", "scope": "work"}


Claimed: TypeAlias = models.ClaimedJobs | models.OriginalJob | models.NoOriginalJob
_claim = msgspec.json.Decoder(models.ClaimRequest).decode
_original_claim = msgspec.json.Decoder(models.OriginalClaim).decode


def _are_still_leased(claimed: Claimed, now: Micros) -> bool:
    """Return True if the leases of an answer are still valid. An empty answer holds nothing: a repeated request wants jobs."""
    ends = [getattr(job, "expires_at", None) for job in getattr(claimed, "jobs", [claimed])]
    return bool(ends) and all(end is not None and end > to_datetime(now) for end in ends)


@route(
    "POST",
    "/v1/jobs/claim",
    bodies=(models.ClaimRequest, models.OriginalClaim),
    answers={200: get_args(Claimed)},
    still_holds=_are_still_leased,
    **_WORK,
)
async def claim(call: RouteCall) -> Claimed:
    """Lease runnable jobs; with wait_seconds, wait until there is one."""
    is_original = "workerId" in decoded(_fields, call.body)
    call.body = asked = decoded(_original_claim if is_original else _claim, call.body)
    if is_original:
        call.body = models.ClaimRequest(worker=_original_worker(call, asked.worker_id), types=asked.types)
    else:
        check_worker(asked.worker or "")
    check_queues(call.caller, [call.body.queue])
    if call.body.wait_seconds <= 0:
        records = await _reserve(call)
    else:
        with watched_client(call.request) as left:
            records = await _wait_for_jobs(call, left)
            if left.done() and records:
                # Nobody is left to do the work, so it need not wait for the leases to expire.
                unused = [Release(record.id, record.token or "") for record in records]
                await call.run(Settle([*unused], call.service.now()))
                raise ClientGone
    if is_original:
        return models.original_claim(records)
    return models.ClaimedJobs([models.claimed_job(record) for record in records])


def check_worker(name: str) -> None:
    """Raise `Problem` if a worker gives itself a name of the original protocol."""
    if name.startswith("/") and "/" in name[1:]:
        detail = "a worker's name of the form /TOKEN/NAME: it would prove a claim of the original protocol"
        raise invalid(detail, hint="give the worker another name")


def _original_worker(call: RouteCall, worker_id: str) -> str:
    """Return the name that the store keeps of a worker of the original protocol. It begins with the name of the access token, so
    that the id proves nothing under another token, nor for a job that was claimed otherwise."""
    return f"/{call.caller.name}/{worker_id}"


async def _reserve(call: RouteCall) -> list[JobRecord]:
    wanted: models.ClaimRequest = call.body
    lease_for, worker = round(wanted.lease_seconds * SECOND), wanted.worker or call.caller.name
    return await call.run(
        Reserve(wanted.queue, wanted.limit, lease_for, call.service.now(), worker, wanted.types)
    )


async def _wait_for_jobs(call: RouteCall, left: asyncio.Future[Any]) -> list[JobRecord]:
    service, queues = call.service, [call.body.queue]
    loop = asyncio.get_running_loop()
    end = loop.time() + min(call.body.wait_seconds, service.config.max_wait_seconds)
    # Taken before the first claim: a change after it ends the wait.
    seen = (await service.long_polls.wait(Wait(queues, service.now(), 0.0), call.caller.name)).seen
    while True:
        records = await _reserve(call)
        if records:
            return records
        poll = Wait(queues, service.now(), end - loop.time(), seen)
        woken = await unless_left(left, service.long_polls.wait(poll, call.caller.name))
        if not woken.woken:
            return []
        seen = woken.seen


# -- heartbeats and settlements -----------------------------------------------------------------------------

Change: TypeAlias = Extension | Settlement
Proof: TypeAlias = models.LeaseProof | models.HolderProof
_NO_LEASE = "none"
"""A token for a job that is not inflight. The driver then returns the right error, whatever the token."""


async def extend(
    call: RouteCall, beats: Sequence[tuple[str, models.Heartbeat]]
) -> list[models.HeldLease | JobError]:
    """Return the new lease of each job, or its error."""
    now, lease_for = call.service.now(), round(call.body.lease_seconds * SECOND)
    answers = await _change(call, beats, now, lambda changes: ExtendLease(changes, lease_for, now))
    leases = [lease for _, lease in answers]
    return [one if isinstance(one, JobError) else models.model_of(models.HeldLease, one) for one in leases]


async def settle(
    call: RouteCall, ends: Sequence[tuple[str, models.SettleRequest]]
) -> list[models.SettledJob | JobError]:
    """Settle jobs. Returns the settlement that was written for each, or its error."""
    now = call.service.now()
    changes = await _change(call, ends, now, lambda changes: Settle(changes, now))
    return [error or _settled(change) for change, error in changes]


def _settled(settlement: Any) -> models.SettledJob:
    run_at = getattr(settlement, "run_at_us", None)
    applied: Any = "complete" if isinstance(settlement, Ack) else settlement.__struct_config__.tag
    instant = None if run_at is None else to_datetime(run_at)
    return models.SettledJob(id=settlement.job_id, applied=applied, run_at=instant)


async def _change(
    call: RouteCall,
    requests: Sequence[tuple[str, Proof]],
    now: Micros,
    operation: Callable[[list[Any]], Operation[Any]],
) -> list[tuple[Change | JobError, Any]]:
    """Change jobs for their holders. Returns the change and the answer for each request. Either may be the error."""
    failures = (models.RetryRequest, models.FailRequest)
    needed = [job_id for job_id, asked in requests if asked.token is None or isinstance(asked, failures)]
    # Attempts cannot change under a lease, so the values that are read here still hold when the token is checked.
    records = await call.service.calls.heads(call.caller, needed, now)
    wanted = (_change_of(job_id, asked, records.get(job_id), now, call) for job_id, asked in requests)
    changes = await in_turns(wanted)
    answers = iter(await call.run(operation([one for one in changes if not isinstance(one, JobError)])))
    return [(one, one if isinstance(one, JobError) else next(answers)) for one in changes]


def _change_of(
    job_id: str, asked: Proof, record: JobRecord | None, now: Micros, call: RouteCall
) -> Change | JobError:
    token = asked.token if asked.token is not None else _token_of(job_id, asked, record, call)
    if isinstance(token, JobError):
        return token
    if isinstance(asked, models.Heartbeat):
        progress = content(asked.progress, None, call, MAX_PROGRESS_BYTES, "progress")
        return Extension(job_id, token, progress)
    if isinstance(asked, models.CompleteRequest):
        result = content(asked.result, asked.result_base64, call, MAX_RESULT_BYTES, "result")
        return Ack(job_id, token, result)
    if isinstance(asked, models.ReleaseRequest):
        return Release(job_id, token, _when(asked, now))
    if isinstance(asked, models.DiscardRequest):
        return Discard(job_id, token, None if asked.reason is None else _failure(asked.reason))
    assert isinstance(asked, (models.RetryRequest, models.FailRequest))
    if record is None:
        return JobNotFound(job_id)
    attempts, failure = record.attempts + 1, _failure(asked.error)
    ends = record.spent + 1 >= record.max_attempts
    if isinstance(asked, models.RetryRequest):
        # A repeated retry that used up the last attempt is no error. Any other of a job that has ended is one.
        ends = ends and record.state is not JobState.DONE
    else:
        ends = ends or not asked.retryable or record.state in (JobState.DONE, JobState.DEAD)
    if ends:
        return Fail(job_id, token, attempts, failure)
    run_at = _when(asked, now) if isinstance(asked, models.RetryRequest) else None
    if run_at is None:
        run_at = now + (retry_delay(None, record, attempts, RemoteError(failure)) or 0)
    return RetryAt(job_id, token, min(run_at, LATEST), attempts, failure)


def _token_of(
    job_id: str, proof: models.HolderProof, record: JobRecord | None, call: RouteCall
) -> str | JobError:
    """The token to act under, for a caller that gave none.

    A worker's id, as the original protocol has it, is the weaker proof: a worker that lost a job and claimed it again under
    the same id is taken for the one it was.
    """
    if proof.worker_id is None:
        hint = "send the token that the claim gave"
        raise invalid("the request does not say who holds the job", hint=hint)
    if record is None:
        return JobNotFound(job_id)
    if record.token is None:
        return _NO_LEASE
    return record.token if record.worker == _original_worker(call, proof.worker_id) else LeaseMismatch(job_id)


def _when(asked: models.RunAtRequest, now: Micros) -> Micros | None:
    if asked.run_at is not None:
        if asked.delay_seconds is not None:
            raise invalid("give either run_at or delay_seconds, not both")
        return to_micros(asked.run_at)
    return None if asked.delay_seconds is None else min(now + round(asked.delay_seconds * SECOND), LATEST)


def _failure(error: str | models.ErrorReport) -> Failure:
    report = models.ErrorReport(message=error) if isinstance(error, str) else error
    return Failure.of(report.type or "Error", report.message, report.detail)


_HELD: dict[str, Any] = {**_WORK, "answer": models.HeldLease}
route_one("heartbeat", extend, models.HeartbeatRequest, **_HELD)
route_many("heartbeat", extend, models.HeartbeatBatch, "jobs", **_HELD)
_SETTLED: dict[str, Any] = {**_WORK, "answer": models.SettledJob}
for _action, _body in models.SETTLE_REQUESTS.items():
    route_one(_action, settle, _body, **_SETTLED)
route_many("settle", settle, models.SettleBatch, "settlements", name="settle", **_SETTLED)
