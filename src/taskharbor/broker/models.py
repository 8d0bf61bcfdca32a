"""The JSON form of jobs, attempts, queues and requests: one for the HTTP API and for the command line's `--json`.

Models take their fields from the records (`taskharbor.jobs`, `taskharbor.drivers.records`): an instant `run_at_us` is the text
`run_at` (RFC 3339, UTC), a duration `keep_done_us` the number `keep_done_seconds`, every other field is as it is. A model spells
out only what differs. Nothing here needs a web framework.

Request models refuse unknown fields: a misspelt option that is silently left out is found much later. Names in camelCase are
those of the original broker protocol, whose clients call the same paths. A lease token is only in the answer of a claim or a
heartbeat: whoever has it can end the job.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, UNSET, Meta, UnsetType, structs

from taskharbor.drivers.operations import CancelJobs, Requeue
from taskharbor.drivers.records import Enqueued, JobFilter, QueueSettings, QueueStats
from taskharbor.errors import InvalidRequest, JobError
from taskharbor.jobs import (
    LATEST,
    MAX_TRIES,
    SECOND,
    WAITING_STATES,
    Attempt,
    JobRecord,
    JobRequest,
    JobState,
    Lease,
    Micros,
    Name,
    Text,
    UpdateFlags,
    to_datetime,
    to_micros,
)
from taskharbor.schedules import Schedule, ScheduleInfo
from taskharbor.schedules.specification import MOST_EXPRESSIONS

M = TypeVar("M", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)
Form: TypeAlias = Literal["instant", "seconds", "same"]

AwareTime: TypeAlias = Annotated[datetime, Meta(tz=True)]
# An instant in a query. There, numbers in quotes would be accepted as instants.
InstantText: TypeAlias = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
DurationSeconds: TypeAlias = Annotated[float, Meta(ge=0, le=LATEST // SECOND)]
Delay: TypeAlias = Annotated[float, Meta(ge=0, lt=1e10, description="Seconds.")]
Timeout: TypeAlias = Annotated[float, Meta(ge=0.001, lt=1e10)]
Backoff: TypeAlias = tuple[Annotated[float, Meta(ge=0)], Annotated[float, Meta(ge=0, lt=1e9)]]
LeaseSeconds: TypeAlias = Annotated[float, Meta(ge=0.001, le=86_400, description="How long the lease holds.")]
AnyJSON: TypeAlias = msgspec.Raw | UnsetType
Ignored: TypeAlias = Annotated[AnyJSON, Meta(description="Ignored: only the store decides on it.")]
MaxAttempts: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TRIES)]
# Shorter than a name: the store keeps it after the name of the access token.
WorkerId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
MAX_PAGE = 1000
PageLimit: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PAGE)]
DEFAULT_LEASE_SECONDS = 30.0

# -- fields of records as fields of models ------------------------------------------------------------------


def _json_field(name: str, kind: Any) -> tuple[str, Any, Form]:
    is_optional = NoneType in get_args(kind)
    if name.endswith(("_at_us", "_before_us")):
        return name.removesuffix("_us"), AwareTime | None if is_optional else AwareTime, "instant"
    if name.endswith("_us"):
        seconds = f"{name.removesuffix('_us')}_seconds"
        return seconds, DurationSeconds | None if is_optional else DurationSeconds, "seconds"
    # JSON has lists where records have sets.
    sets = [one for one in get_args(kind) if get_origin(one) is frozenset]
    return name, list[get_args(sets[0])] | None if sets else kind, "same"  # type: ignore[misc]


def derived(
    record: type[msgspec.Struct],
    *,
    names: str = "",
    without: str = "",
    rename: dict[str, str] | None = None,
    presence: Literal["required", "default", "optional", "unset", "given"] = "required",
    ignores: type[msgspec.Struct] | None = None,
) -> Callable[[type[M]], type[M]]:
    """Make a decorator that gives a model the fields of a record, before the fields that it declares itself.

    A field that the model declares too has the model's type.

    Args:
        record: The record.
        names: Only these fields, separated by blanks.
        without: All fields but these, separated by blanks.
        rename: Other names for fields.
        presence: Fields are required, have the record's defaults, may be left out or null, or (where the record allows None)
            may only be left out. With "given" each may be left out, and a null is a value.
        ignores: A model whose fields are accepted as well and have no effect.
    """
    wanted = [
        field
        for field in structs.fields(record)
        if field.name not in without.split() and (not names or field.name in names.split())
    ]

    def add_fields(model: type[M]) -> type[M]:
        own = {field.name: field for field in structs.fields(model)}
        fields: dict[str, tuple[str, Any, Any]] = {}
        sources: list[tuple[str, str, Form]] = []
        for field in wanted:
            name, kind, form = _json_field((rename or {}).get(field.name, field.name), field.type)
            sources.append((name, field.name, form))
            default: Any = NODEFAULT
            if presence == "optional":
                kind, default = kind | None, None
            elif presence == "unset":
                others = [one for one in get_args(kind) if one is not NoneType]
                kind, default = functools.reduce(operator.or_, others, UnsetType), UNSET
            elif presence == "given":
                kind, default = kind | UnsetType, UNSET
            elif presence == "default":
                default = field.default / SECOND if form == "seconds" and field.default else field.default
            fields[name] = (name, kind, msgspec.field(default=default))
        for name, field in own.items():
            given = {"default": field.default, "default_factory": field.default_factory}
            fields[name] = (name, field.type, msgspec.field(**given, name=field.encode_name))
        known = {*fields, *(field.encode_name for field in own.values())}
        for name in () if ignores is None else ignores.__struct_fields__:
            if name not in known:
                fields[name] = (name, Ignored, UNSET)
        made = msgspec.defstruct(
            model.__name__,
            fields.values(),
            bases=model.__bases__,
            module=model.__module__,
            namespace={"__doc__": model.__doc__, "_derived": sources},
            kw_only=True,
        )
        return made  # type: ignore[return-value]

    return add_fields


def model_of(model: type[M], record: msgspec.Struct, **more: Any) -> M:
    """Make a model with the fields of a record. `more`: further fields, or other values for these."""
    for name, theirs, form in model._derived:  # type: ignore[attr-defined]
        if name not in more:
            value = getattr(record, theirs)
            if value is not None and form != "same":
                value = _instant(value) if form == "instant" else value / SECOND
            more[name] = value
    return model(**more)


def given_of(model: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of the record that a request gives a value. Raises InvalidRequest."""
    given: dict[str, Any] = {}
    for name, theirs, form in model._derived:  # type: ignore[attr-defined]
        value = getattr(model, name)
        if value is UNSET:
            continue
        if value is not None and form != "same":
            value = _micros(name, value) if form == "instant" else round(value * SECOND)
        given[theirs] = frozenset(value) if isinstance(value, list) else value
    return given


