"""Attempt logs for tests: rows made by hand, a history of the test laboratory, and lives that drivers really had."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from records import make_record
from taskharbor.bulk.tables import ATTEMPTS, attempts_batch, jobs_batch
from taskharbor.drivers import contract
from taskharbor.drivers.contract import Driver, JobFilter, QueueSettings
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, Attempt, Failure, JobRecord, JobState, Micros, UpdateFlags, to_datetime
from taskharbor.requests import new_id
from taskharbor.schedules.tick_ids import tick_id
from taskharbor.spark.lake import Objective
from taskharbor.spark.lake.frames import QUEUE_COLUMNS
from taskharbor_testkit.histories.generation import _attempts
from taskharbor_testkit.histories.plan import make_plan

Row = dict[str, Any]

START = datetime(2026, 3, 1, 22, tzinfo=UTC)
INSTANTS = ("created_at", "run_at", "reserved_at", "lease_expires_at", "ended_at")
NO_LEASE: Row = {"reserved_at": None, "lease_expires_at": None, "worker": None}
_READY = ("released", "expired", "requeued")
STATES = {"retried": "scheduled", "merged": "cancelled", **dict.fromkeys(_READY, "ready")}
"""States after outcomes of another name."""


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def row(seq: int = 0, **values: Any) -> Row:
    """One attempt, by default done after two seconds of a lease of thirty. Instants are seconds after the start."""
    created, outcome = values.get("created_at", 0), values.get("outcome", "done")
    begun = values.get("reserved_at", created + 1)
    named = {"job_id": f"job-{seq}", "queue": "default", "type": "send"}
    numbers = {"seq": seq, "priority": 0, "fence": 1, "payload_size": 10}
    lease = {"worker": "w1", "reserved_at": begun, "lease_expires_at": (begun or 0) + 30}
    times = {"created_at": created, "run_at": created, "ended_at": created + 3}
    end = {"outcome": outcome, "state": STATES.get(outcome, outcome)}
    made: Row = dict.fromkeys(ATTEMPTS.names) | named | numbers | lease | times | end | values
    return made | {name: at(made[name]) for name in INSTANTS if made[name] is not None}


OBJECTIVES = [
    Objective(name="soon", kind="wait", queue="mail", threshold_ms=30_000),
    Objective(name="well", kind="success", target=0.9),
]


# -- made up ------------------------------------------------------------------------------------------------------


ROWS = 400


def history(seed: int) -> list[Row]:
    """A clean log of two days, in the order of its rows."""
    plan = make_plan(ROWS, seed, days=2)
    batches = _attempts(plan, [pa.record_batch({"unit": pa.array(range(plan.units()))})])
    rows = sorted((one for batch in batches for one in batch.to_pylist()), key=itemgetter("ended_at"))
    # Every seventh job is that of a tick.
    ids = sorted({one["job_id"] for one in rows})[::7]
    for one in (one for one in rows if one["job_id"] in ids):
        one["job_id"] = tick_id("tick", "nightly", one["job_id"][-12:], one["created_at"])
    # A message for each type of error, so that plain Python can count its fingerprints.
    for seq, one in enumerate(rows, 1):
        one |= {"seq": seq, "error_message": one["error_type"] and f"{one['error_type']} {seq}"}
    return rows


def queues_frame(spark: SparkSession) -> DataFrame:
    """The queues of that history, as a run of the pipeline sees them."""
    empty = {field.name: None if field.nullable else 0 for field in QUEUE_COLUMNS} | {"paused": False}
    return spark.createDataFrame([empty | {"queue": "mail", "max_inflight": 40}], QUEUE_COLUMNS)


# -- of drivers ---------------------------------------------------------------------------------------------------

QUEUES = ("plain", "limited", "failed")
LIMIT = 2
BOOM = Failure("ValueError", "boom")

Told = tuple[Sequence[Attempt], Sequence[JobRecord]]
"""A log, and the jobs that are in the store at its end."""


class Life:
    """Random calls of several clients: one store, one clock that all of them read (some late), stale tokens."""

    def __init__(self, clients: Sequence[Driver], seed: int, now: Micros) -> None:
        self.clients = clients
        self.chance = random.Random(seed)
        self.now = now
        self.jobs: list[str] = []
        self.tokens: list[tuple[str, str]] = []
        self.leased: dict[str, JobRecord] = {}

    async def live(self, steps: int) -> None:
        for queue, limit in (("plain", None), ("limited", LIMIT)):
            settings = QueueSettings(max_inflight=limit, failure_queue="failed")
            await self.clients[0].configure(queue, settings, now=self.now)
        await asyncio.gather(*(self._client(driver, steps) for driver in self.clients))

    async def told(self) -> Told:
        log = await self.clients[0].read_attempts(limit=100_000)
        listed = await self.clients[0].list_jobs(JobFilter(), now=self.now, limit=100_000)
        return log.attempts, listed.jobs

    async def _client(self, driver: Driver, steps: int) -> None:
        calls = [self._enqueue] * 3 + [self._reserve] * 4 + [self._settle] * 5 + [self._extend, self._operate]
        for _ in range(steps):
            self.now += self.chance.choice((0, 1, 1000, SECOND // 3, SECOND, SECOND))
            late = self.now - self.chance.choice((0, 0, 0, 0, 1, 1000, SECOND // 2, SECOND))
            await self.chance.choice(calls)(driver, late)

    async def _enqueue(self, driver: Driver, late: Micros) -> None:
        pick = self.chance.choice
        records = [
            make_record(
                pick((None, None, None, tick_id("tick", "nightly", new_id()[-12:], to_datetime(self.now)))),
                now=self.now,
                queue=pick(QUEUES[:2]),
                priority=pick((0, 0, 5)),
                run_at_us=self.now + pick((0, 0, 0, -SECOND, SECOND, 3 * SECOND)),
                key=pick((None, None, "k", "l")),
                update=pick((None, UpdateFlags(run_at="yes"), UpdateFlags(run_at="later"))),
                max_attempts=pick((2, 3, 5)),
                max_stalls=pick((0, 1)),
            )
            for _ in range(self.chance.randint(1, 4))
        ]
        self.jobs += [record.id for record in records]
        await driver.enqueue(records, now=self.now)

    async def _reserve(self, driver: Driver, late: Micros) -> None:
        pick, worker = self.chance.choice, f"w{self.clients.index(driver)}"
        queue, limit, span = pick(QUEUES), pick((1, 2, 5)), pick((1, 2, 5)) * SECOND
        leased = await driver.reserve(queue, limit=limit, lease_for=span, now=late, worker=worker)
        self.tokens += [(job.id, job.token or "") for job in leased]
        self.leased |= {job.id: job for job in leased}

    async def _settle(self, driver: Driver, late: Micros) -> None:
        if self.tokens:
            lease, soon = self.chance.choice(self.tokens[-6:]), self.now + self.chance.choice((0, SECOND))
            job = self.leased[lease[0]]
            failures, fail = job.attempts + 1, contract.Fail(*lease, job.attempts + 1, BOOM)
            ends: list[contract.Settlement] = [
                *[contract.Ack(*lease)] * 2,
                # As a worker does.
                contract.RetryAt(*lease, soon, failures, BOOM) if job.spent + 1 < job.max_attempts else fail,
                fail,
                contract.Release(*lease, self.chance.choice((None, soon))),
                contract.Discard(*lease, BOOM),
            ]
            await driver.settle([self.chance.choice(ends)], now=late)

    async def _extend(self, driver: Driver, late: Micros) -> None:
        if self.tokens:
            extension = contract.Extension(*self.chance.choice(self.tokens[-6:]))
            (lease,) = await driver.extend_lease([extension], lease_for=2 * SECOND, now=late)
            if not isinstance(lease, Exception):
                self.tokens.append((extension.job_id, lease.token))

    async def _operate(self, driver: Driver, late: Micros) -> None:
        await driver.reclaim(now=late)
        if self.jobs and self.chance.random() < 0.5:
            await driver.cancel([self.chance.choice(self.jobs[-10:])], now=late)
        if self.chance.random() < 0.5:
            dead = JobFilter(states=frozenset({JobState.DEAD}))
            page = await driver.list_jobs(dead, now=self.now, limit=5)
            await driver.requeue([job.id for job in page.jobs], now=late)


@asynccontextmanager
async def life_on(url: str, seed: int, clients: int) -> AsyncIterator[Life]:
    print(f"seed {seed} on {url.partition(':')[0]}")
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(connect(url))
        others = [await stack.enter_async_context(first.clone()) for _ in range(clients - 1)]
        yield Life([first, *others], seed, await first.time())


async def live(url: str, seed: int, *, clients: int, steps: int) -> Told:
    async with life_on(url, seed, clients) as life:
        await life.live(steps)
        return await life.told()


def frames(spark: SparkSession, told: Mapping[str, Told]) -> tuple[DataFrame, DataFrame]:
    """The attempts and the jobs of all, each as a source of its own."""

    def together(batches: Mapping[str, pa.RecordBatch]) -> DataFrame:
        tables = [
            pa.Table.from_batches([batch]).append_column("source", pa.array([source] * len(batch)))
            for source, batch in batches.items()
        ]
        return spark.createDataFrame(pa.concat_tables(tables))

    logs = together({source: attempts_batch(attempts) for source, (attempts, _) in told.items()})
    return logs, together({source: jobs_batch(jobs) for source, (_, jobs) in told.items()})
