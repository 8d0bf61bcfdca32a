"""Failure handlers: functions that an app runs for jobs that died.

The store adds a job of type `taskharbor.failure` to the failure queue of a queue for every job that dies there. The app's worker
serves the failure queues of its queues. It makes one job of that for every failure handler that matches, so each handler has
its own retries and none waits for another. These jobs are in the failure queue too. That queue has no failure queue, so a
failure handler that fails for good is dead there and leads to nothing more.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import msgspec

from taskharbor.client import JobHandle
from taskharbor.drivers.records import FAILURE_ATTEMPTS, FAILURE_TYPE, FailurePayload
from taskharbor.drivers.validation import listed
from taskharbor.errors import InvalidRequest
from taskharbor.handlers import Handler, Options, RunOptions, check_options
from taskharbor.jobs import DEFAULT_MAX_ATTEMPTS, JobRequest, UpdateFlags
from taskharbor.requests import EncodedPayload, new_id
from taskharbor.retry import RetryPolicy

if TYPE_CHECKING:
    from taskharbor.harbor import Harbor, JobType
    from taskharbor.middleware import Job

F = TypeVar("F", bound="Callable[[FailedJob], Any]")


class FailureOptions(RunOptions, total=False):
    """Options of `@harbor.on_failure(...)`: the jobs that it is for (`queue`, `job`), and how the handler itself is run."""

    job: JobType[..., Any] | str
    type: str
    retry: RetryPolicy | int


class FailedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that died, as a failure handler sees it."""

    id: str
    type: str
    queue: str
    payload: Any
    """The arguments by name. The bytes, if they cannot be decoded."""
    error: str
    """The last error: one line, then the traceback if there is one."""
    key: str | None = None
    attempts: int = 0
    stalls: int = 0
    headers: Mapping[str, str] = {}
    _request: JobRequest | None = None
    _harbor: Harbor | None = None

    def enqueue_again(self, **options: Unpack[Options]) -> JobHandle[Any]:
        """Enqueue a new job with the same type, payload, queue, key and headers. Options replace what the job had.

        A failure handler that is retried enqueues it once. A job of the same key that waits already stays as it is.
        """
        harbor, request = self._again(options)
        return harbor.enqueue_many([request])[0]

    async def enqueue_again_async(self, **options: Unpack[Options]) -> JobHandle[Any]:
        """The async form of `enqueue_again`."""
        harbor, request = self._again(options)
        return (await harbor.enqueue_many_async([request]))[0]

    def _again(self, options: Options) -> tuple[Harbor, JobRequest]:
        if self._harbor is None or self._request is None:
            raise RuntimeError("this FailedJob was not made by a worker, so it belongs to no app")
        return self._harbor, msgspec.structs.replace(self._request, **options)


class FailureHandler(msgspec.Struct, frozen=True):
    """A declared failure handler: the jobs that it is for, and its own job without a payload."""

    queue: str | None
    job: str | None
    request: JobRequest


class OnFailure:
    """The decorator `on_failure`, bare or with options. It returns the function as it is."""

    def __init__(self, harbor: Harbor, **of_job: JobType[..., Any]) -> None:
        self._harbor = harbor
        self._of_job = of_job

    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(self, /, **options: Unpack[FailureOptions]) -> Callable[[F], F]: ...

    def __call__(self, function: Any = None, /, **options: Any) -> Any:
        def declare(decorated: Any) -> Any:
            _declare(self._harbor, decorated, {**options, **self._of_job})
            return decorated

        return declare if function is None else declare(function)