def record_of(record: type[R], model: msgspec.Struct) -> R:
    """Make the record that a request describes: the reverse of `model_of`. Raises InvalidRequest."""
    return record(**given_of(model))


def _micros(name: str, instant: datetime | str) -> Micros:
    """`instant` is a text in a query: there, msgspec would also take numbers in quotes."""
    try:
        return to_micros(msgspec.convert(instant, AwareTime))
    except msgspec.ValidationError:
        raise InvalidRequest(f"{name} must be a time with a zone, like 2026-08-01T09:30:00Z") from None


# Cached: jobs of one batch mostly share their instants.
_instant = functools.lru_cache(4096)(to_datetime)


# -- responses ----------------------------------------------------------------------------------------------


@derived(Enqueued)
class Submitted(msgspec.Struct):
    """The job that will do the work: a new one, or one that was there already."""


class SubmittedJob(Submitted, kw_only=True):
    """The answer for a single job. `jobId` is the id in the words of the original protocol."""

    job_id: str = msgspec.field(name="jobId")


class SubmittedJobs(msgspec.Struct):
    """One for each job that was sent, in that order."""

    jobs: list[Submitted]


@derived(JobRecord, without="payload update timeout_us backoff_min_us backoff_max_us result progress token")
class JobView(msgspec.Struct, kw_only=True):
    """A job as it is stored. With the payload if it was asked for: as JSON, or in base64 if its codec is another."""

    expires_at: AwareTime | None
    timeout_seconds: float | None
    backoff_seconds: tuple[float, float]
    progress: msgspec.Raw | UnsetType = UNSET
    payload: msgspec.Raw | UnsetType = UNSET
    payload_base64: bytes | UnsetType = UNSET
    result: msgspec.Raw | UnsetType = UNSET
    result_base64: bytes | UnsetType = UNSET


class ClaimedJob(JobView, kw_only=True):
    """A job that is yours until `expires_at`. The token proves it."""

    token: str


