"""Random lives of a store, told by several clients at once: every call of the contract, stale tokens, late clocks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from taskharbor.drivers import contract
from taskharbor.drivers.contract import Driver, JobFilter, QueueSettings
from taskharbor.jobs import SECOND, Attempt, Failure, JobRecord, Micros, UpdateFlags, to_datetime

QUEUES = ("plain", "limited", "failed")
LIMIT = 2
BOOM = Failure("ValueError", "boom")


class Life:
    """One store, one clock that all clients read (some of them late), one source of chance."""

    def __init__(self, clients: Sequence[Driver], seed: int, now: Micros) -> None:
        self.clients = clients
        self.chance = random.Random(seed)
        self.now = now
        self.name = f"life{seed}"
        self.jobs: list[str] = []
        self.tokens: list[tuple[str, str]] = []

    async def live(self, steps: int) -> None:
        for queue, limit in (("plain", None), ("limited", LIMIT)):
            settings = QueueSettings(max_inflight=limit, failure_queue="failed")
            await self.clients[0].configure(queue, settings, now=self.now)
        await asyncio.gather(*(self._client(driver, steps) for driver in self.clients))

    async def _client(self, driver: Driver, steps: int) -> None:
        calls = (
            [self._enqueue] * 3
            + [self._reserve] * 4
            + [self._settle] * 5
            + [self._extend, self._reclaim, self._cancel, self._requeue]
        )
        for _ in range(steps):
            self.now += self.chance.choice((0, 1, 1000, SECOND // 3, SECOND, SECOND))
            await self.chance.choice(calls)(driver)

    def _late(self) -> Micros:
        return self.now - self.chance.choice((0, 0, 0, 0, 1, 1000, SECOND // 2, SECOND))

    async def _enqueue(self, driver: Driver) -> None:
        chance = self.chance
        records = []
        for _ in range(chance.randint(1, 4)):
            record = JobRecord(
                id=f"{self.name}-{len(self.jobs)}",
                type=chance.choice(("mail", "sms")),
                queue=chance.choice(QUEUES[:2]),
                priority=chance.choice((0, 0, 5)),
                created_at_us=self.now,
                run_at_us=self.now + chance.choice((0, 0, 0, -SECOND, SECOND, 3 * SECOND)),
                key=chance.choice((None, None, "k", "l")),
                update=chance.choice((None, UpdateFlags(run_at="yes"), UpdateFlags(run_at="later"))),
                max_attempts=chance.choice((2, 3, 5)),
                max_stalls=chance.choice((0, 1)),
            )
            self.jobs.append(record.id)
            records.append(record)
        await driver.enqueue(records, now=self.now)

    async def _reserve(self, driver: Driver) -> None:
        leased = await driver.reserve(
            self.chance.choice(QUEUES),
            limit=self.chance.choice((1, 2, 5)),
            lease_for=self.chance.choice((SECOND, 2 * SECOND, 5 * SECOND)),
            now=self._late(),
            worker=f"w{self.clients.index(driver)}",
        )
        self.tokens += [(job.id, job.token or "") for job in leased]

    async def _settle(self, driver: Driver) -> None:
        if self.tokens:
            recent = self.tokens[-6:]
            await driver.settle([self._settlement(*self.chance.choice(recent))], now=self._late())

    def _settlement(self, job_id: str, token: str) -> contract.Settlement:
        chance, soon = self.chance, self.now + self.chance.choice((0, SECOND))
        return chance.choice(
            (
                contract.Ack(job_id, token),
                contract.Ack(job_id, token),
                contract.Retry(job_id, token, soon, 1, BOOM),
                contract.Fail(job_id, token, 1, BOOM),
                contract.Release(job_id, token, chance.choice((None, soon))),
                contract.Discard(job_id, token, BOOM),
            )
        )

    async def _extend(self, driver: Driver) -> None:
        if self.tokens:
            job_id, token = self.chance.choice(self.tokens[-6:])
            (lease,) = await driver.extend_lease(
                [contract.Extension(job_id, token)], lease_for=2 * SECOND, now=self._late()
            )
            if not isinstance(lease, Exception):
                self.tokens.append((job_id, lease.token))

    async def _reclaim(self, driver: Driver) -> None:
        await driver.reclaim(now=self._late())

    async def _cancel(self, driver: Driver) -> None:
        if self.jobs:
            await driver.cancel([self.chance.choice(self.jobs[-10:])], now=self._late())

    async def _requeue(self, driver: Driver) -> None:
        page = await driver.list_jobs(
            JobFilter(states=frozenset({contract.JobState.DEAD})), now=self.now, limit=5
        )
        await driver.requeue([job.id for job in page.jobs], now=self._late())


async def whole_log(driver: Driver) -> list[Attempt]:
    attempts: list[Attempt] = []
    page = await driver.read_attempts(limit=1000)
    while page.attempts:
        attempts += page.attempts
        page = await driver.read_attempts(after=page.cursor, limit=1000)
    return attempts


async def all_jobs(driver: Driver, now: Micros) -> list[JobRecord]:
    jobs: list[JobRecord] = []
    page = await driver.list_jobs(JobFilter(), now=now, limit=1000)
    jobs += page.jobs
    while page.cursor is not None:
        page = await driver.list_jobs(JobFilter(), now=now, limit=1000, cursor=page.cursor)
        jobs += page.jobs
    return jobs


def as_tuple(attempt: Attempt, names: Sequence[str]) -> tuple[Any, ...]:
    """The attempt with its columns in this order, instants aware."""
    values: list[Any] = []
    for name in names:
        us = f"{name}_us"
        if us in Attempt.__struct_fields__:
            instant = getattr(attempt, us)
            values.append(None if instant is None else to_datetime(instant))
        else:
            value = getattr(attempt, name)
            values.append(str(value) if name in ("outcome", "state") else value)
    return tuple(values)
