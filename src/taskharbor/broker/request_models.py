"""Request bodies and queries of the JSON API.

Unknown fields are refused: a misspelt option that is silently left out is found much later. Names in camelCase are those of the
original broker protocol, beside ours.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from taskharbor.broker.problems import Problem, invalid
from taskharbor.jobs import LATEST, SECOND, Count, JobState, Name, Priority, Tries, UpdateRunAt

Instant: TypeAlias = Annotated[datetime, Meta(tz=True)]
InstantText: TypeAlias = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""In a query: numbers in quotes would pass for instants there."""
Delay: TypeAlias = Annotated[float, Meta(ge=0, lt=1e10, description="Seconds.")]
Retention: TypeAlias = Annotated[float, Meta(ge=0, le=LATEST // SECOND)]
LeaseSeconds: TypeAlias = Annotated[
    float, Meta(ge=0.001, le=86_400.0, description="How long the lease holds.")
]
Proof: TypeAlias = Annotated[Name, Meta(description="The lease token that the claim gave.")]
AnyJSON: TypeAlias = msgspec.Raw | UnsetType
LargestPage = 1000

DEFAULT_LEASE_SECONDS = 30.0


class RequestModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all bodies and queries."""


class Update(RequestModel):
    """How an enqueue changes a job with the same key."""

    payload: bool = True
    run_at: UpdateRunAt = "no"
    retry: bool = False
    reset_counts: bool = False


class NewJob(RequestModel, kw_only=True):
    """A job to do. Give the payload as any JSON value, or as bytes in base64 with the name of their codec."""

    type: Name
    payload: AnyJSON = UNSET
    payload_base64: bytes | None = None
    codec: Name | None = None
    queue: Name | None = None
    run_at: Instant | None = None
    delay: Delay | None = msgspec.field(default=None, name="delay_seconds")
    timeout: Annotated[float, Meta(ge=0.001, lt=1e10)] | None = msgspec.field(
        default=None, name="timeout_seconds"
    )
    priority: Priority | None = None
    key: Name | None = None
    update: Update | None = None
    idempotency_key: Name | None = None
    max_attempts: Tries | None = None
    max_attempts_camel: Tries | None = msgspec.field(default=None, name="maxAttempts")
    max_stalls: Tries | None = None
    backoff: tuple[Annotated[float, Meta(ge=0)], Annotated[float, Meta(ge=0, lt=1e9)]] | None = msgspec.field(
        default=None, name="backoff_seconds"
    )
    headers: dict[str, str] | None = None


class NewJobs(RequestModel):
    """Jobs to do, stored all or not at all."""

    jobs: Annotated[list[NewJob], Meta(min_length=1)]


class Claim(RequestModel):
    """Which jobs a worker takes, for how long, and how long it waits for one."""

    queue: Name = "default"
    types: list[Name] | None = None
    limit: Annotated[int, Meta(ge=1, le=LargestPage)] = 1
    lease_seconds: LeaseSeconds = DEFAULT_LEASE_SECONDS
    worker: Name | None = None
    worker_camel: Name | None = msgspec.field(default=None, name="workerId")
    wait_seconds: Annotated[float, Meta(ge=0, le=3600.0)] = 0.0


class ByHolder(RequestModel):
    """Proves that the caller holds the job: by the token of its lease, or by the name under which it claimed the job."""

    token: Proof | None = None
    worker: Name | None = None
    worker_camel: Name | None = msgspec.field(default=None, name="workerId")


class Beat(ByHolder):
    """A heartbeat for one job."""

    lease_seconds: LeaseSeconds = DEFAULT_LEASE_SECONDS
    progress: AnyJSON = UNSET


class BeatOf(ByHolder, kw_only=True):
    id: Name
    progress: AnyJSON = UNSET


class Beats(RequestModel):
    """Heartbeats for many jobs."""

    jobs: Annotated[list[BeatOf], Meta(min_length=1)]
    lease_seconds: LeaseSeconds = DEFAULT_LEASE_SECONDS


class ErrorReport(RequestModel):
    """What went wrong. Longer texts are cut."""

    type: str = "Error"
    message: str = ""
    detail: str = ""


class Complete(ByHolder):
    """The job is done. The result is kept as long as the job is."""

    result: AnyJSON = UNSET
    result_base64: bytes | None = None


class Retry(ByHolder):
    """The execution failed; run the job again after the delay, at the time, or by its own back-off. It dies when its attempts
    are used up."""

    error: str | ErrorReport = ""
    delay_seconds: Delay | None = None
    run_at: Instant | None = None


class Fail(ByHolder):
    """The execution failed. The job runs again by its own limits and back-off, unless `retryable` is false."""

    error: str | ErrorReport = ""
    retryable: bool = True


class Release(ByHolder):
    """The job goes back unspent: no attempt is counted."""

    delay_seconds: Delay | None = None
    run_at: Instant | None = None


class Discard(ByHolder):
    """The job is no longer worth doing: it ends as cancelled."""

    reason: str | ErrorReport | None = None


class CompleteOf(Complete, kw_only=True, tag_field="action", tag="complete"):
    """One end in a batch: done."""

    id: Name


class RetryOf(Retry, kw_only=True, tag_field="action", tag="retry"):
    """One end in a batch: failed, and when to run again."""

    id: Name


class FailOf(Fail, kw_only=True, tag_field="action", tag="fail"):
    """One end in a batch: failed."""

    id: Name


class ReleaseOf(Release, kw_only=True, tag_field="action", tag="release"):
    """One end in a batch: given back."""

    id: Name


class DiscardOf(Discard, kw_only=True, tag_field="action", tag="discard"):
    """One end in a batch: no longer worth doing."""

    id: Name


End: TypeAlias = Complete | Retry | Fail | Release | Discard
EndOf: TypeAlias = CompleteOf | RetryOf | FailOf | ReleaseOf | DiscardOf


class Ends(RequestModel):
    """How many jobs ended."""

    settlements: Annotated[list[EndOf], Meta(min_length=1)]


class Nothing(RequestModel):
    """No field at all."""


class Ids(RequestModel):
    ids: Annotated[list[Name], Meta(min_length=1)]


class Settings(RequestModel):
    """A queue's settings, as a whole: what is left out gets its default. `null` keeps for ever, or sets no limit."""

    paused: bool = False
    max_inflight: Count | None = None
    failure_queue: Name | None = None
    keep_done_seconds: Retention | None = 7 * 86_400.0
    keep_dead_seconds: Retention | None = 90 * 86_400.0
    keep_attempts_seconds: Retention | None = 30 * 86_400.0


class Purge(RequestModel):
    """Which ended jobs to remove. Jobs that have not ended are never touched."""

    queue: Name | None = None
    states: list[JobState] | None = None
    types: list[Name] | None = None
    key: Name | None = None
    finished_before: Instant | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = LargestPage


class JobsQuery(RequestModel):
    """What is left out does not restrict. There is no null in a query, so nothing here is None."""

    queue: Name | UnsetType = UNSET
    state: list[JobState] = []
    type: list[Name] = []
    key: Name | UnsetType = UNSET
    worker: Name | UnsetType = UNSET
    finished_before: InstantText | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=LargestPage)] = 100
    cursor: str | UnsetType = UNSET
    payload: bool = False


