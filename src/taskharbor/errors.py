"""All errors that TaskHarbor raises.

There are two families. `JobError` and its subclasses are a driver's answers about one job, one per item of a batch. The others
are mistakes of the caller (`InvalidRequest`, `CodecError` and so on) or of the surroundings. Every message says what was wrong,
with which value, and what to do.
"""

from __future__ import annotations

import re
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

if TYPE_CHECKING:
    from taskharbor.jobs import Failure, JobRecord

_LONGEST_SHOWN = 60
_CONTENTS = ("payload", "result", "progress")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


class TaskHarborError(Exception):
    """The base class of all errors that this package raises on purpose."""


class InvalidRequest(TaskHarborError, ValueError):
    """A request, a setting or an option has a value that is not allowed. Nothing was changed."""


class Forbidden(InvalidRequest):
    """The broker's access token has no scope for the call."""


class CodecError(TaskHarborError, ValueError):
    """A payload cannot be encoded, or no codec of that name is registered."""


class PayloadInvalid(CodecError):
    """A stored payload does not fit the handler's types. It is never retried: it would fail again."""


class MissingExtra(TaskHarborError, ImportError):
    """The packages of a backend or feature are not installed. The message names the `pip install` line."""


class UnknownDriver(InvalidRequest):
    """No installed driver knows the scheme of the URL."""


class BackendUnavailable(TaskHarborError, ConnectionError):
    """The backend did not answer. The call may have taken effect; repeating it is safe."""


class SchemaMismatch(TaskHarborError):
    """The store was written by a version that this one cannot work with, or it still needs `taskharbor migrate`."""


class JobDamaged(TaskHarborError):
    """A stored job has values that no call could have stored. The message names the job and says how to mend it."""


class WaitTimeout(TaskHarborError, TimeoutError):
    """A job did not end within the time that the caller gave."""


class JobTimeout(TaskHarborError, TimeoutError):
    """An execution took longer than its job's timeout. Counts as a failure."""


class HandlerMissing(TaskHarborError, LookupError):
    """This worker has no handler for the type of the job."""


class WorkerProcessDied(TaskHarborError):
    """The process that ran a handler ended without an answer (crash, out of memory, killed)."""


class ThreadsLost(TaskHarborError):
    """A worker stopped because more of its threads than it may lose did not come back. A new process has none of them."""


class RemoteError(TaskHarborError):
    """Stands for an exception that was raised in another process. `failure` has its type's name, message and traceback."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.type}: {failure.message}" if failure.message else failure.type)
        self.failure = failure


class ScheduleNotFound(TaskHarborError, LookupError):
    """No schedule has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"there is no schedule {self.name!r}"


class QueueNotFound(TaskHarborError, LookupError):
    """A queue that was to be configured has never had a job, a setting or a declaration."""

    def __init__(self, queue: str) -> None:
        super().__init__(queue)
        self.queue = queue

    def __str__(self) -> str:
        return (
            f"queue {self.queue!r} is not known: no job, setting or declaration has named it; check the name, or create it "
            "(create=True)"
        )


class JobFailed(TaskHarborError):
    """The job ended without a result: it is dead or cancelled.

    Attributes:
        job: The job as it is stored.
        state: Its state, `dead` or `cancelled`.
        error: The type, the message and the traceback of its last failure as text, or None.
    """

    def __init__(self, job: JobRecord) -> None:
        super().__init__(job)
        self.job = job
        self.state = job.state
        self.error = job.last_error

    def __str__(self) -> str:
        reason = (self.error or "no reason recorded").splitlines()[0]
        return f"job {self.job.id} ({self.job.type}) ended {self.state}: {reason}"


class ResultNotKept(TaskHarborError):
    """The job is done, and its result was not stored: it was too large, or its codec cannot encode it."""


class JobError(TaskHarborError):
    """A driver's answer about one job. The driver changed nothing for it."""

    def __init__(self, job_id: str, detail: str = "") -> None:
        self.job_id = job_id
        self.detail = detail
        super().__init__(job_id, detail)

    reason = "the operation does not apply to this job"

    def __str__(self) -> str:
        return f"job {self.job_id}: {self.detail or self.reason}"


class JobNotFound(JobError):
    reason = "no job with this id (never accepted, or removed by retention)"


class JobNotInflight(JobError):
    reason = "the job is not inflight, so there is no lease to act under"


class LeaseMismatch(JobError):
    reason = "the lease token is not the current one: another worker holds this job"


class LeaseExpired(JobError):
    reason = "the lease is over: stop working on this job"


class JobFinished(JobError):
    reason = "the job has already ended"


class JobNotDead(JobError):
    reason = "only a dead job can be requeued"


class KeyConflict(JobError):
    reason = "another job with the same key is already waiting"


def not_open(place: object) -> BackendUnavailable:
    """Make the error for a handle that is used before it is open."""
    return BackendUnavailable(f"{place} is not open: await open() first, or use `async with`")


def field_error(made: Any, message: str) -> InvalidRequest:
    """Make the error for a struct that msgspec refused with this message. It names the field, its value and what is allowed."""
    allowed, _, path = message.partition(" - at `$")
    steps = _STEP.findall(path.partition("[...]")[0])
    value, field, kinds = made, "", dict[str, Any]()
    for attribute, place in steps:
        kinds = get_type_hints(type(value)) if attribute else kinds
        value = getattr(value, attribute) if attribute else list(value)[int(place)]
        field = attribute or field
    inside = path.partition("[...]")[0].rstrip("`").removeprefix(".").rpartition(".")[0]
    where = f" (in {inside})" if inside else ""
    if (choices := _choices(kinds.get(field))) and isinstance(value, str):
        allowed = f"choose {', '.join(choices[:-1])} or {choices[-1]}"
    return InvalidRequest(f"{field} {shown(field, value)}: {allowed[:1].lower()}{allowed[1:]}{where}")


def _choices(kind: Any) -> list[str]:
    """Return the texts that an enum or a literal in this type allows."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member) for member in kind]
    return [text for one in get_args(kind) for text in ([one] if isinstance(one, str) else _choices(one))]


def shown(field: str, value: Any) -> str:
    """Return a short text for a value, without the content of a job."""
    if isinstance(value, bytes):
        return f"of {len(value)} bytes"
    if isinstance(value, str) and len(value) > _LONGEST_SHOWN:
        return f"of {len(value)} characters"
    if field in _CONTENTS or not isinstance(value, (str, int, float, NoneType)):
        return f"of type {type(value).__name__}"
    return repr(value)
