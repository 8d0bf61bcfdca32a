"""What went wrong, for the caller: `application/problem+json` (RFC 9457) with a stable code, a sentence and what to do.

Nothing here repeats a payload or a secret, and what the broker did not expect is told in no more words than "internal".
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from taskharbor.broker.models import JOB_ERRORS, OTHER_JOB_ERROR
from taskharbor.errors import (
    BackendUnavailable,
    CodecError,
    InvalidRequest,
    JobError,
    SchemaMismatch,
    TaskHarborError,
)

CONTENT_TYPE = "application/problem+json"


class ProblemDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of every answer that is not a success."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    hint: str = ""
    leader: str | None = None


class Problem(Exception):
    """Ends a request with this answer."""

    def __init__(
        self, status: int, code: str, detail: str, *, hint: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.detail = detail
        self.hint = hint
        self.headers = dict(headers or {})

    def response(self) -> Response:
        document = ProblemDocument(
            type=f"urn:taskharbor:problem:{self.code}",
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            code=self.code,
            detail=self.detail,
            hint=self.hint,
            leader=self.headers.get(LEADER_HEADER),
        )
        return Response(
            msgspec.json.encode(document), self.status, headers=self.headers, media_type=CONTENT_TYPE
        )


LEADER_HEADER = "TaskHarbor-Leader"


def invalid(detail: str, hint: str = "") -> Problem:
    return Problem(422, "invalid_request", detail, hint=hint)


def not_leader(leader_url: str | None) -> Problem:
    if leader_url is None:
        return Problem(
            421,
            "not_leader",
            "this broker is a standby, and no leader is known at the moment",
            hint="try again in a moment",
            headers={"Retry-After": "1"},
        )
    return Problem(
        421,
        "not_leader",
        "this broker is a standby; another one leads",
        hint=f"send the same request to {leader_url}",
        headers={LEADER_HEADER: leader_url},
    )


def problem_of(error: TaskHarborError) -> Problem:
    """A contract error as an answer."""
    if isinstance(error, JobError):
        status, code = JOB_ERRORS.get(type(error), OTHER_JOB_ERROR)
        return Problem(status, code, str(error))
    if isinstance(error, (InvalidRequest, CodecError)):
        return invalid(str(error))
    if isinstance(error, BackendUnavailable):
        return Problem(
            503,
            "backend_unavailable",
            "the store behind this broker does not answer; the call may or may not have taken effect",
            hint="repeat the same request in a moment",
            headers={"Retry-After": "1"},
        )
    if isinstance(error, SchemaMismatch):
        return Problem(
            503,
            "schema_mismatch",
            "the store behind this broker was written by a version that it cannot work with",
            hint="an operator must run `taskharbor migrate` on the store",
            headers={"Retry-After": "60"},
        )
    return Problem(500, "internal", "the broker met an error it did not expect", hint="its log has the place")
