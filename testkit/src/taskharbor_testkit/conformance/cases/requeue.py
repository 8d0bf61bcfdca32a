"""Requeue: the one way out of dead, and what stands in it."""

from __future__ import annotations

from taskharbor import errors
from taskharbor.jobs import SECOND, JobRecord, JobState, Outcome
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.twin import BOOM, Twin, ack, fail


async def _dead(t: Twin, **fields: object) -> JobRecord:
    held = await t.lease(t.job(**fields), lease=5)
    t.advance(5)
    held = await t.lease()
    await t.settle(fail(held, attempts=4))
    return held


@case()
async def a_dead_job_is_ready_and_due_now(t: Twin) -> None:
    """Attempts and stalls at zero, last_error kept, finished_at cleared, with a log row `requeued`."""
    dead = await _dead(t)
    failed_at = t.now
    t.advance(7)
    assert await t.requeue(dead.id) == [JobState.READY]
    job = await t.get(dead.id)
    assert (job.state, job.run_at_us, job.attempts, job.stalls) == (JobState.READY, t.now, 0, 0)
    assert (job.last_error, job.failed_at_us, job.finished_at_us) == (BOOM.text, failed_at, None)
    row = await t.last_row(dead.id)
    assert (row.outcome, row.state, row.ended_at_us) == (Outcome.REQUEUED, JobState.READY, t.now)
    assert (row.worker, row.reserved_at_us, row.lease_expires_at_us) == (None, None, None)


@case()
async def a_requeued_job_runs_again(t: Twin) -> None:
    dead = await _dead(t)
    await t.requeue(dead.id)
    held = await t.lease()
    assert (held.id, held.fence) == (dead.id, 3)
    assert await t.settle(ack(held)) == [None]


@case()
async def a_requeued_job_may_die_again(t: Twin) -> None:
    dead = await _dead(t, max_attempts=2)
    await t.requeue(dead.id)
    held = await t.lease(lease=5)
    t.advance(5)
    held = await t.lease(lease=5)
    assert held.stalls == 1
    t.advance(5)
    await t.reclaim()
    assert await t.state(dead.id) is JobState.DEAD


@case()
async def only_dead_jobs(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(3)], t.job(id="later", run_at_us=t.now + SECOND))
    done, held, cancelled = await t.reserve(3)
    await t.settle(ack(done))
    await t.enqueue(t.job(id="ready"))
    await t.cancel("ready")
    async with t.unchanged():
        answers = await t.requeue(done.id, held.id, cancelled.id, "later", "ready")
    assert [type(one) for one in answers] == [errors.JobNotDead] * 5


@case()
async def an_unknown_job_is_not_found(t: Twin) -> None:
    async with t.unchanged():
        assert [type(one) for one in await t.requeue("unknown")] == [errors.JobNotFound]


@case()
async def a_repeated_requeue_is_not_dead(t: Twin) -> None:
    dead = await _dead(t)
    assert await t.requeue(dead.id) == [JobState.READY]
    async with t.unchanged():
        assert [type(one) for one in await t.requeue(dead.id)] == [errors.JobNotDead]


@case()
async def the_same_id_twice_in_a_batch_is_requeued_once(t: Twin) -> None:
    dead = await _dead(t)
    answers = await t.requeue(dead.id, dead.id)
    assert answers[0] is JobState.READY
    assert type(answers[1]) is errors.JobNotDead


@case()
async def blocked_where_its_key_is_inflight(t: Twin) -> None:
    dead = await _dead(t, key="k")
    held = await t.lease(t.job(key="k"))
    assert await t.requeue(dead.id) == [JobState.BLOCKED]
    assert await t.state(dead.id) is JobState.BLOCKED
    assert (await t.last_row(dead.id)).state is JobState.BLOCKED
    await t.settle(ack(held))
    assert (await t.lease()).id == dead.id


@case()
async def refused_where_its_key_waits(t: Twin) -> None:
    dead = await _dead(t, key="k")
    await t.enqueue(t.job(key="k"))
    async with t.unchanged():
        (error,) = await t.requeue(dead.id)
    assert type(error) is errors.KeyConflict


@case()
async def refused_where_its_key_is_scheduled(t: Twin) -> None:
    dead = await _dead(t, key="k")
    await t.enqueue(t.job(key="k", run_at_us=t.now + SECOND))
    async with t.unchanged():
        assert [type(one) for one in await t.requeue(dead.id)] == [errors.KeyConflict]


@case()
async def refused_where_its_key_is_inflight_and_blocked(t: Twin) -> None:
    dead = await _dead(t, key="k")
    await t.lease(t.job(key="k"))
    await t.enqueue(t.job(key="k"))
    async with t.unchanged():
        assert [type(one) for one in await t.requeue(dead.id)] == [errors.KeyConflict]


@case()
async def two_dead_jobs_of_a_key_cannot_both_come_back(t: Twin) -> None:
    one, two = await _dead(t, key="k"), await _dead(t, key="k")
    answers = await t.requeue(one.id, two.id)
    assert answers[0] is JobState.READY
    assert type(answers[1]) is errors.KeyConflict


@case()
async def the_same_key_in_another_queue_is_no_conflict(t: Twin) -> None:
    dead = await _dead(t, key="k")
    await t.enqueue(t.job(key="k", queue="other"))
    assert await t.requeue(dead.id) == [JobState.READY]


@case()
async def totals_stay(t: Twin) -> None:
    """Jobs that ever died stay counted; the count per state is of now."""
    dead = await _dead(t)
    await t.requeue(dead.id)
    stats = await t.stats()
    assert (stats.dead_total, stats.counts[JobState.DEAD], stats.counts[JobState.READY]) == (1, 0, 1)
