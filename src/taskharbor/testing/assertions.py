"""Assertions about enqueued jobs. A failure shows the jobs that were enqueued instead.

Plain functions for synchronous and asynchronous tests. A job counts in every state; `states` restricts that.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import NoneType
from typing import Any, NoReturn, TypeAlias, TypedDict, Unpack

from taskharbor.errors import CodecError
from taskharbor.harbor import Harbor, JobType
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor.requests import as_duration, as_instant
from taskharbor.schedules import QUEUE as SCHEDULES

_SHOWN = 20

# A declared job, or a type by its name; None: any.
AnyJobType: TypeAlias = JobType[..., Any] | str | None
# An app, or a declared job of it.
Target: TypeAlias = Harbor | JobType[..., Any]


class Expected(TypedDict, total=False):
    """The properties of an expected job. All that are given must match.

    Attributes:
        args: Some of its arguments, by name (nested ones too) or the first few by position.
    """

    args: Mapping[str, Any] | Sequence[Any]
    queue: str
    key: str
    idempotency_key: str
    priority: int
    run_at: datetime
    delay: timedelta | float
    headers: Mapping[str, str]
    states: Collection[JobState]


def enqueued(harbor: Target, job: AnyJobType = None, **expected: Unpack[Expected]) -> list[JobRecord]:
    """Return the jobs that fit, oldest first: of an app, or of one declared job (`enqueued(send_mail)`)."""
    app, job = _target(harbor, job)
    _check(app, job, expected)
    return [record for record in _all_jobs(app) if _fits(app, record, job, expected)]


def assert_enqueued(
    harbor: Target, job: AnyJobType = None, *, count: int | None = None, **expected: Unpack[Expected]
) -> list[JobRecord]:
    """Fail unless a job that fits was enqueued (exactly `count`, if given). Returns the jobs that fit.

    `assert_enqueued(send_mail, args={"to": "ada@example.org"})`, or for an app `assert_enqueued(harbor, "send_mail")`.
    """
    found = enqueued(harbor, job, **expected)
    if count is None and not found:
        _fail(harbor, job, expected, "was not enqueued")
    if count is not None and len(found) != count:
        _fail(harbor, job, expected, f"was enqueued {_times(len(found))}, not {_times(count)}")
    if count == 0:
        _require_declared(harbor, job)
    return found


def refute_enqueued(harbor: Target, job: AnyJobType = None, **expected: Unpack[Expected]) -> None:
    """Fail if a job that fits was enqueued. Raises InvalidRequest for a type that the app does not declare."""
    found = enqueued(harbor, job, **expected)
    if found:
        _fail(harbor, job, expected, f"was enqueued {_times(len(found))}")
    _require_declared(harbor, job)


def _target(given: Target, job: AnyJobType) -> tuple[Harbor, AnyJobType]:
    """Return the app, and the job or type to look for."""
    if isinstance(given, JobType) and job is None:
        return given._harbor, given
    if not isinstance(given, Harbor) or not isinstance(job, (JobType, str, NoneType)):
        raise TypeError(
            f"{given!r}, {job!r}: give a job that @harbor.job declared, or the app and then a job or a type"
        )
    return given, job


def _check(app: Harbor, job: AnyJobType, expected: Expected) -> None:
    """Refuse an expectation that no job can meet: `refute_enqueued` would always pass."""
    for name in expected.keys() - Expected.__annotations__.keys():
        raise TypeError(f"unknown expectation {name!r}; known: {', '.join(Expected.__annotations__)}")
    if "run_at" in expected:
        as_instant("run_at", expected["run_at"])
    handler = None if job is None else app.handlers.get(_type_of(job))
    if handler is None or handler.arguments is None or (wanted := expected.get("args")) is None:
        return
    known = handler.arguments.type.__struct_fields__
    extra = wanted.keys() - {*known} if isinstance(wanted, Mapping) else [*wanted][len(known) :]
    if extra and not handler.arguments._has_variadic:
        raise TypeError(f"args {wanted!r}: {handler.type} takes {', '.join(known)}")


def _require_declared(given: Target, job: AnyJobType) -> None:
    """Refuse a type by name that the app does not declare: it may be a typing error."""
    app, job = _target(given, job)
    if isinstance(job, str) and job not in app.handlers:
        app.load()
        app.require(job)


def _all_jobs(harbor: Harbor) -> list[JobRecord]:
    page = harbor.client.list_jobs(limit=1000)
    jobs = page.jobs
    while page.cursor is not None:
        page = harbor.client.list_jobs(limit=1000, cursor=page.cursor)
        jobs = [*jobs, *page.jobs]
    return [job for job in jobs[::-1] if job.queue != SCHEDULES]


def _fits(harbor: Harbor, record: JobRecord, job: AnyJobType, expected: Expected) -> bool:
    if job is not None and record.type != _type_of(job):
        return False
    return all(_holds(harbor, record, name, value) for name, value in expected.items())


def _holds(harbor: Harbor, record: JobRecord, name: str, value: Any) -> bool:
    match name:
        case "args":
            return _contains(_arguments(harbor, record), _as_stored(harbor, record, value))
        case "run_at":
            return record.run_at_us == as_instant(name, value)
        case "delay":
            return record.run_at_us - record.created_at_us == as_duration("delay", value)
        case "headers":
            return _contains(record.headers, value)
        case "states":
            return record.state in value
    return bool(getattr(record, name) == value)


def _arguments(harbor: Harbor, record: JobRecord) -> Any:
    """The arguments as they are stored, and the defaults of those that are not."""
    codec, handler = harbor.codecs.get(record.codec), harbor.handlers.get(record.type)
    try:
        stored = codec.decode(record.payload)
        if isinstance(stored, dict) and handler is not None and handler.arguments is not None:
            parameters = inspect.signature(handler.function).parameters.values()
            defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
            return stored | codec.decode(
                codec.encode({name: value for name, value in defaults.items() if name not in stored})
            )
        return stored
    except CodecError:
        return record.payload


def _as_stored(harbor: Harbor, record: JobRecord, wanted: Any) -> Any:
    """Return the expected arguments as the codec would have stored them: dates as text, tuples as lists."""
    if isinstance(wanted, Sequence) and not isinstance(wanted, (str, bytes)):
        handler = harbor.handlers.get(record.type)
        if handler is not None and handler.arguments is not None:
            try:
                wanted = inspect.signature(handler.function).bind_partial(*wanted).arguments
            except TypeError:
                return object()  # More than the handler takes: fits nothing.
    codec = harbor.codecs.get(record.codec)
    return codec.decode(codec.encode(dict(wanted) if isinstance(wanted, Mapping) else wanted))


def _contains(actual: Any, wanted: Any) -> bool:
    """Return True if the values fit. Mappings may have more fields than expected, at any depth; everything else must be equal."""
    if isinstance(wanted, Mapping):
        return isinstance(actual, Mapping) and all(
            name in actual and _contains(actual[name], value) for name, value in wanted.items()
        )
    return bool(actual == wanted)


# -- words -------------------------------------------------------------------------------------------------


def _type_of(job: JobType[..., Any] | str) -> str:
    return job if isinstance(job, str) else job.type


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _fail(given: Target, job: AnyJobType, expected: Expected, what: str) -> NoReturn:
    harbor, job = _target(given, job)
    details = ", ".join(f"{name}={value!r}" for name, value in expected.items())
    wish = "any job" if job is None else _type_of(job)
    wish = f"{wish} with {details}" if details else wish
    jobs = _all_jobs(harbor)
    left_out = f" (the last {_SHOWN} of {len(jobs)})" if len(jobs) > _SHOWN else ""
    lines = [f"Enqueued were{left_out}:", *_described(harbor, jobs[-_SHOWN:])]
    found = "\n".join(lines) if jobs else "Nothing was enqueued at all."
    raise AssertionError(f"{wish} {what}.\n{found}")


def _described(harbor: Harbor, jobs: Sequence[JobRecord]) -> Iterator[str]:
    for record in jobs:
        arguments = _arguments(harbor, record)
        if isinstance(arguments, Mapping):
            shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        else:
            shown = repr(arguments)
        extras = {
            "key": record.key,
            "idempotency_key": record.idempotency_key,
            "priority": record.priority or None,
            "delay": (record.run_at_us - record.created_at_us) / SECOND or None,
        }
        told = "".join(f", {name}={value!r}" for name, value in extras.items() if value is not None)
        yield f"  {record.type}({shown}) in {record.queue!r}, {record.state}{told}"