class ClaimedJobs(msgspec.Struct):
    """The claimed jobs. Empty if nothing was runnable."""

    jobs: list[ClaimedJob]


class OriginalJob(ClaimedJob, kw_only=True):
    """The job of a claim in the original protocol. Its `attempts` counts the executions, this one too."""

    job_id: str = msgspec.field(name="jobId")


class NoOriginalJob(msgspec.Struct):
    """Nothing was runnable for a claim in the original protocol."""

    job_id: None = msgspec.field(default=None, name="jobId")


class JobViewPage(msgspec.Struct):
    """Newest accepted first. `cursor` leads to the next page; null when nothing follows."""

    jobs: list[JobView]
    cursor: str | None


J = TypeVar("J", bound=JobView)
_decode = msgspec.json.Decoder().decode


def job_view(record: JobRecord, *, payload: bool) -> JobView:
    """Make the view of a job for a reader. `payload`: with payload and result."""
    job = _job_view(JobView, record, payload)
    if record.progress is not None:
        job.progress = _raw_json(record.progress) or UNSET
    return job


def claimed_job(record: JobRecord) -> ClaimedJob:
    """Make the view of a job for its holder."""
    return _job_view(ClaimedJob, record, True, token=record.token)


def original_claim(records: Sequence[JobRecord]) -> OriginalJob | NoOriginalJob:
    """Make the answer of a claim in the original protocol."""
    if not records:
        return NoOriginalJob()
    job = records[0]
    executions = job.attempts + job.stalls + 1
    return _job_view(OriginalJob, job, True, token=job.token, job_id=job.id, attempts=executions)


def _job_view(model: type[J], record: JobRecord, has_contents: bool, **more: Any) -> J:
    more["timeout_seconds"] = record.timeout_us / SECOND if record.timeout_us else None
    more["backoff_seconds"] = (record.backoff_min_us / SECOND, record.backoff_max_us / SECOND)
    for name, data in (("payload", record.payload), ("result", record.result)) if has_contents else ():
        value = _raw_json(data) if data and record.codec == "json" else None
        if value is not None:
            more[name] = value
        elif data is not None:
            more[f"{name}_base64"] = data
    return model_of(model, record, **more)


def _raw_json(data: bytes) -> msgspec.Raw | None:
    """Return stored bytes for an answer; None if they are not JSON: not every producer's JSON was checked."""
    try:
        _decode(data)
    except (ValueError, RecursionError):
        return None
    return msgspec.Raw(data)


@derived(Attempt, rename={"payload_size": "payload_bytes"})
class AttemptView(msgspec.Struct):
    """One row of the attempt log: how a lease ended, or how a job ended without one."""


class JobAttemptViews(msgspec.Struct):
    """The attempt log of one job, in order."""

    attempts: list[AttemptView]


class AttemptLogPage(msgspec.Struct):
    """In log order. `cursor` resumes after the last row, even when no row came."""

    attempts: list[AttemptView]
    cursor: str


@derived(QueueSettings, without="declaration")
class QueueView(msgspec.Struct, kw_only=True):
    """A queue's settings. Retention in seconds; null keeps for ever."""

    queue: str


@derived(QueueStats, without="head_run_at_us")
class QueueStatsView(msgspec.Struct, kw_only=True):
    """Figures of a queue. `lag_seconds`: the time for which its next job has been due."""

    completed_total: int = msgspec.field(name="completedTotal")
    lag_seconds: float | None
    settings: QueueView


class StatsView(msgspec.Struct, kw_only=True):
    """Totals over all queues, and each queue."""

    completed_total: int = msgspec.field(name="completedTotal")
    queues: list[QueueStatsView]


class BrokerStats(StatsView, kw_only=True):
    """The same, with the figures of the original protocol: jobs that have not ended, and this broker's host and port."""

    total: int
    unclaimed: int
    in_progress: int = msgspec.field(name="inProgress")
    broker_address: str = msgspec.field(name="brokerAddress")


def queue_view(queue: str, settings: QueueSettings) -> QueueView:
    """A queue's settings under its name."""
    return model_of(QueueView, settings, queue=queue)


def queue_stats_view(stats: QueueStats, now: Micros) -> QueueStatsView:
    """A queue at a glance, seen at `now`."""
    head = stats.head_run_at_us
    return model_of(
        QueueStatsView,
        stats,
        completed_total=stats.done_total,
        lag_seconds=None if head is None else max(0, now - head) / SECOND,
        settings=queue_view(stats.queue, stats.settings),
    )