class AttemptsQuery(RequestModel):
    after: str | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=LargestPage)] = 100


class StatsQuery(RequestModel):
    queue: Name | UnsetType = UNSET


# -- payloads, results, progress ------------------------------------------------------------------------------
# Kept as the text that came, checked but not rebuilt: a number keeps its digits, and a batch costs no more than its bytes.

_decode = msgspec.json.Decoder().decode
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def checked_json(value: msgspec.Raw, max_depth: int, most: int, what: str) -> bytes:
    """The JSON text of a value that came in. `most`: bytes."""
    data = checked_size(bytes(value), most, what)
    # Most values have fewer brackets than are allowed to be open at once.
    if data.count(b"[") + data.count(b"{") > max_depth and _is_deeper(data, max_depth):
        raise Problem(422, "too_deep", f"the {what} is nested more than {max_depth} deep")
    try:
        _decode(data)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "bad_json", f"the {what} is not valid JSON: {_reason(error)}") from None
    return data


def checked_size(data: bytes, most: int, what: str) -> bytes:
    if len(data) > most:
        detail = f"{what} of {len(data)} bytes: at most {most} are kept"
        hint = "store it elsewhere and send a reference to it"
        raise invalid(detail, hint=hint)
    return data


def _reason(error: Exception) -> str:
    """The reason and the place of a bad value; never a piece of it."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)


def _is_deeper(data: bytes, max_depth: int) -> bool:
    """Each round removes the innermost brackets, which takes less time than a loop over all of them."""
    brackets = _STRING.sub(b"", data).translate(_ONE_KIND, _NO_BRACKET)
    for _ in range(max_depth):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
