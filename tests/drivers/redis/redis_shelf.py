"""A store for one test: a handle on it, jobs for it, and a look at the keys behind its back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from taskharbor.drivers.contract import Ack, Fail, Release, Retry
from taskharbor.drivers.redis import RedisDriver
from taskharbor.drivers.redis.store import keys_of
from taskharbor.jobs import SECOND, Failure, JobRecord
from taskharbor.requests import new_id
from taskharbor_testkit.servers import RedisAt, given_or_shared_redis, with_fresh_prefix

NOW = 1_700_000_000 * SECOND
LEASE = 30 * SECOND
BOOM = Failure("ValueError", "boom")


class Shelf:
    def __init__(self, driver: RedisDriver, server: RedisAt) -> None:
        self.driver = driver
        self.server = server
        self.prefix = driver.options.prefix
        self.now = NOW

    def job(self, **fields: Any) -> JobRecord:
        given: dict[str, Any] = {
            "id": new_id(),
            "type": "mail",
            "queue": "q",
            "payload": b"{}",
            "run_at_us": self.now,
            "created_at_us": self.now,
        }
        return JobRecord(**(given | fields))

    async def enqueue(self, *jobs: JobRecord, new_ids: bool = False) -> list[str]:
        """The ids of the jobs that will do the work."""
        return [one.id for one in await self.driver.enqueue(jobs, now=self.now, new_ids=new_ids)]

    async def reserve(
        self, limit: int = 1, *, types: Sequence[str] | None = None, queue: str = "q"
    ) -> list[JobRecord]:
        return await self.driver.reserve(
            queue, limit=limit, lease_for=LEASE, now=self.now, worker="w1", types=types
        )

    async def lease(self, job: JobRecord) -> JobRecord:
        await self.enqueue(job)
        (held,) = await self.reserve(queue=job.queue)
        assert held.id == job.id
        return held

    async def settle(self, *settlements: Ack | Retry | Fail | Release) -> None:
        assert await self.driver.settle(settlements, now=self.now) == [None] * len(settlements)

    async def get(self, job_id: str) -> JobRecord:
        (job,) = await self.driver.get([job_id], now=self.now)
        assert job is not None
        return job

    # -- behind its back ----------------------------------------------------------------------------------

    def ask(self, command: str, family: str, *args: str | bytes | int | float, queue: str = "q") -> Any:
        return self.server.execute(command, keys_of(self.prefix, queue)[family], *args)

    def all_keys(self) -> set[str]:
        """Of this store, without the prefix."""
        found = self.server.execute("KEYS", f"{self.prefix}*")
        return {key.decode().removeprefix(self.prefix) for key in found}


@contextlib.asynccontextmanager
async def shelf(**options: str) -> AsyncIterator[Shelf]:
    server = given_or_shared_redis()
    url = with_fresh_prefix(server.url) + "".join(f"&{name}={value}" for name, value in options.items())
    async with RedisDriver.from_url(url) as driver:
        yield Shelf(driver, server)


def token(job: JobRecord) -> str:
    assert job.token is not None
    return job.token


def ack(job: JobRecord) -> Ack:
    return Ack(job.id, token(job))


def fail(job: JobRecord) -> Fail:
    return Fail(job.id, token(job), job.attempts + 1, BOOM)
