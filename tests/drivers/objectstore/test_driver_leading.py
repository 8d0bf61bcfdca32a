"""The driver under a broker that leads: memory is the truth, calls share writes, and time passes with every one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from drivers.objectstore.faulty_blobs import FaultyBlobs, Weather
from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.jobs_here import NOW, a_job
from taskharbor.drivers.contract import FAILURE_TYPE, Ack, JobFilter, QueueSettings
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.options import Options
from taskharbor.jobs import SECOND, JobState
from worker.stage import eventually


class ForEver:
    """A term that nobody contests."""

    epoch = 1

    def is_valid(self) -> bool:
        return True


def run(test: Callable[[ObjectStoreDriver, Weather], Awaitable[None]]) -> None:
    async def leading() -> None:
        weather = Weather()
        blobs = FaultyBlobs(HeldBlobs(), weather)
        async with ObjectStoreDriver(lambda: blobs, Options(poll=None)) as driver:
            driver.store.lead(ForEver())
            await test(driver, weather)

    asyncio.run(leading())


def test_what_is_asked_is_answered_from_memory() -> None:
    async def test(driver: ObjectStoreDriver, weather: Weather) -> None:
        job = a_job()
        await driver.enqueue([job], now=NOW)
        reads, writes = weather.reads, weather.writes
        assert len(await driver.stats(now=NOW)) == 1
        assert (await driver.get([job.id, "unknown"], now=NOW))[1] is None
        assert len((await driver.list_jobs(JobFilter(), now=NOW)).jobs) == 1
        assert (
            await driver.reserve("q", limit=5, lease_for=SECOND, now=NOW, worker="w", types=["other"]) == []
        )
        assert await driver.reclaim(now=NOW) == 0
        assert (await driver.read_attempts()).attempts == []
        assert (weather.reads, weather.writes) == (reads, writes)

    run(test)


def test_calls_that_come_together_share_a_write() -> None:
    async def test(driver: ObjectStoreDriver, weather: Weather) -> None:
        await driver.enqueue([a_job()], now=NOW)
        before = weather.writes
        await asyncio.gather(*(driver.enqueue([a_job() for _ in range(5)], now=NOW) for _ in range(40)))
        # The first to come goes at once, all others while that is under way.
        assert weather.writes - before <= 2
        (stats,) = await driver.stats(now=NOW)
        assert stats.counts[JobState.READY] == 201

    run(test)


def test_leases_that_are_over_end_with_any_write_and_their_deaths_are_told_of() -> None:
    """Nobody reserves or sweeps: an enqueue alone brings it about."""

    async def test(driver: ObjectStoreDriver, weather: Weather) -> None:
        time = [NOW]
        driver.expire_in_every_pass(lambda: time[0])
        await driver.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
        await driver.enqueue([a_job(max_attempts=1), a_job()], now=NOW)
        await driver.reserve("q", limit=2, lease_for=SECOND, now=NOW, worker="w")
        time[0] += SECOND
        await driver.enqueue([a_job()], now=time[0])
        await driver.store.settled()
        (stats,) = await driver.stats(now=time[0], queue="q")
        assert {
            state: stats.counts[state] for state in (JobState.DEAD, JobState.READY, JobState.INFLIGHT)
        } == {
            JobState.DEAD: 1,
            JobState.READY: 2,
            JobState.INFLIGHT: 0,
        }
        (notice,) = await driver.reserve("failed", limit=5, lease_for=SECOND, now=time[0], worker="w")
        assert notice.type == FAILURE_TYPE

    run(test)


def test_a_thousand_jobs_from_many_clients_take_few_writes() -> None:
    async def test(driver: ObjectStoreDriver, weather: Weather) -> None:
        async def client() -> None:
            for _ in range(4):
                await driver.enqueue([a_job() for _ in range(10)], now=NOW, new_ids=True)
                jobs = await driver.reserve("q", limit=10, lease_for=SECOND, now=NOW, worker="w")
                await driver.settle([Ack(job.id, job.token or "") for job in jobs], now=NOW)

        before = weather.writes
        await asyncio.gather(*(client() for _ in range(25)))
        (stats,) = await driver.stats(now=NOW)
        assert stats.done_total == 1000
        assert (weather.writes - before) / 1000 < 0.05

    run(test)


async def test_a_damaged_object_that_keeps_a_broker_from_leading_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/store"
    async with ObjectStoreDriver.from_url(url) as driver:
        await driver.enqueue([a_job(queue="sound"), a_job(queue="damaged")], now=NOW)
    state = tmp_path / "store/queues/damaged/0/state"
    whole = state.read_bytes()
    state.write_bytes(whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:])
    async with ObjectStoreDriver.from_url(url) as driver:
        candidate = driver.candidate(url="http://here", term=0.1)
        standing = asyncio.ensure_future(candidate.run())
        async with asyncio.timeout(30):
            await eventually(lambda: bool(caplog.messages))
            assert not candidate.is_leader
            state.write_bytes(whole)
            await candidate.wait_until_leading()
        standing.cancel()
        await asyncio.gather(standing, return_exceptions=True)
        await candidate.resign()
    (told,) = caplog.messages
    assert "cannot lead yet" in told
    assert "queues/damaged/0/state" in told
