"""Death: of a handle, and of a whole process by SIGKILL. An answered call holds; any other is all or nothing.

kill -9 cannot show a missing fsync (the page cache survives it). Each driver documents and tests what a durability
setting may lose when the machine dies.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from taskharbor.bulk.stage import pack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver, JobFilter, QueueSettings
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND
from taskharbor_testkit.conformance.case import Skip
from taskharbor_testkit.conformance.snapshot import take
from taskharbor_testkit.conformance.twin import QUEUE, START, Twin, ack, beat, fail


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
    assert await take(late, t.now) == before
    await t.driver.open()


class _Victim:
    """A process that makes every call in a child, which is killed by SIGKILL right after the answer. A call that is None makes
    the child enqueue a stream of batches, and die in the middle of it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, call: op.Operation[Any] | None) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(pickle.dumps(call))
        try:
            size = await asyncio.wait_for(stdout.readexactly(8), 60)
        except asyncio.IncompleteReadError:
            _, told = await self._process.communicate()
            raise AssertionError(f"the process should have killed itself: {told.decode()}") from None
        answer = await stdout.readexactly(int.from_bytes(size))
        return pickle.loads(answer) if call is not None else None  # noqa: S301


@asynccontextmanager
async def _victim(url: str) -> AsyncIterator[_Victim]:
    command = (sys.executable, "-m", "taskharbor_testkit.conformance.victim", url)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield _Victim(process)
    finally:
        await process.communicate(b"")  # With an input, because only then it closes the pipe.


def _url(t: Twin) -> str:
    _needs_durable(t)
    if t.store.url is None or not t.store.capabilities.multi_process:
        raise Skip("another process cannot open this store: let the factory return a URL to run this")
    return t.store.url


async def every_call_answered_before_a_kill_holds(t: Twin) -> None:
    """A process of its own makes each call. It dies before it can make another, so nothing is left to a later write."""
    async with _victim(_url(t)) as victim:
        # Never opened: the public methods of a driver check their arguments and hand the call to `run`.
        doomed = connect(_url(t))
        doomed.run = victim.run  # type: ignore[method-assign]
        await _make_every_call(t, doomed)


async def _make_every_call(t: Twin, doomed: Driver) -> None:
    waiting, *jobs = [t.job(priority=-n) for n in range(6)]
    await t.enqueue(waiting, *jobs, by=doomed)
    await t.call(op.CancelJobs([waiting.id], t.now), doomed)
    kept, dead, *done = await t.reserve(4, by=doomed)
    assert await t.reserve() != [], "one job was left"
    await t.call(op.ExtendLease([beat(kept, b"50%")], 60 * SECOND, t.now), doomed)
    await t.settle(fail(dead), *map(ack, done), by=doomed)
    t.advance(30)
    assert await t.call(op.Reclaim(t.now), doomed) == 1
    await t.call(op.Requeue([dead.id], t.now), doomed)
    await t.call(op.Configure(QUEUE, QueueSettings(keep_done_us=SECOND), t.now), doomed)
    await t.call(op.Remove([waiting.id]), doomed)
    assert await t.call(op.Purge(JobFilter(), 1), doomed) == 1
    assert await t.call(op.Prune(t.now), doomed) == 1
    await doomed.put_blob("staging/w/1", pack([late := t.job()]))
    await doomed.publish_blobs(["staging/w/1"], series="s", number=1, portion=1, now=t.now)
    assert await t.driver.get([late.id], now=t.now) == [late]
    assert await doomed.swap_blob("staging/w/2", b"2", expected=None)
    await doomed.drop_blobs(["staging/w/1"])
    assert await t.driver.read_blobs(["staging/w/1", "staging/w/2"]) == [None, b"2"]
    t.model.enqueue([late], now=t.now)


async def a_batch_cut_off_by_the_kill_is_all_or_nothing(t: Twin) -> None:
    """The process dies at an arbitrary point of a stream of batches of ten; no batch is there in part."""
    async with _victim(_url(t)) as victim:
        await victim.run(None)
    batches: dict[str, int] = {}
    for job in (await t.driver.list_jobs(JobFilter(), now=START, limit=100_000)).jobs:
        batches[job.headers["batch"]] = batches.get(job.headers["batch"], 0) + 1
    assert batches
    assert set(batches.values()) == {10}
