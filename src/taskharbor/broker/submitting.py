"""New jobs: one, or many that are stored all or not at all."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from taskharbor.broker.answered import Submitted, SubmittedJobs
from taskharbor.broker.asked import NewJob, NewJobs
from taskharbor.broker.json_values import checked_json
from taskharbor.broker.operations import Call, Reply, decoded, route
from taskharbor.broker.problems import Problem
from taskharbor.drivers.operations import Enqueue
from taskharbor.jobs import JobRequest, UpdateFlags
from taskharbor.requests import EncodedPayload, RecordBuilder

_builder = RecordBuilder()


class _Shape(msgspec.Struct):
    """Just enough to see which of the two it is."""

    jobs: msgspec.Raw | UnsetType = UNSET


_shape = msgspec.json.Decoder(_Shape).decode
_one = msgspec.json.Decoder(NewJob).decode
_many = msgspec.json.Decoder(NewJobs).decode


@route(
    "POST",
    "/v1/jobs",
    "Submit one job, or several that are stored all or not at all.",
    tag="produce",
    scope="produce",
    body_choices=(NewJob, NewJobs),
    answer=Submitted,
    status=201,
    answers=((201, SubmittedJobs), (200, Submitted), (200, SubmittedJobs)),
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
    records = _builder.build([_request(job, config.max_depth) for job in jobs], now)
    accepted = await driver.run(Enqueue(records, now, new_ids=True))
    answers = [Submitted(one.id, one.existed) for one in accepted]
    status = 200 if all(one.existed for one in accepted) else 201
    return Reply(status, answers[0] if is_single else SubmittedJobs(answers))


def check_batch(length: int, most: int) -> None:
    if length > most:
        raise Problem(
            413,
            "too_many_items",
            f"{length} items in one request: at most {most} are accepted",
            hint="send them in several requests",
        )


_SHARED = set(JobRequest.__struct_fields__) & set(NewJob.__struct_fields__) - {"payload"}


def _request(job: NewJob, max_depth: int) -> JobRequest:
    request = JobRequest(
        payload=EncodedPayload(_payload(job, max_depth)), **{name: getattr(job, name) for name in _SHARED}
    )
    if job.max_attempts_camel is not None:
        request.max_attempts = job.max_attempts_camel
    if job.update is not None:
        request.update = UpdateFlags(*msgspec.structs.astuple(job.update))
    return request


def _payload(job: NewJob, max_depth: int) -> bytes:
    if job.payload_base64 is not None:
        if not isinstance(job.payload, UnsetType):
            raise Problem(422, "invalid_request", "give either payload or payload_base64, not both")
        return job.payload_base64
    if job.codec not in (None, "json"):
        raise Problem(
            422,
            "invalid_request",
            "a payload in another codec than json cannot be written as a JSON value",
            hint="encode it yourself and send the bytes as payload_base64",
        )
    return b"null" if isinstance(job.payload, UnsetType) else checked_json(job.payload, max_depth, "payload")
