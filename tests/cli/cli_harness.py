"""What the command line's tests say often."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

from taskharbor.client import Client, portal
from taskharbor.jobs import Failure, JobState

Run = Callable[..., Result]


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def kill(client: Client, job_id: str, reason: str = "no good") -> None:
    """Make the next job of the default queue a dead letter; it must be this one."""

    async def fail() -> None:
        driver, now = client.driver, await client.driver.time()
        (job,) = await driver.reserve(
            "default", limit=1, lease_for=10_000_000, now=now, worker="w", types=None
        )
        assert job.id == job_id
        assert job.token is not None
        await driver.fail(
            job.id, job.token, now=now + 1, attempts=1, error=Failure("ValueError", reason, "Traceback")
        )

    portal().call(fail())
    assert client.get(job_id).state is JobState.DEAD
