"""A program that uses a store: `another_process.py URL enqueue|finish|read`. Prints what it found."""

from __future__ import annotations

import asyncio
import sys

from drivers.objectstore.jobs_here import NOW, a_job, run_through
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.objectstore import ObjectStoreDriver


async def main(url: str, what: str) -> None:
    async with ObjectStoreDriver.from_url(url) as driver:
        if what == "enqueue":
            (made,) = await driver.enqueue([a_job()], now=NOW)
            print(made.id)
        elif what == "finish":
            print(*await run_through(driver, 25))
            await driver.store.settled()
        else:
            page = await driver.list_jobs(JobFilter(), now=NOW, limit=1000)
            rows = (await driver.read_attempts(limit=1000)).attempts
            print(*(f"{job.id}:{job.state.value}" for job in page.jobs))
            print(len(rows))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
