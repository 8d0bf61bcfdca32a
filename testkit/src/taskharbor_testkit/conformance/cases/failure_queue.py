"""The failure queue: the very step that makes a job dead also enqueues a job that tells of it."""

from __future__ import annotations

import msgspec

from taskharbor.drivers.contract import EXPIRED_ERROR, FAILURE_TYPE, FailurePayload, JobFilter
from taskharbor.jobs import JobRecord, JobState
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.snapshot import list_all
from taskharbor_testkit.conformance.twin import BOOM, Twin, ack, discard, fail, retry


async def _failures(t: Twin, queue: str = "failed") -> list[JobRecord]:
    return await list_all(t.driver, JobFilter(queue=queue), t.now)


@case()
async def a_failed_job_is_told_of(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    held = await t.lease(t.job(payload=b"\x00\xff", headers={"trace": "1"}, type="sms", codec="raw"))
    t.advance(1)
    await t.settle(fail(held, attempts=2))
    (told,) = await _failures(t)
    assert (told.type, told.queue, told.headers) == (FAILURE_TYPE, "failed", {"trace": "1"})
    assert (told.state, told.run_at_us, told.created_at_us) == (JobState.READY, t.now, t.now)
    payload = msgspec.json.decode(told.payload, type=FailurePayload)
    assert (payload.job_id, payload.queue, payload.type, payload.codec) == (held.id, "q", "sms", "raw")
    assert (payload.payload, payload.error) == (b"\x00\xff", BOOM.text)
    assert (payload.attempts, payload.stalls) == (2, 0)


@case()
async def a_job_that_died_by_stall_is_told_of(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    held = await t.lease(t.job(max_attempts=1), lease=5)
    t.advance(5)
    await t.reclaim()
    (told,) = await _failures(t)
    payload = msgspec.json.decode(told.payload, type=FailurePayload)
    assert (payload.job_id, payload.stalls, payload.error) == (held.id, 1, EXPIRED_ERROR.text)


@case()
async def a_stall_seen_by_reserve_is_told_of(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    await t.lease(t.job(max_attempts=1), lease=5)
    t.advance(5)
    assert await t.reserve() == []
    assert len(await _failures(t)) == 1


@case()
async def a_failure_job_runs_like_any_other(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    await t.settle(fail(await t.lease(t.job())))
    told = await t.lease(queue="failed")
    assert await t.settle(ack(told)) == [None]


@case()
async def told_once_even_if_the_fail_is_repeated(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    held = await t.lease(t.job())
    await t.settle(fail(held), fail(held))
    await t.settle(fail(held))
    assert len(await _failures(t)) == 1


@case()
async def told_again_when_it_dies_again(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    held = await t.lease(t.job())
    await t.settle(fail(held))
    await t.requeue(held.id)
    await t.settle(fail(await t.lease()))
    assert len(await _failures(t)) == 2


@case()
async def only_deaths_are_told_of(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    await t.enqueue(*[t.job() for _ in range(4)])
    a, b, c, d = await t.reserve(4)
    await t.cancel(c.id)
    await t.settle(ack(a), discard(b, BOOM), retry(c, t.now), retry(d, t.now))
    assert await _failures(t) == []


@case()
async def nothing_is_told_where_no_queue_is_named(t: Twin) -> None:
    await t.settle(fail(await t.lease(t.job())))
    assert [stats.queue for stats in await t.driver.stats(now=t.now)] == ["q"]


@case()
async def a_batch_of_deaths_is_told_one_by_one(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    await t.enqueue(*[t.job() for _ in range(5)])
    held = await t.reserve(5)
    await t.settle(*[fail(job) for job in held])
    told = [msgspec.json.decode(job.payload, type=FailurePayload).job_id for job in await _failures(t)]
    assert sorted(told) == sorted(job.id for job in held)


@case()
async def the_failure_queue_may_be_paused_and_have_its_own(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    await t.configure("failed", failure_queue="last")
    await t.settle(fail(await t.lease(t.job())))
    await t.settle(fail(await t.lease(queue="failed")))
    (last,) = await _failures(t, "last")
    payload = msgspec.json.decode(last.payload, type=FailurePayload)
    assert (payload.queue, payload.type) == ("failed", FAILURE_TYPE)
    await t.configure("last", paused=True)
    assert await t.reserve(queue="last") == []


@case()
async def the_death_of_a_keyed_job_is_told_and_unblocks(t: Twin) -> None:
    await t.configure(failure_queue="failed")
    held = await t.lease(t.job(key="k"))
    blocked = t.job(key="k")
    await t.enqueue(blocked)
    await t.settle(fail(held))
    assert len(await _failures(t)) == 1
    assert (await _failures(t))[0].key is None
    assert await t.state(blocked.id) is JobState.READY
