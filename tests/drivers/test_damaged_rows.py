"""A stored job that no call could have stored harms nothing but itself: in a file of SQLite and in an object store's image."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from records import NOW, make_record, present
from taskharbor import AsyncClient, JobRequest, Worker
from taskharbor.drivers.contract import Ack, Driver, JobFilter, QueueSettings
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.registry import connect
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.errors import JobDamaged
from taskharbor.jobs import SECOND, JobState, to_datetime
from taskharbor.testing.broker import running_broker
from taskharbor_testkit.servers.broker import broker_process

STORES = {"sqlite": "sqlite:///{}/jobs.db", "object store": "file://{}/store"}
DAMAGES = {
    "id with NUL": "id = 'a' || char(0) || 'b'",
    "id that is no UTF-8": "id = CAST(x'ff' AS TEXT)",
    "type that is no UTF-8": "type = CAST(x'ff41' AS TEXT)",
    "blank key": "job_key = ' '",
    "spec that is no JSON": "spec = '{'",
    "headers that are a number": """spec = '{"headers":5}'""",
    "error that is no UTF-8": "last_error = CAST(x'ff' AS TEXT), stalls = 1",
    "payload longer than stored": "payload_size = 10",
    "payload shorter than stored": "payload_size = -1",
    "payload that is gone": "payload = NULL, payload_size = 5000",
    "stalls": "stalls = 9223372036854775807",
    "attempts": "attempts = 2147483647",
    "fence": "fence = 9223372036854775807",
    "run_at": "run_at = -9223372036854775808",
}


async def damage_job(driver: Driver, change: str, job_id: str = "bad") -> None:
    """Change the job's row, in queue `q`, as no call does. The handle is open."""
    statement = f"UPDATE jobs SET {change} WHERE id = '{job_id}'"  # noqa: S608
    if isinstance(driver, ObjectStoreDriver):
        (shard,) = driver.store.shards_of("q")
        await shard.change(lambda transaction: transaction.execute(statement) and None)
        return
    assert isinstance(driver, SQLiteDriver)
    with sqlite3.connect(driver._options.path) as connection:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("repairs", [False, True], ids=["found by a worker", "repaired"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("store", STORES)
async def test_a_damaged_job_is_set_aside_and_its_neighbours_go_on(
    store: str, damage: str, repairs: bool, tmp_path: Path
) -> None:
    async with connect(STORES[store].format(tmp_path)) as driver:
        await driver.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
        await driver.enqueue([make_record(name, payload=b"12") for name in ("one", "bad", "two")], now=NOW)
        await damage_job(driver, DAMAGES[damage])
        if repairs:
            assert isinstance(driver, (SQLiteDriver, ObjectStoreDriver))
            (found,) = await driver.repair()
            assert "of queue 'q' has damaged values" in found
        jobs = await driver.reserve("q", limit=10, lease_for=SECOND, now=NOW, worker="w")
        good = [job for job in jobs if job.id in ("one", "two")]
        assert [(job.id, job.payload) for job in good] == [("one", b"12"), ("two", b"12")]
        acks = [Ack(job.id, present(job.token)) for job in good]
        assert await driver.settle(acks, now=NOW) == [None, None]
        for late in range(1, 7):
            await driver.reserve("q", limit=10, lease_for=SECOND, now=NOW + 2 * late * SECOND, worker="w")
        await driver.reclaim(now=NOW + 100 * SECOND)
        assert not repairs or await driver.repair() == []  # type: ignore[attr-defined]
        (dead,) = (await driver.list_jobs(JobFilter(states=frozenset({JobState.DEAD})), now=NOW)).jobs
        assert dead.last_error is not None
        (failed, queue) = await driver.stats(now=NOW)
        assert (queue.counts[JobState.DONE], queue.counts[JobState.DEAD]) == (2, 1)
        assert failed.counts[JobState.READY] == 1
        assert sum(queue.counts.values()) == 3
        *_, last = await driver.job_attempts(dead.id)
        assert last.state is JobState.DEAD


@pytest.mark.parametrize("damage", ["spec that is no JSON", "headers that are a number"])
@pytest.mark.parametrize("store", STORES)
async def test_a_listing_names_the_damaged_job_and_what_mends_it(
    store: str, damage: str, tmp_path: Path
) -> None:
    async with connect(STORES[store].format(tmp_path)) as driver:
        assert isinstance(driver, (SQLiteDriver, ObjectStoreDriver))
        await driver.enqueue([make_record(name) for name in ("one", "bad", "two")], now=NOW)
        await damage_job(driver, DAMAGES[damage])
        for look in (driver.list_jobs(JobFilter(), now=NOW), driver.get(["one", "bad"], now=NOW)):
            with pytest.raises(JobDamaged, match=r"job 'bad' .* run `taskharbor doctor --repair`"):
                await look
        assert len(await driver.repair()) == 1
        listed = (await driver.list_jobs(JobFilter(), now=NOW)).jobs
        assert [job.id for job in listed] == ["two", "bad", "one"]


async def test_a_listing_of_a_file_with_a_text_that_is_no_utf8_says_what_mends_it(tmp_path: Path) -> None:
    async with SQLiteDriver.from_url(f"sqlite:///{tmp_path}/jobs.db") as driver:
        await driver.enqueue([make_record("bad")], now=NOW)
        await damage_job(driver, DAMAGES["type that is no UTF-8"])
        with pytest.raises(JobDamaged, match=r"'type' .* run `taskharbor doctor --repair`"):
            await driver.list_jobs(JobFilter(), now=NOW)


@pytest.mark.parametrize("run_at", ["9e18", "-9e18"])
async def test_a_run_at_beyond_all_bounds_can_be_shown_and_is_mended(run_at: str, tmp_path: Path) -> None:
    async with SQLiteDriver.from_url(f"sqlite:///{tmp_path}/jobs.db") as driver:
        await driver.enqueue([make_record("bad")], now=NOW)
        await damage_job(driver, f"run_at = {run_at}")
        (job,) = (await driver.list_jobs(JobFilter(), now=NOW)).jobs
        assert to_datetime(job.run_at_us).year == (2255 if job.run_at_us > 0 else 1684)
        assert len(await driver.repair()) == 1
        assert await driver.repair() == []


async def test_a_client_of_a_broker_learns_which_job_is_damaged(tmp_path: Path) -> None:
    async with connect(f"sqlite:///{tmp_path}/jobs.db") as driver:
        await driver.enqueue([make_record("bad")], now=NOW)
        await damage_job(driver, "spec = '{'")
    with running_broker(f"sqlite:///{tmp_path}/jobs.db") as url:
        async with AsyncClient(url) as client:
            with pytest.raises(JobDamaged, match=r"job 'bad' .* run `taskharbor doctor --repair`"):
                await client.list_jobs()


async def test_counters_without_jobs_hurt_nobody_and_are_repaired(tmp_path: Path) -> None:
    async with SQLiteDriver.from_url(f"sqlite:///{tmp_path}/jobs.db") as driver:
        await driver.enqueue([make_record(name) for name in ("one", "two")], now=NOW)
        (job,) = await driver.reserve("q", limit=1, lease_for=SECOND, now=NOW, worker="w")
        await driver.settle([Ack(job.id, present(job.token))], now=NOW)
        with sqlite3.connect(driver._options.path) as connection:
            connection.execute("DELETE FROM jobs")
        connection.close()
        (queue,) = await driver.stats(now=NOW)
        assert (queue.counts[JobState.READY], queue.head_run_at_us) == (1, None)
        assert await driver.repair() == [
            "the counters of queue 'q' did not fit its jobs: they were corrected"
        ]
        (queue,) = await driver.stats(now=NOW)
        assert (sum(queue.counts.values()), queue.done_total) == (0, 1)
        assert await driver.repair() == []


PATIENCE = 20.0
INFLIGHT = "state = 3, token = 'x', worker = 'w', reserved_at = 1, expires_at = 2"
"""A lease that has expired: a broker that leads ends it with whatever it writes."""


@pytest.mark.parametrize("through_broker", [False, True], ids=["direct", "broker"])
@pytest.mark.parametrize("damage", ["type that is no UTF-8", "spec that is no JSON", "stalls"])
@pytest.mark.parametrize("store", STORES)
async def test_a_worker_passes_over_a_damaged_job(
    store: str, damage: str, through_broker: bool, tmp_path: Path
) -> None:
    url = STORES[store].format(tmp_path)
    async with connect(url) as driver:
        await driver.enqueue([make_record("bad"), make_record("held")], now=NOW)
        await damage_job(driver, DAMAGES[damage])
        await damage_job(driver, f"{INFLIGHT}, {DAMAGES[damage]}", "held")

    async def work(url: str) -> None:
        async with AsyncClient(url) as client:
            good = [(await client.enqueue(JobRequest(type="t", queue=queue))).id for queue in "qqp"]
            worker = Worker(url, queues=["q", "p"], max_jobs=3)
            worker.register("t", lambda job: None)
            async with asyncio.timeout(PATIENCE):
                await worker.run_async()
            assert [(await client.get(job_id)).state for job_id in good] == [JobState.DONE] * 3

    if not through_broker:
        return await work(url)
    with broker_process(url) as broker:
        await work(broker.url)