def stats_view(stats: Sequence[QueueStats], now: Micros) -> StatsView:
    """All queues at a glance, seen at `now`."""
    queues = [queue_stats_view(one, now) for one in stats]
    return StatsView(completed_total=sum(one.done_total for one in stats), queues=queues)


def broker_stats(stats: Sequence[QueueStats], now: Micros, address: str) -> BrokerStats:
    """All queues at a glance, as the broker at this address answers."""
    unclaimed = sum(one.counts[state] for one in stats for state in WAITING_STATES)
    in_progress = sum(one.counts[JobState.INFLIGHT] for one in stats)
    return BrokerStats(
        **structs.asdict(stats_view(stats, now)),
        total=unclaimed + in_progress,
        unclaimed=unclaimed,
        in_progress=in_progress,
        broker_address=address,
    )


@derived(Lease, rename={"job_id": "id"})
class HeldLease(msgspec.Struct):
    """The lease from now on. If a cancel is requested, stop and discard the job."""


SettleAction: TypeAlias = Literal["complete", "retry", "fail", "release", "discard"]


class SettledJob(msgspec.Struct, kw_only=True):
    """The settlement that was written. A failure is a `retry` until the job's attempts are used up, then a `fail`."""

    id: str
    applied: SettleAction
    run_at: AwareTime | None


class ChangedJob(msgspec.Struct):
    """The state of a job after a cancel or a requeue."""

    id: str
    state: JobState


class RemovedJobs(msgspec.Struct):
    """The number of removed jobs."""

    removed: int


class BrokerTime(msgspec.Struct):
    """The broker's clock, which is the store's. All leases are measured by it."""

    time: AwareTime
    microseconds: int


class LeaderView(msgspec.Struct):
    """The leader. `is_elected`: true if one of several brokers leads. If false, any number of them answer."""

    is_leader: bool
    is_elected: bool
    leader_url: str | None


