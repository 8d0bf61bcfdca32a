"""A store for one test: a handle on it, jobs for it, a look at its keys, and a line to the server that faults can be put on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from drivers.redis.redis_stage import nothing_unhandled
from records import NOW, make_record, present
from taskharbor.drivers.contract import Ack, Discard, Extension, Fail, JobFilter, Release, RetryAt
from taskharbor.drivers.redis import RedisDriver
from taskharbor.drivers.redis.library import LIBRARY
from taskharbor.drivers.redis.store import keys_of
from taskharbor.jobs import SECOND, Attempt, Failure, JobRecord, JobState, Micros
from taskharbor_testkit.servers import (
    FaultProxy,
    RedisAt,
    RedisServer,
    given_or_shared_redis,
    shared_redis,
    with_fresh_prefix,
)

LEASE = 30 * SECOND
BOOM = Failure("ValueError", "boom")


class Shelf:
    def __init__(self, driver: RedisDriver, server: RedisAt) -> None:
        self.driver, self.server, self.now = driver, server, NOW
        self.prefix = driver.options.prefix

    def job(self, id: str | None = None, **fields: Any) -> JobRecord:
        return make_record(id, now=self.now, **({"payload": b"{}"} | fields))

    def jobs(self, count: int, **fields: Any) -> list[JobRecord]:
        return [self.job(**fields) for _ in range(count)]

    async def enqueue(self, *jobs: JobRecord, new_ids: bool = False) -> list[str]:
        """The ids of the jobs that will do the work."""
        return [one.id for one in await self.driver.enqueue(jobs, now=self.now, new_ids=new_ids)]

    async def reserve(
        self, limit: int = 1, queue: str = "q", worker: str = "w1", **by: Any
    ) -> list[JobRecord]:
        now = self.now
        return await self.driver.reserve(queue, limit=limit, lease_for=LEASE, now=now, worker=worker, **by)

    async def claimed(self, count: int, **fields: Any) -> list[JobRecord]:
        """New jobs, all inflight."""
        jobs = self.jobs(count, **fields)
        await self.enqueue(*jobs, new_ids=True)
        held = await self.reserve(count, queue=jobs[0].queue)
        assert [job.id for job in held] == [job.id for job in jobs]
        return held

    async def settle(self, *settlements: Ack | RetryAt | Fail | Release | Discard) -> None:
        assert await self.driver.settle(settlements, now=self.now) == [None] * len(settlements)

    async def beat(self, job: JobRecord, progress: bytes | None = None, *, lease_for: Micros = LEASE) -> None:
        beat = Extension(job.id, token(job), progress)
        await self.driver.extend_lease([beat], lease_for=lease_for, now=self.now)

    async def get(self, job_id: str) -> JobRecord:
        (job,) = await self.driver.get([job_id], now=self.now)
        return present(job)

    async def log(self, job_id: str) -> list[Attempt]:
        return await self.driver.job_attempts(job_id)

    async def counts(self, queue: str = "q") -> dict[JobState, int]:
        """The states of a queue that have any jobs."""
        (stats,) = await self.driver.stats(now=self.now, queue=queue)
        return {state: count for state, count in stats.counts.items() if count}

    # -- behind its back ----------------------------------------------------------------------------------

    def ask(self, command: str, family: str, *args: str | bytes | int | float, queue: str = "q") -> Any:
        return self.server.execute(command, keys_of(self.prefix, queue)[family], *args)

    def all_keys(self) -> set[str]:
        """Of this store, without the prefix."""
        found = self.server.execute("KEYS", f"{self.prefix}*")
        return {key.decode().removeprefix(self.prefix) for key in found}


class Line(Shelf):
    """The same, and a handle `near` that reaches the server by way of a fault proxy."""

    def __init__(self, near: RedisDriver, far: RedisDriver, server: RedisServer, proxy: FaultProxy) -> None:
        super().__init__(far, server)
        self.near, self.proxy = near, proxy

    async def claim(self, limit: int = 1, *, worker: str = "w") -> list[JobRecord]:
        return await self.near.reserve("q", limit=limit, lease_for=LEASE, now=self.now, worker=worker)


def calls_for(on: Shelf, job: JobRecord) -> list[Callable[[], Awaitable[Any]]]:
    """Calls of every kind that change nothing but this job, if it is there."""
    driver, now = on.driver, on.now
    lease = job.id, job.token or "0" * 24 + "q"
    return [
        lambda: driver.time(),
        lambda: on.reserve(),
        lambda: driver.extend_lease([Extension(*lease)], lease_for=LEASE, now=now),
        lambda: driver.reclaim(now=now),
        lambda: driver.reclaim(now=now, queue="q"),
        lambda: driver.cancel(["nobody"], now=now),
        lambda: driver.cancel_keys(["nobody"], queue="q", now=now),
        lambda: driver.requeue(["nobody"], now=now),
        lambda: driver.purge(JobFilter(queue="nothing")),
        lambda: driver.prune(now=now),
        lambda: driver.get([job.id], now=now),
        lambda: driver.list_jobs(JobFilter(), now=now),
        lambda: driver.stats(now=now),
        lambda: driver.stats(now=now, queue="q"),
        lambda: driver.settings("q"),
        lambda: driver.read_attempts(),
        lambda: driver.job_attempts(job.id),
        lambda: driver.wait(["q"], now=now, timeout=0.001),
        lambda: driver.settle([Ack(*lease), Release("x", "short")], now=now),
    ]


@contextlib.asynccontextmanager
async def shelf() -> AsyncIterator[Shelf]:
    server = given_or_shared_redis()
    async with RedisDriver.from_url(with_fresh_prefix(server.url)) as driver:
        yield Shelf(driver, server)


@contextlib.asynccontextmanager
async def line() -> AsyncIterator[Line]:
    server = shared_redis()
    url = with_fresh_prefix(server.url)
    # So that the first request for a function is the one that runs it.
    if not server.execute("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY.name):
        server.execute("FUNCTION", "LOAD", LIBRARY.source)
    with nothing_unhandled(), FaultProxy.to(server.url) as proxy:
        near = RedisDriver.from_url(proxy.url_for(url))
        async with near, RedisDriver.from_url(url) as far:
            yield Line(near, far, server, proxy)


def runs(name: str) -> bytes:
    """What a request contains that runs this function."""
    return f"{LIBRARY.name}_{name}\r\n".encode()


def token(job: JobRecord) -> str:
    return present(job.token)


def ack(job: JobRecord) -> Ack:
    return Ack(job.id, token(job))


def fail(job: JobRecord) -> Fail:
    return Fail(job.id, token(job), job.attempts + 1, BOOM)


def release(job: JobRecord) -> Release:
    return Release(job.id, token(job))
