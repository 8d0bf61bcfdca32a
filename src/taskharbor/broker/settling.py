"""How jobs end, or do not: the core's rules, so that a client in any language gets the same retries as a worker of ours."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime

from msgspec import UnsetType

import taskharbor.broker.asked as asked
from taskharbor.broker.answered import Applied, Settled, SettledItem, SettledItems
from taskharbor.broker.asked import End, ErrorReport
from taskharbor.broker.claiming import token_of
from taskharbor.broker.json_values import checked_json
from taskharbor.broker.operations import Call, route
from taskharbor.broker.problems import Problem
from taskharbor.broker.submitting import check_batch
from taskharbor.broker.views import instant, item_error
from taskharbor.drivers.contract import Ack, Discard, Fail, Release, Retry, Settlement
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import (
    LATEST,
    MAX_RESULT_BYTES,
    SECOND,
    Failure,
    JobRecord,
    JobState,
    Micros,
    to_micros,
)
from taskharbor.retry import DEFAULT_RETRY

_APPLIED: dict[type, Applied] = {
    Ack: "complete",
    Retry: "retry",
    Fail: "fail",
    Release: "release",
    Discard: "discard",
}


async def settle_one(call: Call) -> Settled:
    job_id = call.names["id"]
    (answer,) = await _settle(call, [(job_id, call.body)])
    if isinstance(answer, JobError):
        raise answer
    return Settled(id=job_id, applied=_APPLIED[type(answer)], run_at=_run_at_of(answer))


_post = functools.partial(route, "POST", tag="work", scope="work")


@_post(
    "/v1/jobs/settle", "End many leases at once; each is applied and answered on its own.", body=asked.Ends
)
async def settle(call: Call) -> SettledItems:
    ends = [(one.id, one) for one in call.body.settlements]
    check_batch(len(ends), call.service.config.max_batch)
    answers = await _settle(call, ends)
    return SettledItems([_item(job_id, answer) for (job_id, _), answer in zip(ends, answers, strict=True)])


async def _settle(call: Call, ends: Sequence[tuple[str, End]]) -> list[Settlement | JobError]:
    """What was written for each, or why nothing was."""
    service = call.service
    now = service.now()
    depth = service.config.max_depth
    needed = [job_id for job_id, end in ends if end.token is None or isinstance(end, _FAILING)]
    # Attempts cannot change under a lease, so what is read here still holds when the token is checked.
    records = dict(zip(needed, await service.driver.get(needed, now=now), strict=True)) if needed else {}
    answers = [_settlement(job_id, end, records.get(job_id), now, depth) for job_id, end in ends]
    settlements = [answer for answer in answers if not isinstance(answer, JobError)]
    errors = iter(await service.driver.settle(settlements, now=now) if settlements else ())
    return [answer if isinstance(answer, JobError) else next(errors) or answer for answer in answers]


def _item(job_id: str, answer: Settlement | JobError) -> SettledItem:
    if isinstance(answer, JobError):
        return SettledItem(id=job_id, error=item_error(answer))
    return SettledItem(id=job_id, applied=_APPLIED[type(answer)], run_at=_run_at_of(answer))


_FAILING = (asked.Retry, asked.Fail)


def _settlement(
    job_id: str, end: End, record: JobRecord | None, now: Micros, max_depth: int
) -> Settlement | JobError:
    token = token_of(job_id, end, record)
    if isinstance(token, JobError):
        return token
    if isinstance(end, asked.Complete):
        return Ack(job_id, token, _result(end, max_depth))
    if isinstance(end, asked.Release):
        return Release(job_id, token, _when(end, now))
    if isinstance(end, asked.Discard):
        return Discard(job_id, token, None if end.reason is None else _failure(end.reason))
    if record is None:
        return JobNotFound(job_id)
    attempts, failure = record.attempts + 1, _failure(end.error)
    is_wanted = isinstance(end, asked.Retry) or end.retryable
    has_ended = record.state in (JobState.DONE, JobState.DEAD)
    if not is_wanted or has_ended or attempts + record.stalls >= record.max_attempts:
        # Of a job that has ended, a failure that is told again is no error.
        return Fail(job_id, token, attempts, failure)
    run_at = _when(end, now) if isinstance(end, asked.Retry) else None
    if run_at is None:
        run_at = now + DEFAULT_RETRY.next_delay(record, attempts)
    return Retry(job_id, token, min(run_at, LATEST), attempts, failure)


def _when(end: asked.Retry | asked.Release, now: Micros) -> Micros | None:
    if end.run_at is not None:
        if end.delay_seconds is not None:
            raise Problem(422, "invalid_request", "give either run_at or delay_seconds, not both")
        return to_micros(end.run_at)
    return None if end.delay_seconds is None else min(now + round(end.delay_seconds * SECOND), LATEST)


def _result(end: asked.Complete, max_depth: int) -> bytes | None:
    data: bytes | None = end.result_base64
    if not isinstance(end.result, UnsetType):
        if data is not None:
            raise Problem(422, "invalid_request", "give either result or result_base64, not both")
        data = checked_json(end.result, max_depth, "result")
    if data is not None and len(data) > MAX_RESULT_BYTES:
        raise Problem(
            422,
            "invalid_request",
            f"a result of {len(data)} bytes: at most {MAX_RESULT_BYTES} are kept",
            hint="store it elsewhere and send a reference to it",
        )
    return data


def _failure(error: str | ErrorReport) -> Failure:
    report = ErrorReport(message=error) if isinstance(error, str) else error
    return Failure.of(report.type or "Error", report.message, report.detail)


def _run_at_of(settlement: Settlement) -> datetime | None:
    run_at = settlement.run_at_us if isinstance(settlement, (Retry, Release)) else None
    return None if run_at is None else instant(run_at)


for _name, _summary, _body in (
    ("complete", "The job is done.", asked.Complete),
    ("retry", "The execution failed; run the job again, at a time of your choice.", asked.Retry),
    ("fail", "The execution failed; the job's own limits and back-off apply.", asked.Fail),
    ("release", "Give the job back unspent, now or for later.", asked.Release),
    ("discard", "End the job as cancelled.", asked.Discard),
):
    _post(f"/v1/jobs/{{id}}/{_name}", _summary, name=_name, body=_body, problems=(404, 409))(settle_one)
