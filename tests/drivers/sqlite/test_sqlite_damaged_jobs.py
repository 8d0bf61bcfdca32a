"""A stored job that no call could have stored harms nothing but itself."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from records import NOW, make_record, present
from taskharbor.drivers.contract import Ack, JobFilter, QueueSettings
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.jobs import SECOND, JobState

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


@pytest.mark.parametrize("repairs", [False, True], ids=["found by a worker", "repaired"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_job_is_set_aside_and_its_neighbours_go_on(
    damage: str, repairs: bool, tmp_path: Path
) -> None:
    driver = SQLiteDriver.from_url(f"sqlite:///{tmp_path}/jobs.db")
    async with driver:
        await driver.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
        await driver.enqueue([make_record(name, payload=b"12") for name in ("one", "bad", "two")], now=NOW)
    with sqlite3.connect(tmp_path / "jobs.db") as connection:
        connection.execute(f"UPDATE jobs SET {DAMAGES[damage]} WHERE id = 'bad'")  # noqa: S608
    connection.close()
    async with driver:
        if repairs:
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
        assert not repairs or await driver.repair() == []
        (dead,) = (await driver.list_jobs(JobFilter(states=frozenset({JobState.DEAD})), now=NOW)).jobs
        assert dead.last_error is not None
        (failed, queue) = await driver.stats(now=NOW)
        assert (queue.counts[JobState.DONE], queue.counts[JobState.DEAD]) == (2, 1)
        assert failed.counts[JobState.READY] == 1
        assert sum(queue.counts.values()) == 3
        *_, last = await driver.job_attempts(dead.id)
        assert last.state is JobState.DEAD
