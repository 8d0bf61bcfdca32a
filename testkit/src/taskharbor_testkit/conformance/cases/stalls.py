"""Leases that run out: whose, when, what it costs the job, and when it is one too many."""

from __future__ import annotations

from taskharbor.drivers.contract import EXPIRED_ERROR
from taskharbor.jobs import SECOND, JobState, Lease, Outcome
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.twin import BOOM, Twin, beat, retry


@case()
async def a_valid_lease_is_left_alone(t: Twin) -> None:
    await t.lease(t.job(), lease=30)
    t.now += 30 * SECOND - 1
    async with t.unchanged():
        assert await t.reclaim() == 0


@case()
async def over_at_expires_at_exactly(t: Twin) -> None:
    held = await t.lease(t.job(), lease=30, worker="w3")
    t.advance(30)
    assert await t.reclaim() == 1
    job = await t.get(held.id)
    assert (job.state, job.stalls, job.attempts, job.run_at_us) == (JobState.READY, 1, 0, held.run_at_us)
    assert (job.token, job.worker, job.expires_at_us, job.reserved_at_us) == (None,) * 4
    assert (job.last_error, job.failed_at_us, job.finished_at_us) == (None, None, None)


@case()
async def the_row_tells_of_the_lost_lease(t: Twin) -> None:
    held = await t.lease(t.job(), lease=30, worker="w3")
    t.advance(45)
    await t.reclaim()
    row = await t.last_row(held.id)
    assert (row.outcome, row.state, row.worker, row.fence) == (Outcome.EXPIRED, JobState.READY, "w3", 1)
    assert (row.reserved_at_us, row.lease_expires_at_us) == (held.reserved_at_us, held.expires_at_us)
    assert row.ended_at_us == t.now
    assert (row.error_type, row.error_message) == (EXPIRED_ERROR.type, EXPIRED_ERROR.message)


@case()
async def progress_is_cleared(t: Twin) -> None:
    held = await t.lease(t.job(), lease=5)
    (lease,) = await t.extend(beat(held, b"50%"), lease=10)
    assert isinstance(lease, Lease)
    t.advance(10)
    await t.reclaim()
    assert (await t.get(held.id)).progress is None


@case()
async def a_repeated_reclaim_finds_nothing(t: Twin) -> None:
    await t.lease(t.job(), lease=30)
    t.advance(30)
    assert await t.reclaim() == 1
    async with t.unchanged():
        assert await t.reclaim() == 0


@case()
async def a_stall_spends_an_execution(t: Twin) -> None:
    """Dead when attempts + stalls reach max_attempts, with last_error."""
    held = await t.lease(t.job(max_attempts=3), lease=5)
    await t.settle(retry(held, t.now))
    for _ in range(2):
        await t.reserve(lease=5)
        t.advance(5)
        await t.reclaim()
    job = await t.get(held.id)
    assert (job.state, job.attempts, job.stalls) == (JobState.DEAD, 1, 2)
    assert (job.last_error, job.finished_at_us) == (EXPIRED_ERROR.text, t.now)
    row = await t.last_row(held.id)
    assert (row.outcome, row.state) == (Outcome.EXPIRED, JobState.DEAD)
    assert (await t.stats()).dead_total == 1


@case()
async def one_execution_allowed_means_the_first_stall_kills(t: Twin) -> None:
    held = await t.lease(t.job(max_attempts=1), lease=5)
    t.advance(5)
    await t.reclaim()
    assert await t.state(held.id) is JobState.DEAD


@case()
async def one_execution_left_after_the_last_but_one(t: Twin) -> None:
    held = await t.lease(t.job(max_attempts=3), lease=5)
    for _ in range(2):
        t.advance(5)
        await t.reserve(lease=5)
    job = await t.get(held.id)
    assert (job.state, job.stalls) == (JobState.INFLIGHT, 2)


@case()
async def max_stalls_bounds_apart_from_attempts(t: Twin) -> None:
    held = await t.lease(t.job(max_attempts=99, max_stalls=2), lease=5)
    t.advance(5)
    await t.reserve(lease=5)
    assert (await t.get(held.id)).stalls == 1
    t.advance(5)
    await t.reclaim()
    assert await t.state(held.id) is JobState.DEAD


@case()
async def max_stalls_zero_is_no_bound(t: Twin) -> None:
    held = await t.lease(t.job(max_attempts=99, max_stalls=0), lease=5)
    for _ in range(5):
        t.advance(5)
        await t.reserve(lease=5)
    job = await t.get(held.id)
    assert (job.state, job.stalls) == (JobState.INFLIGHT, 5)


@case()
async def failures_do_not_count_as_stalls(t: Twin) -> None:
    held = await t.lease(t.job(max_attempts=99, max_stalls=2), lease=5)
    for _ in range(3):
        await t.settle(retry(held, t.now))
        (held,) = await t.reserve(lease=5)
    t.advance(5)
    await t.reclaim()
    job = await t.get(held.id)
    assert (job.state, job.attempts, job.stalls) == (JobState.READY, 3, 1)


@case()
async def a_stall_keeps_the_last_error(t: Twin) -> None:
    held = await t.lease(t.job(), lease=5)
    await t.settle(retry(held, t.now))
    await t.reserve(lease=5)
    t.advance(5)
    await t.reclaim()
    assert (await t.get(held.id)).last_error == BOOM.text


@case()
async def only_the_queue_asked_for(t: Twin) -> None:
    here = await t.lease(t.job(), lease=5)
    there = await t.lease(t.job(queue="other"), queue="other", lease=5)
    t.advance(5)
    assert await t.reclaim(queue="q") == 1
    assert await t.state(here.id) is JobState.READY
    assert await t.state(there.id) is JobState.INFLIGHT
    assert await t.reclaim() == 1


@case()
async def every_queue_where_none_is_named(t: Twin) -> None:
    for queue in "abc":
        await t.lease(t.job(queue=queue), queue=queue, lease=5)
    t.advance(5)
    assert await t.reclaim() == 3


@case()
async def at_most_limit_leases(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(5)])
    await t.reserve(5, lease=5)
    t.advance(5)
    assert await t.reclaim(limit=2) == 2
    assert await t.reclaim(limit=2) == 2
    assert await t.reclaim(limit=2) == 1


@case()
async def scheduled_jobs_are_none_of_its_business(t: Twin) -> None:
    await t.enqueue(t.job(run_at_us=t.now + SECOND), t.job())
    t.advance(2)
    async with t.unchanged():
        assert await t.reclaim() == 0


@case()
async def mixed_fates_in_one_call(t: Twin) -> None:
    lives, dies = t.job(), t.job(max_attempts=1)
    cancelled, valid = t.job(), t.job(priority=-1)
    await t.enqueue(lives, dies, cancelled, valid)
    await t.reserve(3, lease=5)
    await t.reserve(1, lease=60)
    await t.cancel(cancelled.id)
    t.advance(5)
    assert await t.reclaim() == 3
    assert [await t.state(job.id) for job in (lives, dies, cancelled, valid)] == [
        JobState.READY,
        JobState.DEAD,
        JobState.CANCELLED,
        JobState.INFLIGHT,
    ]
