"""Nothing is lost and nothing is doubled, whatever becomes of the writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

import pytest

from drivers.objectstore.faulty_blobs import STORM, Faults, Weather
from drivers.objectstore.stormy_driver import SMALL, StormyBackend, StormyDriver, seed_from_environment
from taskharbor.drivers.contract import Ack, JobFilter
from taskharbor.errors import BackendUnavailable, JobError
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor.requests import new_ids
from taskharbor_testkit.conformance.machine import Effort, run_machine

R = TypeVar("R")

NOW = 1_700_000_000 * SECOND

LOST_ANSWERS = Faults(
    lost_after=0.08, lost_before=0.08, late=0.08, conflict_409=0.05, refused_after=0.08, error_500_after=0.05,
    error_500_before=0.05, slow=0.1, slow_seconds=0.002,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nobody_dawdles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between tries spare a real store; here they would only take time."""

    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr("taskharbor.drivers.objectstore.cas.pause", at_once)
    monkeypatch.setattr("taskharbor.drivers.objectstore.compaction.AFTER_A_FAILURE", 0.0)


def test_the_contract_holds_to_the_letter_while_answers_of_writes_are_lost() -> None:
    """The kit's state machine: every call is answered as the model says, although one write in two goes wrong."""
    backend = StormyBackend(LOST_ANSWERS, seed_from_environment())
    run_machine(backend, Effort(examples=25, steps=30, shrink=False))
    assert set(backend.met) >= {"lost_after", "lost_before", "late", "refused_after"}


async def _insist(call: Callable[[], Awaitable[R]]) -> R:
    """As a worker does: after an unclear answer the same call again."""
    while True:
        try:
            return await call()
        except BackendUnavailable:
            await asyncio.sleep(0)


async def _produce(driver: StormyDriver, ids: list[str]) -> None:
    for start in range(0, len(ids), 5):
        batch = [
            JobRecord(id=one, type="mail", queue="q", run_at_us=NOW, created_at_us=NOW)
            for one in ids[start : start + 5]
        ]
        await _insist(lambda batch=batch: driver.enqueue(batch, now=NOW))  # type: ignore[misc]


async def _work(driver: StormyDriver, worker: str, total: int, done: list[str]) -> None:
    """Leases are short and time moves on, so what an unclear answer took away comes back."""
    now = NOW
    while len(set(done)) < total:
        now += SECOND // 4
        jobs = await _insist(
            lambda: driver.reserve("q", limit=4, lease_for=SECOND, now=now, worker=worker)  # noqa: B023
        )
        acks = [Ack(job.id, job.token or "") for job in jobs]
        errors = await _insist(lambda: driver.settle(acks, now=now))  # noqa: B023
        done += [ack.job_id for ack, error in zip(acks, errors, strict=True) if error is None]
        assert all(error is None or isinstance(error, JobError) for error in errors)


async def _storm(seed: int) -> None:
    weather = Weather(Random(seed), STORM)
    first = StormyDriver.on(weather, SMALL)
    handles = [first, *(first.clone() for _ in range(3))]
    for handle in handles:
        await handle.open()
    ids = new_ids(60)
    done: list[str] = []
    await asyncio.gather(
        _produce(handles[0], ids[:30]),
        _produce(handles[1], ids[30:]),
        *(_work(handle, f"w{at}", len(ids), done) for at, handle in enumerate(handles[2:])),
    )
    weather.clear_up()
    while weather.is_awaited:
        await weather.land()
    late = first.clone()
    await late.open()
    (stats,) = await late.stats(now=NOW)
    assert stats.counts[JobState.DONE] == stats.done_total == len(ids), stats
    jobs = (await late.list_jobs(JobFilter(), now=NOW, limit=1000)).jobs
    assert sorted(job.id for job in jobs) == sorted(ids)
    rows = (await late.read_attempts(limit=10_000)).attempts
    ends = [row.job_id for row in rows if row.outcome == "done"]
    assert sorted(ends) == sorted(ids), "a job ended twice, or an end was not logged"
    for handle in [*handles, late]:
        await handle.close()


def test_every_job_is_done_exactly_once_in_a_full_storm() -> None:
    """Two producers and two workers who repeat what was unclear, with old contents and unreadable objects besides."""
    seed = seed_from_environment()
    for round_ in range(5):
        asyncio.run(_storm(seed + round_))
