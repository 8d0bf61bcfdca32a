"""Cancelling: at once while waiting, by request while inflight, and never twice."""

from __future__ import annotations

from taskharbor import errors
from taskharbor.jobs import SECOND, JobState, Lease, Outcome
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.twin import BOOM, Twin, ack, beat, discard, fail, release, retry


@case()
async def a_ready_job_is_cancelled_at_once(t: Twin) -> None:
    job = t.job()
    await t.enqueue(job)
    t.advance(1)
    assert await t.cancel(job.id) == [JobState.CANCELLED]
    stored = await t.get(job.id)
    assert (stored.state, stored.finished_at_us, stored.cancel_requested) == (
        JobState.CANCELLED,
        t.now,
        False,
    )
    row = await t.last_row(job.id)
    assert (row.outcome, row.state, row.ended_at_us) == (Outcome.CANCELLED, JobState.CANCELLED, t.now)
    assert (row.worker, row.reserved_at_us, row.lease_expires_at_us) == (None, None, None)


@case()
async def a_scheduled_job_is_cancelled_at_once(t: Twin) -> None:
    job = t.job(run_at_us=t.now + SECOND)
    await t.enqueue(job)
    assert await t.cancel(job.id) == [JobState.CANCELLED]
    t.advance(1)
    assert await t.reserve() == []


@case()
async def an_inflight_job_is_flagged(t: Twin) -> None:
    """INFLIGHT is returned, the lease stands, and the next heartbeat tells its holder."""
    held = await t.lease(t.job())
    assert await t.cancel(held.id) == [JobState.INFLIGHT]
    stored = await t.get(held.id)
    assert (stored.state, stored.cancel_requested, stored.token) == (JobState.INFLIGHT, True, held.token)
    (lease,) = await t.extend(beat(held))
    assert isinstance(lease, Lease)
    assert lease.cancel_requested
    assert await t.rows(held.id) == []


@case()
async def a_second_request_changes_nothing(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.cancel(held.id)
    async with t.unchanged():
        assert await t.cancel(held.id) == [JobState.INFLIGHT]


@case()
async def a_cancelled_job_stays_cancelled(t: Twin) -> None:
    job = t.job()
    await t.enqueue(job)
    await t.cancel(job.id)
    t.advance(1)
    async with t.unchanged():
        assert await t.cancel(job.id) == [JobState.CANCELLED]


@case()
async def done_and_dead_are_finished(t: Twin) -> None:
    await t.enqueue(t.job(), t.job())
    done, dead = await t.reserve(2)
    await t.settle(ack(done), fail(dead))
    async with t.unchanged():
        assert [type(one) for one in await t.cancel(done.id, dead.id)] == [errors.JobFinished] * 2


@case()
async def an_unknown_job_is_not_found(t: Twin) -> None:
    async with t.unchanged():
        (error,) = await t.cancel("unknown")
    assert type(error) is errors.JobNotFound
    assert error.job_id == "unknown"


@case()
async def a_request_turns_retry_into_cancelled(t: Twin) -> None:
    """And the failure is still recorded."""
    held = await t.lease(t.job())
    await t.cancel(held.id)
    assert await t.settle(retry(held, t.now + SECOND)) == [None]
    job = await t.get(held.id)
    assert (job.state, job.attempts, job.last_error) == (JobState.CANCELLED, 1, BOOM.text)
    assert (job.failed_at_us, job.finished_at_us, job.cancel_requested) == (t.now, t.now, False)
    row = await t.last_row(held.id)
    assert (row.outcome, row.state, row.error_type) == (Outcome.CANCELLED, JobState.CANCELLED, BOOM.type)


@case()
async def a_request_turns_release_into_cancelled(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.cancel(held.id)
    await t.settle(release(held, t.now + SECOND))
    job = await t.get(held.id)
    assert (job.state, job.attempts, job.finished_at_us) == (JobState.CANCELLED, 0, t.now)
    assert (await t.last_row(held.id)).outcome is Outcome.CANCELLED


@case()
async def ack_wins_over_a_request(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.cancel(held.id)
    await t.settle(ack(held, b"done anyway"))
    job = await t.get(held.id)
    assert (job.state, job.result, job.cancel_requested) == (JobState.DONE, b"done anyway", False)


@case()
async def fail_wins_over_a_request(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.cancel(held.id)
    await t.settle(fail(held))
    assert await t.state(held.id) is JobState.DEAD


@case()
async def discard_honours_a_request(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.cancel(held.id)
    await t.settle(discard(held))
    assert await t.state(held.id) is JobState.CANCELLED


@case()
async def a_request_outlives_the_holder(t: Twin) -> None:
    """Where the holder dies, the stall ends the job cancelled: nobody runs it again."""
    held = await t.lease(t.job(), lease=10)
    await t.cancel(held.id)
    t.advance(10)
    assert await t.reserve() == []
    job = await t.get(held.id)
    assert (job.state, job.stalls, job.finished_at_us) == (JobState.CANCELLED, 1, t.now)
    row = await t.last_row(held.id)
    assert (row.outcome, row.state) == (Outcome.EXPIRED, JobState.CANCELLED)


@case()
async def a_request_after_the_lease_was_over_is_kept(t: Twin) -> None:
    held = await t.lease(t.job(), lease=10)
    t.advance(20)
    assert await t.cancel(held.id) == [JobState.INFLIGHT]
    assert await t.reserve() == []
    assert await t.state(held.id) is JobState.CANCELLED


@case()
async def a_batch_answers_in_order(t: Twin) -> None:
    ready, scheduled = t.job(), t.job(run_at_us=t.now + SECOND)
    held = await t.lease(t.job(priority=9))
    await t.enqueue(ready, scheduled)
    answers = await t.cancel(scheduled.id, "unknown", held.id, ready.id, ready.id)
    assert answers[0] is JobState.CANCELLED
    assert type(answers[1]) is errors.JobNotFound
    assert answers[2:] == [JobState.INFLIGHT, JobState.CANCELLED, JobState.CANCELLED]
    assert len(await t.rows(ready.id)) == 1


@case()
async def cancelling_frees_the_key(t: Twin) -> None:
    job, again = t.job(key="k"), t.job(key="k")
    await t.enqueue(job)
    await t.cancel(job.id)
    assert [one.existed for one in await t.enqueue(again)] == [False]
    assert await t.state(again.id) is JobState.READY


@case()
async def a_cancelled_retry_keeps_the_history(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(retry(held, t.now + SECOND))
    await t.cancel(held.id)
    job = await t.get(held.id)
    assert (job.state, job.attempts, job.last_error, job.fence) == (JobState.CANCELLED, 1, BOOM.text, 1)
    assert [row.outcome for row in await t.rows(held.id)] == [Outcome.RETRIED, Outcome.CANCELLED]
