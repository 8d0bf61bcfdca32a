"""Ends an execution that takes longer than its job's timeout.

On the event loop and in worker processes that is a real end. A thread cannot be killed: it is asked to stop
(`job.should_stop`), and its lease is kept until it has, so that the job never runs twice at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from taskharbor.context import Job
from taskharbor.errors import JobTimeout
from taskharbor.jobs import SECOND
from taskharbor.middleware import Call


async def timeout(job: Job, call_next: Call) -> Any:
    limit = job.record.timeout_us
    if not limit:
        return await call_next(job)
    seconds = limit / SECOND
    try:
        async with asyncio.timeout(seconds) as scope:
            return await call_next(job)
    except TimeoutError as error:
        if not scope.expired():
            raise  # The handler's own.
        job.stop("timeout")
        raise JobTimeout(f"took longer than its timeout of {seconds:g} s") from error
