"""Handlers: the code behind a job type, where it runs, and the options of declarations and calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

import msgspec

from taskharbor.codec import Arguments
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import MAX_RESULT_BYTES, UpdateFlags
from taskharbor.retry import RetryPolicy

if TYPE_CHECKING:
    from taskharbor.batch_jobs import BatchCall

Isolation: TypeAlias = Literal["loop", "thread", "process"]
Lifespan: TypeAlias = Callable[[], AbstractAsyncContextManager[Any] | AbstractContextManager[Any]]
MOST_RESULT_BYTES = 1_048_576
"""The longest result that the driver contract accepts."""
OnInvalid: TypeAlias = Literal["dead", "complete"]


class RunOptions(TypedDict, total=False):
    """Options that say where and how jobs are run."""

    queue: str
    priority: int
    timeout: timedelta | float
    max_attempts: int
    max_stalls: int
    backoff: tuple[float, float]


class CommonOptions(RunOptions, total=False):
    """Options of a declaration, which a single call may replace."""

    codec: str


class Options(CommonOptions, total=False):
    """Options of a single call: `add.options(delay=5, priority=1).enqueue(...)`."""

    run_at: datetime
    delay: timedelta | float
    key: str
    update: UpdateFlags
    idempotency_key: str
    headers: Mapping[str, str]


class DeclaredOptions(CommonOptions, total=False):
    """Options that every declaration of a job accepts."""

    type: str
    retry: RetryPolicy | int
    on_invalid: OnInvalid
    max_result_bytes: int


class JobOptions(DeclaredOptions, total=False):
    """Options of `@harbor.job(...)`."""

    isolation: Isolation
    size: int
    cron: str | Sequence[str]
    every: timedelta | float
    zone: str


def check_options(options: dict[str, Any], known: type[Any], what: str) -> None:
    """Refuse unknown options. `retry=3` becomes `max_attempts=3`."""
    if unknown := options.keys() - known.__annotations__.keys():
        instead = ""
        if unknown <= Options.__annotations__.keys():
            instead = " (it is one of a call: job.options(...).enqueue(...))"
        elif unknown <= DeclaredOptions.__annotations__.keys():
            instead = " (it is one of the declaration: @harbor.job(...))"
        names = ", ".join(known.__annotations__)
        raise TypeError(f"unknown option {', '.join(sorted(unknown))} for {what}{instead}; known: {names}")
    retry = options.get("retry")
    if isinstance(retry, int) and not isinstance(retry, bool):
        if "max_attempts" in options:
            raise InvalidRequest(
                f"retry={retry} means max_attempts={retry}, which is given too: leave one out"
            )
        options["max_attempts"] = options.pop("retry")


def check_result_bytes(owner: str, limit: int) -> None:
    """Refuse a bound of results that no store keeps."""
    if not isinstance(limit, int) or not 0 <= limit <= MOST_RESULT_BYTES:
        bounds = f"from 0 to {MOST_RESULT_BYTES}; store more elsewhere and return a reference to it"
        raise InvalidRequest(f"{owner}: max_result_bytes={limit!r}: {bounds}")


class Handler(msgspec.Struct):
    """The code of one job type, where it runs, and how its failures are handled.

    By default `async def` runs on the loop and `def` on threads; `isolation` can ask for a process.

    Raises:
        InvalidRequest: The options do not fit the function.
    """

    type: str
    function: Callable[..., Any]
    isolation: Isolation | None = None
    """Never None once the handler is made."""
    retry: RetryPolicy | int | None = None
    """None: the default policy. A number is refused: a declaration makes `max_attempts` of it."""
    on_invalid: OnInvalid = "dead"
    """An invalid payload is never retried: it makes the job dead with the reason, or completes it."""
    max_result_bytes: int = MAX_RESULT_BYTES
    """The longest encoded result that is kept."""
    size: int = 1
    """The number of a worker's places that one execution takes."""
    arguments: Arguments | None = None
    """None if the function takes the `Job` itself."""
    batch: BatchCall | None = None
    """The call for many jobs at once, if the job is a batch job. `function` then runs a batch of one, for tools that go job by
    job."""
    lifespan: Lifespan | None = None
    """The app's, for worker processes. They find it with the function."""
    is_async: bool = False
    location: tuple[str, str] | None = None
    """Module and name under which a worker process finds the function again."""

    def __post_init__(self) -> None:
        self.is_async = inspect.iscoroutinefunction(self.function)
        if self.isolation is None:
            self.isolation = "loop" if self.is_async else "thread"
        module = getattr(self.function, "__module__", None)
        name = getattr(self.function, "__qualname__", None)
        self.location = (module, name) if module and name and "<" not in name else None
        if misfit := self._misfit():
            raise InvalidRequest(f"{self.type!r}{misfit}")
        check_result_bytes(repr(self.type), self.max_result_bytes)

    def _misfit(self) -> str:
        """Return what is wrong with the function or an option; empty if nothing is."""
        if inspect.isgeneratorfunction(self.function) or inspect.isasyncgenfunction(self.function):
            return " is a generator function (it has a yield), and its body would never run: return a value"
        if self.isolation not in get_args(Isolation):
            return f": isolation={self.isolation!r}: choose 'loop', 'thread' or 'process'"
        if self.isolation == "loop" and not self.is_async:
            return " is a plain function and would block the event loop: make it 'async def', or use threads"
        if self.isolation == "thread" and self.is_async:
            return " is 'async def': it runs on the loop or in a process, not on a thread"
        is_policy = callable(getattr(self.retry, "next_delay", None)) and not isinstance(self.retry, type)
        if self.retry is not None and not is_policy:
            policy = "an object with next_delay(job, attempt, error)"
            return f": retry={self.retry!r}: give the number of executions, as in retry=3, or {policy}"
        if self.on_invalid not in get_args(OnInvalid):
            return f": on_invalid={self.on_invalid!r}: choose 'dead' or 'complete'"
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            return f": size={self.size!r}: give the number of places that it takes, from 1"
        if self.isolation == "process" and self.location is None:
            return " runs in a process of its own, which finds it by import: define it at the top of a module"
        return ""
