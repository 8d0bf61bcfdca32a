"""Errors as answers: `application/problem+json` (RFC 9457) with a stable code, a sentence and advice.

Nothing here repeats a payload or a secret. An unexpected error of the broker is only called "internal".
"""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from taskharbor import errors
from taskharbor.broker.models import JOB_ERROR_CODES, error_code, job_error_code
from taskharbor.drivers.broker_protocol import LEADER

CONTENT_TYPE = "application/problem+json"


class ProblemDetails(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of every answer that is not a success."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    hint: str = ""
    leader: str | None = None


_AGAIN = "repeat the same request in a moment"

# The status and the usual hint of every refusal, by its code.
CODES: dict[str, tuple[int, str]] = {
    "bad_json": (400, ""),
    "unauthenticated": (401, "send the header Authorization: Bearer SECRET, with the secret part of a token"),
    "forbidden": (403, ""),
    "bad_origin": (403, ""),
    "no_such_path": (404, "GET /openapi.json lists what there is"),
    "method_not_allowed": (405, ""),
    "slow_body": (408, ""),
    **dict.fromkeys([*JOB_ERROR_CODES.values(), "job_error"], (409, "")),
    "job_not_found": (404, ""),
    "schedule_not_found": (404, ""),
    "queue_not_found": (404, 'send "create": true to create it'),
    "too_large": (413, "send fewer jobs per request, or store the data elsewhere and send a reference to it"),
    "too_many_items": (413, "send them in several requests"),
    "unsupported_media_type": (415, ""),
    "not_leader": (421, "try again in a moment"),
    "unknown_host": (421, "start the broker with --host-name for every name that clients use"),
    "invalid_request": (422, ""),
    "too_deep": (422, ""),
    "clock_skew": (422, "take the time from this broker (the operation `time`), not from your own clock"),
    "rate_limited": (429, ""),
    "too_many_requests": (429, _AGAIN),
    "too_many_waiting": (429, "wait a moment and ask again, without wait_seconds or with fewer workers"),
    "internal": (500, "its log has the place"),
    "job_damaged": (500, ""),
    "backend_unavailable": (503, _AGAIN),
    "schema_mismatch": (503, "an operator must run `taskharbor migrate` on the store"),
    "stopping": (503, f"{_AGAIN}, or at another broker"),
}


class Problem(Exception):
    """Ends a request with this answer. `hint` replaces the usual one. `retry_after` is in seconds."""

    def __init__(
        self, code: str, detail: str, *, hint: str = "", retry_after: float = 0.0, **headers: str
    ) -> None:
        super().__init__(code)
        self.code = code
        self.status, usual_hint = CODES[code]
        self.detail = detail
        self.hint = hint or usual_hint
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if retry_after:
            self.headers["Retry-After"] = str(math.ceil(retry_after))

    def response(self) -> Response:
        """The answer in the form of RFC 9457."""
        document = ProblemDetails(
            type=f"urn:taskharbor:problem:{self.code}",
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            code=self.code,
            detail=self.detail,
            hint=self.hint,
            leader=self.headers.get(LEADER),
        )
        data = msgspec.json.encode(document)
        return Response(data, self.status, headers=self.headers, media_type=CONTENT_TYPE)


def invalid(detail: str, hint: str = "") -> Problem:
    """Make the refusal of a request with a value that is not allowed."""
    return Problem("invalid_request", detail, hint=hint)


def not_leader(leader_url: str | None) -> Problem:
    """A standby's refusal, with the leader's URL where one is known."""
    if leader_url is None:
        detail = "this broker is a standby, and no leader is known at the moment"
        return Problem("not_leader", detail, retry_after=1)
    detail, hint = "this broker is a standby; another one leads", f"send the same request to {leader_url}"
    return Problem("not_leader", detail, hint=hint, TaskHarbor_Leader=leader_url)


def problem_of(error: errors.TaskHarborError) -> Problem:
    """Return the answer for an error of the contract."""
    if isinstance(error, errors.JobError):
        return Problem(job_error_code(error), str(error))
    if isinstance(error, (errors.InvalidRequest, errors.CodecError)):
        return invalid(str(error))
    if isinstance(error, (errors.JobDamaged, errors.QueueNotFound, errors.ScheduleNotFound)):
        return Problem(error_code(type(error)), str(error))
    if isinstance(error, errors.BackendUnavailable):
        detail = "the store behind this broker does not answer; the call may or may not have taken effect"
        return Problem("backend_unavailable", detail, retry_after=1)
    if isinstance(error, errors.SchemaMismatch):
        detail = "the store behind this broker was written by a version that it cannot work with"
        return Problem("schema_mismatch", detail, retry_after=60)
    return Problem("internal", "the broker met an error it did not expect")
