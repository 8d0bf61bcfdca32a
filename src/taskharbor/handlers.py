"""Handlers: the code behind a job type, where it runs, and the options of declarations and calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import msgspec

from taskharbor.codec import Arguments
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import UpdateFlags
from taskharbor.retry import DEFAULT_RETRY, RetryPolicy

if TYPE_CHECKING:
    from taskharbor.batch_jobs.rows import BatchCall

Isolation: TypeAlias = Literal["loop", "thread", "process"]
OnInvalid: TypeAlias = Literal["dead", "complete"]


class Options(TypedDict, total=False):
    """Options of a single call: `add.options(delay=5, priority=1).enqueue(...)`."""

    queue: str
    run_at: datetime
    delay: timedelta | float
    timeout: timedelta | float
    priority: int
    key: str
    update: UpdateFlags
    idempotency_key: str
    max_attempts: int
    max_stalls: int
    backoff: tuple[float, float]
    headers: Mapping[str, str]
    codec: str


class DeclaredOptions(TypedDict, total=False):
    """Options that every declaration of a job accepts."""

    name: str
    queue: str
    priority: int
    timeout: timedelta | float
    max_attempts: int
    max_stalls: int
    backoff: tuple[float, float]
    retry: RetryPolicy
    on_invalid: OnInvalid
    codec: str


class JobOptions(DeclaredOptions, total=False):
    """Options of `@harbor.job(...)`."""

    isolation: Isolation


class Handler(msgspec.Struct, frozen=True, kw_only=True):
    """The code of one job type. `arguments` is None if the function takes the `Job` itself."""

    type: str
    function: Callable[..., Any]
    is_async: bool
    isolation: Isolation
    retry: RetryPolicy = DEFAULT_RETRY
    on_invalid: OnInvalid = "dead"
    """An invalid payload is never retried: it makes the job dead with the reason, or completes it."""
    arguments: Arguments | None = None
    location: tuple[str, str] | None = None
    """Module and name under which a worker process finds the function again."""
    batch: BatchCall | None = None
    """The call for many jobs at once, if the job is a batch job. `function` then runs a batch of one, for tools that go job by
    job."""


def make_handler(
    type: str,
    function: Callable[..., Any],
    *,
    isolation: Isolation | None = None,
    retry: RetryPolicy | None = None,
    on_invalid: OnInvalid = "dead",
    arguments: Arguments | None = None,
    batch: BatchCall | None = None,
) -> Handler:
    """Make the handler of a job type. By default `async def` runs on the loop and `def` on threads; `isolation` can ask for a
    process.

    Raises:
        InvalidRequest: The options do not fit the function.
    """
    is_async = inspect.iscoroutinefunction(function)
    if isolation is None:
        isolation = "loop" if is_async else "thread"
    if isolation not in ("loop", "thread", "process"):
        raise InvalidRequest(f"isolation {isolation!r}: choose 'loop', 'thread' or 'process'")
    if isolation == "loop" and not is_async:
        raise InvalidRequest(
            f"{type!r} is a plain function and would block the event loop: make it 'async def', or use threads"
        )
    if isolation == "thread" and is_async:
        raise InvalidRequest(f"{type!r} is 'async def': it runs on the loop or in a process, not on a thread")
    if on_invalid not in ("dead", "complete"):
        raise InvalidRequest(f"on_invalid {on_invalid!r}: choose 'dead' or 'complete'")
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    location = (module, name) if module and name and "<" not in name else None
    if isolation == "process" and location is None:
        raise InvalidRequest(
            f"{type!r} runs in a process of its own, which finds it by import: define it at the top of a module"
        )
    return Handler(
        type=type,
        function=function,
        is_async=is_async,
        isolation=isolation,
        retry=retry or DEFAULT_RETRY,
        on_invalid=on_invalid,
        arguments=arguments,
        location=location,
        batch=batch,
    )
