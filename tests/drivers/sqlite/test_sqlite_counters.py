"""Random histories beside the reference model: every answer agrees, and the counters equal the rows they count."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskharbor.drivers.contract import (
    Ack,
    Discard,
    Extension,
    Fail,
    JobFilter,
    QueueSettings,
    Release,
    Retry,
)
from taskharbor.drivers.engine.tables import STATES
from taskharbor.drivers.operations import Configure
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, JobRecord, JobState, UpdateFlags
from taskharbor_testkit.conformance.backend import Store
from taskharbor_testkit.conformance.twin import BOOM, Twin

Query = Callable[..., list[tuple[Any, ...]]]

SEED = "TASKHARBOR_SQLITE_HISTORY_SEED"
QUEUES = ["a", "b"]


class History:
    def __init__(self, twin: Twin, rng: random.Random) -> None:
        self.twin = twin
        self.rng = rng
        self.seen: list[JobRecord] = []
        self.ids: list[str] = []

    async def step(self) -> None:
        names = [
            "enqueue",
            "enqueue",
            "reserve",
            "reserve",
            "settle",
            "settle",
            "extend",
            "reclaim",
            "cancel",
        ]
        names += ["requeue", "purge", "prune", "configure", "advance", "advance"]
        await getattr(self, self.rng.choice(names))()

    def _flags(self) -> UpdateFlags | None:
        rng = self.rng
        if rng.random() < 0.5:
            return None
        run_at: Any = rng.choice(["yes", "no", "later", "earlier"])
        return UpdateFlags(rng.random() < 0.5, run_at, rng.random() < 0.5, rng.random() < 0.5)

    async def enqueue(self) -> None:
        rng, twin = self.rng, self.twin
        records = [
            twin.job(
                type=rng.choice(["x", "y", "z"]),
                queue=rng.choice(QUEUES),
                payload=rng.randbytes(rng.choice([0, 3, 1500])),
                priority=rng.choice([0, 0, 1, -1]),
                run_at_us=twin.now + rng.choice([-SECOND, 0, 0, SECOND, 5 * SECOND]),
                key=rng.choice([None, None, "k1", "k2"]),
                update=self._flags(),
                idempotency_key=rng.choice([None, None, None, "i1", "i2", "i3"]),
                max_attempts=rng.choice([1, 2, 5]),
                max_stalls=rng.choice([0, 0, 1]),
                timeout_us=rng.choice([0, SECOND]),
            )
            for _ in range(rng.choice([1, 1, 2, 6]))
        ]
        if rng.random() < 0.1:
            records.append(records[0])
        self.ids += [record.id for record in records]
        await twin.enqueue(*records)

    async def reserve(self) -> None:
        rng = self.rng
        types = rng.choice([None, None, ["x"], ["y", "z"], []])
        limit, lease = rng.choice([1, 2, 10]), rng.choice([1, 3, 10])
        self.seen += await self.twin.reserve(limit, queue=rng.choice(QUEUES), lease=lease, types=types)

    async def settle(self) -> None:
        if self.seen:
            await self.twin.settle(*(self._settlement() for _ in range(self.rng.choice([1, 2, 5]))))

    def _settlement(self) -> Any:
        rng, now = self.rng, self.twin.now
        job = rng.choice(self.seen[-8:])
        token = rng.choice([job.token or "", job.token or "", job.token or "", "wrong", f"{'0' * 24}1"])
        return rng.choice(
            [
                Ack(job.id, token, rng.choice([None, b"result"])),
                Ack(job.id, token),
                Retry(job.id, token, now + rng.choice([0, 2]) * SECOND, job.attempts + 1, BOOM),
                Fail(job.id, token, job.attempts + 1, BOOM),
                Release(job.id, token, rng.choice([None, now + SECOND])),
                Discard(job.id, token, rng.choice([None, BOOM])),
            ]
        )

    async def extend(self) -> None:
        beats = [
            Extension(job.id, job.token or "", self.rng.choice([None, b"half"])) for job in self.seen[-3:]
        ]
        await self.twin.extend(*beats, lease=self.rng.choice([1, 5]))

    async def reclaim(self) -> None:
        await self.twin.reclaim(queue=self.rng.choice([None, "a"]), limit=self.rng.choice([1, 1000]))

    async def cancel(self) -> None:
        if self.ids:
            await self.twin.cancel(*self.rng.sample(self.ids, min(2, len(self.ids))))

    async def requeue(self) -> None:
        dead = await self.twin.driver.list_jobs(
            JobFilter(states=frozenset({JobState.DEAD})), now=self.twin.now
        )
        ids = [job.id for job in dead.jobs] + self.ids[:1]
        if ids:
            await self.twin.requeue(*self.rng.sample(ids, min(3, len(ids))))

    async def purge(self) -> None:
        if self.rng.random() < 0.3:
            await self.twin.purge(self.rng.choice([1, 1000]), queue=self.rng.choice([None, "a"]))

    async def prune(self) -> None:
        await self.twin.prune()

    async def configure(self) -> None:
        rng = self.rng
        queue = rng.choice(QUEUES)
        settings = QueueSettings(
            paused=rng.random() < 0.2,
            max_inflight=rng.choice([None, None, 1, 3]),
            failure_queue=None if queue == "b" else rng.choice([None, "b"]),
            keep_done_us=rng.choice([None, 3 * SECOND]),
            keep_attempts_us=rng.choice([None, 10 * SECOND]),
        )
        await self.twin.call(Configure(queue, settings, self.twin.now))

    async def advance(self) -> None:
        self.twin.advance(self.rng.choice([0.5, 1, 4]))


def _true_counts(query: Query) -> dict[int, list[int]]:
    truth = {number: [0] * len(STATES) for (number,) in query("SELECT id FROM queues")}
    for number, state, jobs in query("SELECT queue_id, state, count(*) FROM jobs GROUP BY 1, 2"):
        truth[number][state] = jobs
    return truth


@pytest.mark.parametrize("number", range(6))
def test_a_random_history_agrees_with_the_model(path: Path, query: Query, number: int) -> None:
    seed = int(os.environ.get(SEED) or random.randrange(2**32)) + number
    print(f"replay with {SEED}={seed} and number 0")

    async def use() -> None:
        url = f"sqlite:///{path}?durability=normal"
        store = Store(connect(url), url)
        try:
            history = History(await Twin.open(store), random.Random(seed))
            for _ in range(120):
                await history.step()
            await history.twin.finish()
        finally:
            await store.close()

    asyncio.run(use())
    kept = query("SELECT id, scheduled, ready, blocked, inflight, done, dead, cancelled FROM queues")
    assert {row[0]: list(row[1:]) for row in kept} == _true_counts(query)
    for orphans in (
        "SELECT count(*) FROM payloads WHERE seq NOT IN (SELECT seq FROM jobs)",
        "SELECT count(*) FROM results WHERE seq NOT IN (SELECT seq FROM jobs)",
        "SELECT count(*) FROM idempotency WHERE job_id NOT IN (SELECT id FROM jobs)",
    ):
        assert query(orphans) == [(0,)], orphans
