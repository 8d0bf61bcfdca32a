"""Several processes, and several handles in each, on one store."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from drivers.objectstore.jobs_here import NOW, a_job, opened
from taskharbor.drivers.contract import Ack, JobFilter
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.jobs import SECOND, JobState
from taskharbor.requests import new_ids
from taskharbor_testkit.waits import waits_of

PROGRAM = "drivers.objectstore.another_process"
TESTS = Path(__file__).parents[2]


def elsewhere(url: str, what: str) -> list[str]:
    command = [sys.executable, "-m", PROGRAM, url, what]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_a_new_process_finds_everything_in_state_and_segments(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?segment_rows=10&merge=2"
    done = elsewhere(url, "finish")
    (waiting,) = elsewhere(url, "enqueue")
    *jobs, rows = elsewhere(url, "read")
    assert jobs[0] == f"{waiting}:ready"
    assert sorted(jobs[1:]) == sorted(f"{job_id}:done" for job_id in done)
    assert rows == "25"


async def test_a_waiting_handle_sees_what_another_process_enqueued(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?poll=0.02"
    driver = await opened(url)
    await waits_of(driver)(["q"], now=NOW, timeout=0)
    assert not await waits_of(driver)(["q"], now=NOW, timeout=0)
    waiter = asyncio.create_task(waits_of(driver)(["q"], now=NOW, timeout=60))
    made = await asyncio.to_thread(elsewhere, url, "enqueue")
    assert await waiter
    (job,) = await driver.reserve("q", limit=5, lease_for=SECOND, now=NOW, worker="w")
    assert [job.id] == made
    await driver.close()


async def test_many_handles_that_write_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    """Eight writers of one object: each finds the others' versions in its way, and every job is done by exactly one."""

    first = await opened(f"file://{tmp_path}/store?segment_rows=20&merge=2")
    handles = [first, *(first.clone() for _ in range(7))]
    for handle in handles[1:]:
        await handle.open()
    ids = new_ids(160)

    async def produce(handle: ObjectStoreDriver, own: list[str]) -> None:
        for start in range(0, len(own), 5):
            batch = [a_job(id=one) for one in own[start : start + 5]]
            await handle.enqueue(batch, now=NOW, new_ids=True)

    await asyncio.gather(*(produce(handle, ids[at * 20 : at * 20 + 20]) for at, handle in enumerate(handles)))
    done: list[str] = []

    async def work(handle: ObjectStoreDriver, worker: str) -> None:
        while jobs := await handle.reserve("q", limit=7, lease_for=60 * SECOND, now=NOW, worker=worker):
            answers = await handle.settle([Ack(job.id, job.token or "") for job in jobs], now=NOW)
            assert answers == [None] * len(jobs)
            done.extend(job.id for job in jobs)

    await asyncio.gather(*(work(handle, f"w{at}") for at, handle in enumerate(handles)))
    assert sorted(done) == sorted(ids)
    (stats,) = await first.stats(now=NOW)
    assert stats.counts[JobState.DONE] == 160
    rows = (await first.read_attempts(limit=1000)).attempts
    assert sorted(row.job_id for row in rows) == sorted(ids)
    assert len((await first.list_jobs(JobFilter(), now=NOW, limit=1000)).jobs) == 160
    for handle in handles:
        await handle.close()
