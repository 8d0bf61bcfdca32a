"""What the command line's tests say often."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

from taskharbor.client import Client, portal
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState

Run = Callable[..., Result]


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def lease(client: Client) -> JobRecord:
    """The next job of the default queue, as worker w-1 holds it."""

    async def reserve() -> list[JobRecord]:
        now = await client.driver.time()
        return await client.driver.reserve("default", limit=1, lease_for=60 * SECOND, now=now, worker="w-1")

    (job,) = portal().call(reserve())
    return job


def kill(client: Client, job_id: str, reason: str = "no good") -> None:
    """Make the next job of the default queue a dead letter; it must be this one."""
    job, error = lease(client), Failure("ValueError", reason, "Traceback")
    assert job.id == job_id
    portal().call(client.driver.fail(job_id, job.token or "", now=client.now(), attempts=1, error=error))
    assert client.get(job_id).state is JobState.DEAD
