"""Jobs, handles and calls that tests of the object-store driver share."""

from __future__ import annotations

from typing import Any

from taskharbor.drivers.contract import Ack, Driver
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.jobs import SECOND, JobRecord
from taskharbor.requests import new_id

NOW = 1_700_000_000 * SECOND


def a_job(**fields: Any) -> JobRecord:
    defaults = {"id": new_id(), "type": "mail", "queue": "q", "run_at_us": NOW, "created_at_us": NOW}
    return JobRecord(**(defaults | fields))


async def opened(url: str) -> ObjectStoreDriver:
    driver = ObjectStoreDriver.from_url(url)
    await driver.open()
    return driver


async def run_through(driver: Driver, count: int, queue: str = "q", now: int = NOW) -> list[str]:
    """Enqueue, reserve and finish so many jobs; their ids."""
    jobs = [a_job(queue=queue) for _ in range(count)]
    await driver.enqueue(jobs, now=now)
    held = await driver.reserve(queue, limit=count, lease_for=60 * SECOND, now=now, worker="w")
    assert await driver.settle([Ack(job.id, job.token or "") for job in held], now=now) == [None] * count
    return [job.id for job in held]
