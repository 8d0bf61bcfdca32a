"""Nothing is lost and nothing is doubled, whatever becomes of the writes: the driver on a store in bad weather."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from chaos.story import insist
from drivers.objectstore.fake_blobs import LOST_ANSWERS, STORM, Faults, FaultyBlobs, Weather
from drivers.objectstore.harness import jobs_of
from records import NOW
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Ack, Driver, JobFilter
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.options import ObjectStoreOptions, parse_url
from taskharbor.errors import JobError
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor_testkit.conformance.backend import Backend, Store
from taskharbor_testkit.conformance.machine import Effort, run_machine

R = TypeVar("R")

SEED = int(os.environ.get("TASKHARBOR_STORM_SEED", "20261116"))


class StormyDriver(ObjectStoreDriver):
    """Opens in calm weather and works in bad weather. Late writes arrive between calls."""

    weather: Weather

    @classmethod
    def on(cls, weather: Weather) -> StormyDriver:
        place = parse_url("mem://")
        options = ObjectStoreOptions(poll=None, segment_rows=4, merge=2, grace=0.0)
        driver = cls(lambda: FaultyBlobs(place.open(), weather), options, is_in_memory=True)
        driver.weather = weather
        return driver

    def clone(self) -> StormyDriver:
        driver = super().clone()
        driver.weather = self.weather
        return driver

    async def open(self, *, reads_only: bool = False) -> None:
        faults, self.weather.faults = self.weather.faults, {}
        try:
            await super().open(reads_only=reads_only)
        finally:
            self.weather.faults = faults

    async def run(self, call: op.Operation[R]) -> R:
        answer = await super().run(call)
        if call.changes and self.weather.late and self.weather.random.random() < 0.5:
            await self.weather.land()
        return answer


class StormyBackend(Backend):
    """Every store has weather of its own, and all that it met is counted."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(lambda: "")
        self.met: Counter[str] = Counter()
        self._faults = faults
        self._seeds = Random(SEED)

    @asynccontextmanager
    async def store(self, directory: Path) -> AsyncIterator[Store]:
        weather = Weather(Random(self._seeds.random()), self._faults)
        store = Store(StormyDriver.on(weather))
        try:
            yield store
        finally:
            weather.clear_up()
            await store.close()
            self.met += weather.met


@pytest.fixture(autouse=True)
def _nobody_dawdles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between tries spare a real store; here they would only take time."""
    print(f"TASKHARBOR_STORM_SEED={SEED}")
    monkeypatch.setattr("taskharbor.drivers.objectstore.cas.retry_delays", lambda **_: iter([1e-9] * 100_000))
    monkeypatch.setattr("taskharbor.drivers.objectstore.compaction.AFTER_A_FAILURE", 0.0)


@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_the_contract_holds_to_the_letter_while_answers_of_writes_are_lost(examples: int) -> None:
    """The kit's state machine: every call is answered as the model says, although one write in two goes wrong."""
    backend = StormyBackend(LOST_ANSWERS)
    run_machine(backend, Effort(examples=examples, steps=30, shrink=False))
    assert set(backend.met) >= {"lost_after", "lost_before", "late", "refused_after"}


async def produce(driver: Driver, jobs: list[JobRecord]) -> None:
    for start in range(0, len(jobs), 5):
        batch = jobs[start : start + 5]
        await insist(lambda batch=batch: driver.enqueue(batch, now=NOW))  # type: ignore[misc]


async def work(driver: Driver, worker: str, total: int, done: set[str]) -> None:
    """Leases are short and time moves on, so what an unclear answer took away comes back."""
    now = NOW
    while len(done) < total:
        now += SECOND // 4
        held = await insist(
            lambda: driver.reserve("q", limit=4, lease_for=SECOND, now=now, worker=worker)  # noqa: B023
        )
        acks = [Ack(job.id, job.token or "") for job in held]
        errors = await insist(lambda: driver.settle(acks, now=now))  # noqa: B023
        done |= {ack.job_id for ack, error in zip(acks, errors, strict=True) if error is None}
        assert all(error is None or isinstance(error, JobError) for error in errors)


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.slow)])
async def test_every_job_is_done_exactly_once_in_a_full_storm(rounds: int) -> None:
    """Two producers and two workers that repeat what was unclear, with old contents and unreadable objects besides."""
    for seed in range(SEED, SEED + rounds):
        weather = Weather(Random(seed), STORM)
        first = StormyDriver.on(weather)
        handles = [first, *(first.clone() for _ in range(3))]
        for handle in handles:
            await handle.open()
        jobs = jobs_of(60)
        ids = sorted(job.id for job in jobs)
        done: set[str] = set()
        await asyncio.gather(
            produce(handles[0], jobs[:30]),
            produce(handles[1], jobs[30:]),
            *(work(handle, f"w{at}", len(ids), done) for at, handle in enumerate(handles[2:])),
        )
        weather.clear_up()
        while weather.late:
            await weather.land()
        async with first.clone() as late:
            (stats,) = await late.stats(now=NOW)
            assert stats.counts[JobState.DONE] == stats.done_total == len(ids), stats
            listed = (await late.list_jobs(JobFilter(), now=NOW, limit=1000)).jobs
            assert sorted(job.id for job in listed) == ids
            rows = (await late.read_attempts(limit=10_000)).attempts
            ends = sorted(row.job_id for row in rows if row.outcome == "done")
            assert ends == ids, "a job ended twice, or an end was not logged"
        for handle in handles:
            await handle.close()