class Health(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The health of the broker: alive, or ready."""

    status: str
    version: str = ""
    reason: str = ""


# -- answers of a batch -------------------------------------------------------------------------------------


def error_code(kind: type[BaseException]) -> str:
    """The code of a type of errors."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


# `JobNotFound` is `job_not_found`, and so on: names of the contract's errors do not change.
JOB_ERROR_CODES = {kind: error_code(kind) for kind in JobError.__subclasses__()}


def job_error_code(error: JobError) -> str:
    """The code of an error that concerns one job."""
    return JOB_ERROR_CODES.get(type(error), "job_error")


class ItemError(msgspec.Struct):
    """The reason why one job of a batch was not changed."""

    code: str
    detail: str


@functools.cache
def batch_of(answer: type[msgspec.Struct]) -> Any:
    """The answer of a batch: for each job, in order, the fields of the answer for a single job, or an error."""
    fields = [(field.name, field.type | UnsetType, UNSET) for field in structs.fields(answer)[1:]]
    item = msgspec.defstruct(
        f"{answer.__name__}Item",
        [("id", str), ("error", ItemError | UnsetType, UNSET), *fields],
        namespace={"__doc__": "The answer for one job of a batch, which stands for itself."},
    )
    return msgspec.defstruct(f"{answer.__name__}Batch", [("results", list[item])])  # type: ignore[valid-type]


def batch_item(job_id: str, answer: msgspec.Struct | JobError) -> dict[str, Any]:
    """The fields of one item of `batch_of`."""
    if isinstance(answer, JobError):
        return {"id": job_id, "error": ItemError(job_error_code(answer), str(answer))}
    return structs.asdict(answer)


# -- requests -----------------------------------------------------------------------------------------------


class RequestModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all bodies and queries."""


@derived(UpdateFlags, presence="default")
class KeyUpdate(RequestModel):
    """The change that an enqueue makes to a job with the same key."""


class _WithPayload(RequestModel, kw_only=True):
    payload: AnyJSON = UNSET
    payload_base64: bytes | None = None

    def __post_init__(self) -> None:
        if self.payload is UNSET and self.payload_base64 is None:
            listed = [name for name in _STORE_FIELDS if getattr(self, name) is not UNSET]
            if listed:
                # It would replace the payload of a waiting job with the same key by nothing.
                raise ValueError(
                    f"a job with `{listed[0]}`, as a listing shows it, and without its payload: list it with payloads "
                    "(`list --json --payload`, ?payload=true), or send a payload"
                )


@derived(
    JobRecord,
    names="type queue codec headers run_at_us priority key idempotency_key max_attempts max_stalls",
    presence="optional",
    ignores=JobView,
)
class NewJob(_WithPayload, kw_only=True):
    """A job to do. Give the payload as any JSON value, or as bytes in base64 with the name of their codec. A job from a listing
    with payloads can be sent as it is: fields that only the store sets are ignored."""

    type: Name
    codec: Name | None = None
    delay: Delay | None = msgspec.field(default=None, name="delay_seconds")
    timeout: Timeout | None = msgspec.field(default=None, name="timeout_seconds")
    backoff: Backoff | None = msgspec.field(default=None, name="backoff_seconds")
    update: KeyUpdate | None = None
    max_attempts: MaxAttempts | None = None
    max_attempts_camel: MaxAttempts | None = msgspec.field(default=None, name="maxAttempts")


class NewJobs(RequestModel):
    """Jobs to do, stored all or none."""

    jobs: Annotated[list[NewJob], Meta(min_length=1)]


_STORE_FIELDS = [field.name for field in structs.fields(NewJob) if field.type is Ignored]
_REQUESTED = set(JobRequest.__struct_fields__) & set(NewJob.__struct_fields__) - {"payload"}


def job_request(job: NewJob, payload: Any) -> JobRequest:
    """Make the request that a new job describes, with this payload."""
    request = JobRequest(payload=payload, **{name: getattr(job, name) for name in _REQUESTED})
    if job.max_attempts_camel is not None:
        request.max_attempts = job.max_attempts_camel
    if job.update is not None:
        request.update = record_of(UpdateFlags, job.update)
    return request


class ClaimRequest(RequestModel):
    """The jobs that a worker claims, the length of the lease, and the longest wait for a job."""

    worker: Name | None = None
    queue: Name = "default"
    types: list[Name] | None = None
    limit: PageLimit = 1
    lease_seconds: LeaseSeconds = DEFAULT_LEASE_SECONDS
    wait_seconds: Annotated[float, Meta(ge=0, le=3600.0)] = 0.0


class OriginalClaim(RequestModel):
    """A claim in the original protocol: one job of the default queue, for 30 seconds."""

    worker_id: WorkerId = msgspec.field(name="workerId")
    types: list[Name] | None = None


LeaseToken: TypeAlias = Annotated[Name, Meta(description="The lease token that the claim gave.")]


class LeaseProof(RequestModel):
    """Proves by the token of its lease that the caller holds the job."""

    token: LeaseToken


class HolderProof(RequestModel):
    """Proves that the caller holds the job: by the token, or in the original protocol by the worker that claimed it."""

    token: LeaseToken | None = None
    worker_id: WorkerId | None = msgspec.field(default=None, name="workerId")


class Heartbeat(HolderProof):
    """A sign of life for one job."""

    progress: AnyJSON = UNSET


class HeartbeatItem(Heartbeat, kw_only=True):
    """A heartbeat for one job of many."""

    id: Name


class HeartbeatBatch(RequestModel):
    """Extend the leases of many jobs; each answer stands for itself."""

    jobs: Annotated[list[HeartbeatItem], Meta(min_length=1)]
    lease_seconds: LeaseSeconds = DEFAULT_LEASE_SECONDS


class HeartbeatRequest(Heartbeat):
    """Extend one lease, report progress, and learn of a requested cancel."""

    lease_seconds: LeaseSeconds = DEFAULT_LEASE_SECONDS


class ErrorReport(RequestModel):
    """The error of an execution. Longer texts are cut."""

    type: str = "Error"
    message: str = ""
    detail: str = ""


class CompleteRequest(HolderProof):
    """The job is done. The result is kept as long as the job."""

    result: AnyJSON = UNSET
    result_base64: bytes | None = None


class RunAtRequest(LeaseProof):
    """The time at which a job goes on."""

    delay_seconds: Delay | None = None
    run_at: AwareTime | None = None


class RetryRequest(RunAtRequest):
    """The execution failed; run the job again after the delay, at the time, or by its own back-off. It dies when its attempts
    are used up."""

    error: str | ErrorReport = ""


class FailRequest(LeaseProof):
    """The execution failed; the job's own limits and back-off apply, unless `retryable` is false."""

    error: str | ErrorReport = ""
    retryable: bool = True


class ReleaseRequest(RunAtRequest):
    """The job goes back and spends nothing: no attempt is counted."""


class DiscardRequest(LeaseProof):
    """The job is no longer needed: it ends as cancelled."""

    reason: str | ErrorReport | None = None


SettleRequest: TypeAlias = CompleteRequest | RetryRequest | FailRequest | ReleaseRequest | DiscardRequest
# The request for each `SettleAction`.
SETTLE_REQUESTS = {one.__name__.removesuffix("Request").lower(): one for one in get_args(SettleRequest)}


def _settle_item(action: str) -> Any:
    """One end in a batch: the request for a single job, with the job's id and the action in it."""
    request = SETTLE_REQUESTS[action]
    return msgspec.defstruct(
        f"{action.capitalize()}Item",
        [("id", Name)],
        bases=(request,),
        namespace={"__doc__": request.__doc__},
        kw_only=True,
        tag_field="action",
        tag=action,
    )


SettleItem: Any = functools.reduce(operator.or_, map(_settle_item, SETTLE_REQUESTS))


class SettleBatch(RequestModel):
    """End many leases at once; each is applied and answered on its own."""

    settlements: Annotated[list[SettleItem], Meta(min_length=1)]


@derived(CancelJobs, without="job_ids now", presence="default")
class CancelRequest(RequestModel):
    """How to cancel. With `only_waiting`, a job that is inflight is left as it is."""


@derived(Requeue, without="job_ids now", presence="default")
class RequeueRequest(RequestModel):
    """How to requeue: at once or at `run_at`; with `keep_counts`, the counts of attempts and stalls stay."""


class CancelBatch(CancelRequest):
    """Cancel jobs by their ids."""

    ids: Annotated[list[Name], Meta(min_length=1)]


class RequeueBatch(RequeueRequest):
    """Requeue jobs by their ids."""

    ids: Annotated[list[Name], Meta(min_length=1)]


class KeysRequest(CancelRequest):
    """Cancel jobs by their keys."""

    keys: Annotated[list[Name], Meta(min_length=1)]


class CancelledKeys(msgspec.Struct):
    """The number of jobs that were cancelled or asked to stop, by key."""

    cancelled: dict[str, int]


@derived(QueueSettings, without="declaration", presence="given")
class QueueSettingsRequest(RequestModel):
    """The settings of a queue that change. A field that is left out stays. `null` keeps for ever, or sets no limit."""

    create: Annotated[bool, Meta(description="Make a queue that was never seen.")] = False


@derived(JobFilter, without="worker until", presence="default")
class PurgeRequest(RequestModel):
    """The ended jobs to remove. Jobs that have not ended are never removed."""

    limit: Annotated[int, Meta(ge=1, le=100_000)] = MAX_PAGE


@derived(JobFilter, without="until", rename={"states": "state", "types": "type"}, presence="unset")
class JobsQuery(RequestModel):
    """A selection of jobs. A field that is left out does not restrict. A query has no null, so no field is None."""

    finished_before: InstantText | UnsetType = UNSET
    limit: PageLimit = 100
    cursor: str | UnsetType = UNSET
    payload: bool = False


@derived(Schedule, presence="default")
class NewSchedule(RequestModel, kw_only=True):
    """When to make jobs, and which. Durations are seconds. The name may be left out: it is in the path."""

    name: Name | None = None
    job: Name
    payload: AnyJSON = UNSET
    cron: Text | Annotated[list[Text], Meta(max_length=MOST_EXPRESSIONS)] | None = None
    zone: Name = "UTC"
    start: AwareTime | None = None
    end: AwareTime | None = None


class PauseRequest(RequestModel):
    """Pause a schedule, with the reason."""

    note: Text = ""


class BackfillRequest(RequestModel):
    """Make the jobs of all ticks of a time in the past."""

    start: AwareTime
    end: AwareTime


class BackfilledJobs(msgspec.Struct):
    """The number of new jobs."""

    enqueued: int


class SchedulePage(msgspec.Struct):
    """Schedules, newest first. `cursor` leads to the next page; null when nothing follows."""

    schedules: list[ScheduleInfo]
    cursor: str | None


class SchedulesQuery(RequestModel):
    """The page of schedules to show. Each has its next times, so pages are small."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 100
    cursor: str | UnsetType = UNSET


class AttemptsQuery(RequestModel):
    """The place from which to read the attempt log."""

    after: str | UnsetType = UNSET
    limit: PageLimit = 100


class StatsQuery(RequestModel):
    """The queue to show; left out: all queues."""

    queue: Name | UnsetType = UNSET
