"""What the tests of schedules say often: put, move the clock, tick, and see which jobs there are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from taskharbor import AsyncClient, JobFilter, JobRecord, JobState, Schedule
from taskharbor.clock import FakeClock
from taskharbor.drivers.contract import Driver
from taskharbor.jobs import SECOND, Failure, Micros
from taskharbor.schedules import QUEUE
from taskharbor.schedules.specification import MOST_AT_ONCE
from taskharbor.schedules.tick_ids import parse_tick_id
from taskharbor.schedules.ticking import tick

MINUTE = timedelta(minutes=1)
START: Micros = 1_700_000_040 * SECOND
"""A full minute. The clock begins a microsecond later."""


class Crash(BaseException):
    """Stands for the end of the process."""


class Crashing:
    """A driver that ends with its first call of this name, before or after the call takes effect."""

    def __init__(self, driver: Driver, name: str, *, after: bool = False) -> None:
        self._driver, self._name, self._after = driver, name, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._driver, name)
        if name != self._name:
            return method

        async def crash(*args: Any, **options: Any) -> Any:
            if self._after:
                await method(*args, **options)
            raise Crash(name)

        return crash


class Harness:
    """One store with schedules."""

    def __init__(self, driver: Driver) -> None:
        self.clock = FakeClock(START + 1)
        self.driver = driver
        self.client = AsyncClient(driver, clock=self.clock)
        self.schedules = self.client.schedules

    async def put(self, name: str = "s", **fields: Any) -> bool:
        """Put a schedule, every minute unless said otherwise."""
        if not fields.keys() & {"cron", "every"}:
            fields["every"] = MINUTE
        return await self.schedules.put(Schedule(name=name, job=fields.pop("job", "work"), **fields))

    async def begin(self, name: str = "s", **fields: Any) -> None:
        """Put it, and let a worker see it."""
        await self.put(name, **fields)
        await self.tick()

    async def tick(self, driver: Any = None, worker: str = "w-1") -> int:
        """Work on all that is due. Returns the number of schedules."""
        total = 0
        while count := await tick(driver or self.driver, self.clock.now(), worker):
            total += count
        return total

    async def forward(self, by: timedelta | float = MINUTE) -> None:
        """Move the clock, then work on what is due."""
        self.clock.advance(by)
        await self.tick()

    async def jobs(self, queue: str = "default") -> list[JobRecord]:
        """The jobs that there are, oldest first."""
        page = await self.client.list_jobs(JobFilter(queue=queue), limit=1000)
        return page.jobs[::-1]

    async def ticks(self, made: str = "tick") -> list[float]:
        """The nominal times of the jobs, in seconds after the start, in order."""
        parsed = [parse_tick_id(job.id) for job in await self.jobs()]
        return sorted(
            one.at.timestamp() - START / SECOND for one in parsed if one is not None and one.made == made
        )

    async def own(self, name: str = "s") -> JobRecord:
        """The schedule's own job."""
        states = frozenset({JobState.READY, JobState.SCHEDULED, JobState.INFLIGHT})
        (job,) = (await self.client.list_jobs(JobFilter(queue=QUEUE, key=name, states=states))).jobs
        return job

    async def lease(self, queue: str = "default") -> JobRecord:
        """Lease the next job of the queue."""
        now = self.clock.now()
        (job,) = await self.driver.reserve(queue, limit=1, lease_for=3600 * SECOND, now=now, worker="w-1")
        return job

    async def end(self, *, dead: bool = False) -> str:
        """Run the next job to its end."""
        job, now = await self.lease(), self.clock.now()
        if dead:
            await self.driver.fail(job.id, job.token or "", now=now, attempts=1, error=Failure("E", "broken"))
        else:
            await self.driver.ack(job.id, job.token or "", now=now)
        return job.id


__all__ = ["MINUTE", "MOST_AT_ONCE", "START", "Crash", "Crashing", "Harness"]
