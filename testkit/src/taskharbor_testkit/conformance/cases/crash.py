"""Death: of a handle, and of a whole process by SIGKILL. What was answered holds; the rest is all or nothing.

kill -9 cannot show a missing fsync (the page cache survives it); what a durability setting may lose when the
machine dies is for each driver to document and test.
"""

from __future__ import annotations

import asyncio
import sys

from taskharbor.drivers.contract import JobFilter
from taskharbor.jobs import SECOND, JobState
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.twin import START, Twin, ack

_DEATH = "taskharbor_testkit.conformance.victim"


@case(durable=True)
async def what_was_accepted_survives_a_lost_handle(t: Twin) -> None:
    """The handle is let go of without close: nothing it answered for may depend on it."""
    lost = await t.store.connect()
    job, scheduled = t.job(), t.job(run_at_us=t.now + SECOND)
    await t.enqueue(job, scheduled, by=lost)
    fresh = await t.store.connect()
    assert [one and one.id for one in await fresh.get([job.id, scheduled.id], now=t.now)] == [
        job.id,
        scheduled.id,
    ]


@case(durable=True)
async def a_lost_handles_leases_come_back(t: Twin) -> None:
    """Not before they are over, and as soon as they are."""
    lost, fresh = await t.store.connect(), await t.store.connect()
    await t.enqueue(t.job())
    (held,) = await t.reserve(lease=10, by=lost)
    assert await t.reserve(by=fresh) == []
    t.advance(10)
    (again,) = await t.reserve(by=fresh)
    assert (again.id, again.fence, again.stalls) == (held.id, 2, 1)


@case(durable=True)
async def everything_is_there_when_all_handles_were_closed(t: Twin) -> None:
    """Closing loses nothing: records, settings, log and totals are read again by a handle that comes later."""
    other = await t.store.connect()
    await t.configure(max_inflight=5, failure_queue="failed")
    await t.enqueue(t.job(key="k"), t.job(), by=other)
    held = await t.reserve(2, by=other)
    await t.settle(ack(held[1]), by=other)
    await t.enqueue(t.job(key="k"), by=other)
    before = await t.look()
    await other.close()
    await t.driver.close()
    late = await t.store.connect()
    assert (await late.list_jobs(JobFilter(), now=t.now)).jobs == before.jobs
    assert await late.stats(now=t.now) == before.stats
    assert (await late.read_attempts()).attempts == before.rows
    await t.driver.open()


async def _victim(t: Twin, *what: str) -> list[str]:
    """Another process does this and is killed by SIGKILL right after (or in the middle); what it printed."""
    assert t.store.url is not None
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        _DEATH,
        t.store.url,
        *what,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    assert process.returncode < 0, f"the process should have killed itself: {err.decode()}"
    return out.decode().split()


@case(durable=True, url=True)
async def an_enqueue_answered_before_the_kill_holds(t: Twin) -> None:
    ids = await _victim(t, "enqueue")
    assert len(ids) == 10
    found = await t.driver.get(ids, now=START)
    assert [job and job.state for job in found] == [JobState.READY] * 10


@case(durable=True, url=True)
async def a_killed_workers_jobs_come_back(t: Twin) -> None:
    ids = await _victim(t, "reserve")
    before = await t.driver.get(ids, now=START)
    assert [job and job.state for job in before] == [JobState.INFLIGHT] * len(ids)
    assert await t.driver.reserve("q", limit=20, lease_for=SECOND, now=START, worker="w") == []
    later = START + 30 * SECOND
    again = await t.driver.reserve("q", limit=20, lease_for=SECOND, now=later, worker="w")
    assert [(job.id, job.fence, job.stalls) for job in again] == [(job_id, 2, 1) for job_id in ids]


@case(durable=True, url=True)
async def a_settle_answered_before_the_kill_holds(t: Twin) -> None:
    ids = await _victim(t, "settle")
    found = await t.driver.get(ids, now=START)
    assert [job and job.state for job in found] == [JobState.DONE] * len(ids)
    assert len((await t.driver.read_attempts()).attempts) == len(ids)


@case(durable=True, url=True)
async def a_batch_cut_off_by_the_kill_is_all_or_nothing(t: Twin) -> None:
    """The process dies at an arbitrary point of a stream of batches of ten; no batch is there in part."""
    await _victim(t, "stream")
    batches: dict[str, int] = {}
    for job in (await t.driver.list_jobs(JobFilter(), now=START, limit=100_000)).jobs:
        batches[job.headers["batch"]] = batches.get(job.headers["batch"], 0) + 1
    assert batches
    assert set(batches.values()) == {10}
