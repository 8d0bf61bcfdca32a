"""Ends an execution that takes longer than its job's timeout.

On the event loop and in worker processes that is a real end. A thread cannot be killed: it is asked to stop
(`job.should_stop`), and its lease is kept until it has, so that the job never runs twice at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any

from taskharbor.context import Job
from taskharbor.errors import JobTimeout
from taskharbor.jobs import SECOND
from taskharbor.middleware import Call

TIMEOUT = "timeout"
"""The stop reason of a job whose time is up."""

_scope: ContextVar[asyncio.Timeout] = ContextVar("taskharbor_timeout")


def timeout(job: Job, call_next: Call) -> Awaitable[Any]:
    # Not a coroutine itself: a job without a timeout pays for none.
    return _limited(job, call_next) if job.record.timeout_us else call_next(job)


async def _limited(job: Job, call_next: Call) -> Any:
    seconds = job.record.timeout_us / SECOND
    try:
        async with asyncio.timeout(seconds) as scope:
            _scope.set(scope)
            return await call_next(job)
    except TimeoutError as error:
        if not scope.expired():
            raise  # The handler's own.
        job.stop(TIMEOUT)
        raise JobTimeout(f"took longer than its timeout of {seconds:g} s") from error
    except asyncio.CancelledError as error:
        # A thread past its time is waited for; whoever cancels it meanwhile does not undo that.
        if scope.expired() and job.stop_reason == TIMEOUT:
            raise JobTimeout(f"took longer than its timeout of {seconds:g} s") from error
        raise


def hold_timeout(job: Job) -> None:
    """The time from here to `restart_timeout` is the worker's own (a process starts) and not charged to the handler."""
    _reschedule(job, None)


def restart_timeout(job: Job) -> None:
    _reschedule(job, asyncio.get_running_loop().time() + job.record.timeout_us / SECOND)


def _reschedule(job: Job, when: float | None) -> None:
    if job.record.timeout_us:
        with contextlib.suppress(RuntimeError):  # It has just struck: too late for either.
            _scope.get().reschedule(when)