def _declare(harbor: Harbor, function: Callable[[FailedJob], Any], options: dict[str, Any]) -> None:
    """Store a failure handler in the app, with the handler of its jobs and the one that makes them."""
    check_options(options, FailureOptions, "a failure handler")
    name = options.pop("type", None) or f"{FAILURE_TYPE}.{function.__name__}"
    queue, job, retry = (options.pop(option, None) for option in ("queue", "job", "retry"))
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise InvalidRequest(f"{name!r}: a failure handler takes one argument, the FailedJob") from None
    is_taken = FAILURE_TYPE in harbor.handlers and not harbor.failure_handlers
    if name in harbor.handlers or is_taken:
        raise InvalidRequest(
            f"a job of the type {FAILURE_TYPE if is_taken else name!r} is declared already; "
            "give this failure handler another with on_failure(type=...)"
        )
    stored = {"codec": "json", "idempotency_key": f"{new_id()}:{name}", **options}
    harbor._builder.check(f"failure handler {name!r}", name, stored)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run(job: Job) -> Any:
            return await function(_failed_job(harbor, job))
    else:

        @functools.wraps(function)
        def run(job: Job) -> Any:
            return function(_failed_job(harbor, job))

    harbor.handlers[name] = Handler(name, run, retry=retry)
    harbor.handlers.setdefault(FAILURE_TYPE, Handler(FAILURE_TYPE, functools.partial(_dispatch, harbor)))
    # Not the app's limits: a crash of the worker by another job must not keep the handler from running.
    limits = {"max_attempts": DEFAULT_MAX_ATTEMPTS, "max_stalls": FAILURE_ATTEMPTS}
    request = JobRequest(type=name, payload=EncodedPayload(b""), codec="json", **(limits | options))
    harbor.failure_handlers.append(FailureHandler(queue, getattr(job, "type", job), request))


def served_queues(
    harbor: Harbor, queues: Sequence[str] | Mapping[str, int]
) -> Sequence[str] | Mapping[str, int]:
    """The queues of a worker with their failure queues, which are declared here.

    Each queue has its own: so a worker serves the failures of the queues that it serves, and two apps on one store do not get
    each other's."""
    weights = dict(queues) if isinstance(queues, Mapping) else dict.fromkeys(listed("queues", queues), 1)
    declared = harbor.declared_queues
    known = list(dict.fromkeys([*harbor.queues, *weights]))
    taken = {f"{queue}.failed" for queue in known}
    taken.update(filter(None, (settings.get("failure_queue") for settings in declared.values())))
    for queue in known:
        if queue not in taken:
            declared.setdefault(queue, {}).setdefault("failure_queue", f"{queue}.failed")
    served: dict[str, int] = {}
    for queue, weight in weights.items():
        served[queue] = weight
        if failed := declared.get(queue, {}).get("failure_queue"):
            served.setdefault(failed, weights.get(failed, weight))
    return served if isinstance(queues, Mapping) else list(served)


# -- running ------------------------------------------------------------------------------------------------


async def _dispatch(harbor: Harbor, job: Job) -> None:
    """Enqueue a job for every failure handler that matches; once, however often this is run."""
    failed = msgspec.json.decode(job.payload, type=FailurePayload)
    requests = [
        msgspec.structs.replace(
            one.request, queue=job.queue, headers=job.headers, idempotency_key=f"{job.id}:{one.request.type}"
        )
        for one in harbor.failure_handlers
        if one.queue in (None, failed.queue) and one.job in (None, failed.type)
    ]
    if requests:
        client = harbor.async_client()
        now = await client.now()
        records = client.builder.build(requests, now)
        for record in records:
            # Not through the builder: it bounds the payloads of callers, and a copy is longer than what was accepted.
            record.payload = job.payload
        await client.driver.enqueue(records, now=now)


def _failed_job(harbor: Harbor, job: Job) -> FailedJob:
    failed = msgspec.json.decode(job.payload, type=FailurePayload)
    try:
        payload: Any = harbor.codecs.get(failed.codec).decode(failed.payload)
    except Exception:  # A codec of the app may raise anything.
        payload = failed.payload
    declared = harbor.jobs.get(failed.type)
    request = msgspec.structs.replace(
        JobRequest(type=failed.type) if declared is None else declared._template(),
        payload=EncodedPayload(failed.payload),
        queue=failed.queue,
        headers=job.headers,
        codec=failed.codec,
        idempotency_key=job.id,
    )
    if failed.key is not None:
        # A job that waits under the key is newer than the one that died.
        request.key, request.update = failed.key, UpdateFlags(payload=False)
    fields = {name: getattr(failed, name) for name in ("type", "queue", "error", "key", "attempts", "stalls")}
    return FailedJob(
        id=failed.job_id, payload=payload, headers=job.headers, _request=request, _harbor=harbor, **fields
    )
