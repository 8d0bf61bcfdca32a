"""What the tests of outages share: a handle whose connections run through a fault proxy, and one that goes straight."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from taskharbor.drivers.redis import RedisDriver
from taskharbor.drivers.redis.library import LIBRARY
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Micros
from taskharbor.requests import new_ids
from taskharbor_testkit.servers import FaultProxy, RedisServer, with_fresh_prefix

NOW: Micros = 1_800_000_000 * SECOND
LEASE: Micros = 60 * SECOND


def records(count: int, *, queue: str = "q", now: Micros = NOW, **fields: Any) -> list[JobRecord]:
    return [
        JobRecord(id=job_id, type="t", queue=queue, run_at_us=now, created_at_us=now, **fields)
        for job_id in new_ids(count)
    ]


def load_library(server: RedisServer) -> None:
    """So that the first request for a function is the one that runs it."""
    if not server.execute("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY.name):
        server.execute("FUNCTION", "LOAD", LIBRARY.source)


def runs(name: str) -> bytes:
    """What a request contains that runs this function."""
    return f"{LIBRARY.name}_{name}\r\n".encode()


class Line:
    """A handle by way of a fault proxy, and one that goes straight to the server, to see what is true."""

    def __init__(self, near: RedisDriver, far: RedisDriver, proxy: FaultProxy) -> None:
        self.near = near
        self.far = far
        self.proxy = proxy

    async def store(self, count: int = 1, **fields: Any) -> list[str]:
        answers = await self.far.enqueue(records(count, **fields), now=NOW)
        return [one.id for one in answers]

    async def claim(self, limit: int = 1, *, now: Micros = NOW, worker: str = "w") -> list[JobRecord]:
        return await self.near.reserve("q", limit=limit, lease_for=LEASE, now=now, worker=worker)

    async def jobs(self, *job_ids: str) -> list[JobRecord]:
        return [job for job in await self.far.get(job_ids, now=NOW) if job is not None]

    async def log(self, job_id: str) -> list[Attempt]:
        return await self.far.job_attempts(job_id)

    async def counts(self, queue: str = "q") -> dict[JobState, int]:
        """The states of a queue that have any jobs."""
        (stats,) = await self.far.stats(now=NOW, queue=queue)
        return {state: count for state, count in stats.counts.items() if count}


@contextlib.asynccontextmanager
async def line(server: RedisServer, options: str = "") -> AsyncIterator[Line]:
    url = with_fresh_prefix(server.url)
    load_library(server)
    with FaultProxy.to(server.url) as proxy:
        near = RedisDriver.from_url(proxy.url_for(url) + options)
        async with near, RedisDriver.from_url(url) as far:
            yield Line(near, far, proxy)
