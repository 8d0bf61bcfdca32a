"""Death: of a handle, and of a whole process by SIGKILL. An answered call holds; any other is all or nothing.

kill -9 cannot show a missing fsync (the page cache survives it). Each driver documents and tests what a durability
setting may lose when the machine dies.
"""

from __future__ import annotations

import asyncio
import sys

from taskharbor.drivers.contract import JobFilter
from taskharbor.jobs import SECOND
from taskharbor_testkit.conformance.case import Skip
from taskharbor_testkit.conformance.twin import START, Twin, ack


def _needs_durable(t: Twin) -> None:
    if not t.store.capabilities.durable:
        raise Skip("the driver is not durable")


async def a_lost_handles_jobs_and_leases_are_kept(t: Twin) -> None:
    """The handle is dropped without close. Its leases come back as soon as they are over, and not before."""
    _needs_durable(t)
    lost, fresh = await t.store.connect(), await t.store.connect()
    later = t.job(run_at_us=t.now + SECOND, priority=-1)
    await t.enqueue(t.job(), later, by=lost)
    held = await t.lease(lease=10, by=lost)
    assert await t.reserve(by=fresh) == []
    t.advance(10)
    again, waited = await t.reserve(2, by=fresh)
    assert (again.id, again.fence, again.stalls, waited.id) == (held.id, 2, 1, later.id)


async def everything_is_there_when_all_handles_were_closed(t: Twin) -> None:
    """Closing loses nothing: records, settings, log and totals are read again by a handle that comes later."""
    _needs_durable(t)
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


async def _victim(t: Twin, what: str) -> list[str]:
    """Another process does this and is killed by SIGKILL right after (or in the middle); its output."""
    _needs_durable(t)
    if t.store.url is None or not t.store.capabilities.multi_process:
        raise Skip("another process cannot open this store: let the factory return a URL to run this")
    command = (sys.executable, "-m", "taskharbor_testkit.conformance.victim", t.store.url, what)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    assert process.returncode < 0, f"the process should have killed itself: {err.decode()}"
    return out.decode().split()


async def _killed_with(t: Twin, what: str, state: str) -> list[str]:
    ids = await _victim(t, what)
    assert len(ids) == 10
    found = await t.driver.get(ids, now=START)
    assert [job and job.state for job in found] == [state] * 10
    return ids


async def an_enqueue_answered_before_the_kill_holds(t: Twin) -> None:
    await _killed_with(t, "enqueue", "ready")


async def a_killed_workers_jobs_come_back(t: Twin) -> None:
    ids = await _killed_with(t, "reserve", "inflight")
    assert await t.driver.reserve("q", limit=20, lease_for=SECOND, now=START, worker="w") == []
    later = START + 30 * SECOND
    again = await t.driver.reserve("q", limit=20, lease_for=SECOND, now=later, worker="w")
    assert [(job.id, job.fence, job.stalls) for job in again] == [(job_id, 2, 1) for job_id in ids]


async def a_settle_answered_before_the_kill_holds(t: Twin) -> None:
    await _killed_with(t, "settle", "done")
    assert len((await t.driver.read_attempts()).attempts) == 10


async def a_batch_cut_off_by_the_kill_is_all_or_nothing(t: Twin) -> None:
    """The process dies at an arbitrary point of a stream of batches of ten; no batch is there in part."""
    await _victim(t, "stream")
    batches: dict[str, int] = {}
    for job in (await t.driver.list_jobs(JobFilter(), now=START, limit=100_000)).jobs:
        batches[job.headers["batch"]] = batches.get(job.headers["batch"], 0) + 1
    assert batches
    assert set(batches.values()) == {10}
