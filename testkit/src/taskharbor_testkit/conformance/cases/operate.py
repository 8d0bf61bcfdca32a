"""Operators' calls: cancel, at once while waiting and by request while inflight; requeue, the one way out of dead."""

from __future__ import annotations

from typing import Any

from taskharbor import errors
from taskharbor.jobs import SECOND, JobRecord
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.twin import BOOM, SETTLEMENTS, START, End, Twin, ack, fail, release, retry


@parametrised
async def _cancelled_at_once(t: Twin, delay: int) -> None:
    """A second cancel changes nothing."""
    job = await t.add(run_at_us=t.now + delay)
    t.now += SECOND
    assert await t.cancel(job.id) == ["cancelled"]
    await t.shows(job, state="cancelled", finished_at_us=t.now, cancel_requested=False)
    await t.logged(job, outcome="cancelled", state="cancelled", ended_at_us=t.now)
    await t.logged(job, worker=None, reserved_at_us=None, lease_expires_at_us=None)
    t.advance(1)
    async with t.unchanged():
        assert await t.cancel(job.id) == ["cancelled"]
        assert await t.reserve() == []


_cancelled_at_once("a_ready_job_is_cancelled_at_once", 0)
_cancelled_at_once("a_scheduled_job_is_cancelled_at_once", 2 * SECOND)


async def cancel_flags_an_inflight_job(t: Twin) -> None:
    """INFLIGHT is returned, the lease stands, a second request changes nothing, and the next heartbeat tells its holder."""
    held = await t.lease(t.job())
    assert await t.cancel(held.id) == ["inflight"]
    await t.shows(held, state="inflight", cancel_requested=True, token=held.token)
    async with t.unchanged():
        assert await t.cancel(held.id) == ["inflight"]
    assert (await t.keep(held)).cancel_requested


async def _requested(t: Twin) -> JobRecord:
    held = await t.lease(t.job())
    await t.cancel(held.id)
    return held


async def cancel_of_done_and_dead_is_finished(t: Twin) -> None:
    done, dead = await t.hold(2)
    await t.settle(ack(done), fail(dead))
    async with t.unchanged():
        assert [type(one) for one in await t.cancel(done.id, dead.id)] == [errors.JobFinished] * 2


@parametrised
async def _with_request(t: Twin, /, end: End, state: str, **wanted: Any) -> None:
    """A job with a cancel request is settled, and its record then has these values."""
    held = await _requested(t)
    assert await t.settle(end(held)) == [None]
    await t.shows(held, finished_at_us=START, cancel_requested=False, state=state, **wanted)
    await t.logged(held, state=state, outcome=state)


_FAILED = {"attempts": 1, "last_error": BOOM.text, "failed_at_us": START}
_with_request("a_cancel_request_turns_retry_into_cancelled", SETTLEMENTS["retry"], "cancelled", **_FAILED)
_with_request("a_cancel_request_turns_release_into_cancelled", release, "cancelled", attempts=0)
_with_request("ack_wins_over_a_cancel_request", lambda job: ack(job, b"1"), "done", result=b"1")
_with_request("fail_wins_over_a_cancel_request", fail, "dead", **_FAILED)
_with_request("discard_honours_a_cancel_request", SETTLEMENTS["discard"], "cancelled")


async def a_cancel_request_outlives_the_holder(t: Twin) -> None:
    """If the holder dies, the stall ends the job as cancelled, and nobody runs it again. The same holds if the request comes
    late."""
    early, late = await _requested(t), await t.lease(t.job())
    t.advance(30)
    assert await t.cancel(late.id) == ["inflight"]
    assert await t.reserve() == []
    for held in (early, late):
        await t.shows(held, state="cancelled", stalls=1, finished_at_us=t.now)
        await t.logged(held, outcome="expired", state="cancelled")


async def a_batch_of_cancels_answers_in_order(t: Twin) -> None:
    held = await t.lease(t.job())
    ready, scheduled = await t.add(), await t.add(run_at_us=t.now + SECOND)
    first, unknown, *rest = await t.cancel(scheduled.id, "unknown", held.id, ready.id, ready.id)
    assert type(unknown) is errors.JobNotFound
    assert [first, *rest] == ["cancelled", "inflight", "cancelled", "cancelled"]
    assert len(await t.rows(ready.id)) == 1


async def a_cancelled_retry_keeps_the_history(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(retry(held, t.now + SECOND))
    await t.cancel(held.id)
    await t.shows(held, state="cancelled", attempts=1, last_error=BOOM.text, fence=1)
    assert [row.outcome for row in await t.rows(held.id)] == ["retried", "cancelled"]


# -- requeue ---------------------------------------------------------------------------------------------------


async def _dead(t: Twin, **fields: object) -> JobRecord:
    await t.lease(t.job(**fields), lease=5)
    t.advance(5)
    held = await t.lease()
    await t.settle(fail(held, attempts=4))
    return held


async def _not_requeued(t: Twin, error: type, *job_ids: str) -> None:
    async with t.unchanged():
        assert [type(one) for one in await t.requeue(*job_ids)] == [error] * len(job_ids)


async def a_requeued_job_is_ready_and_due_now(t: Twin) -> None:
    """Attempts and stalls at zero, last_error kept, finished_at cleared, with a log row `requeued`."""
    dead, failed_at = await _dead(t), t.now
    t.advance(7)
    assert await t.requeue(dead.id) == ["ready"]
    await t.shows(dead, state="ready", run_at_us=t.now, attempts=0, stalls=0)
    await t.shows(dead, last_error=BOOM.text, failed_at_us=failed_at, finished_at_us=None)
    await t.logged(dead, outcome="requeued", state="ready", ended_at_us=t.now)
    await t.logged(dead, worker=None, reserved_at_us=None, lease_expires_at_us=None)


async def a_requeued_job_may_die_again(t: Twin) -> None:
    dead = await _dead(t, max_attempts=2)
    await t.requeue(dead.id)
    for stalls in (0, 1):
        held = await t.lease(lease=5)
        assert (held.stalls, held.fence) == (stalls, stalls + 3)
        t.advance(5)
    await t.reclaim()
    await t.shows(dead, state="dead")


async def only_dead_jobs_are_requeued(t: Twin) -> None:
    done, held, cancelled = await t.hold(3)
    await t.settle(ack(done), SETTLEMENTS["discard"](cancelled))
    ready, later = await t.add(), await t.add(run_at_us=t.now + SECOND)
    await _not_requeued(t, errors.JobNotDead, *[job.id for job in (done, held, cancelled, ready, later)])


async def a_batch_of_requeues_answers_in_order(t: Twin) -> None:
    dead = await _dead(t)
    first, second, unknown = await t.requeue(dead.id, dead.id, "unknown")
    assert (first, type(second), type(unknown)) == ("ready", errors.JobNotDead, errors.JobNotFound)


async def requeued_as_blocked_where_its_key_is_inflight(t: Twin) -> None:
    dead = await _dead(t, key="k")
    held = await t.lease(t.job(key="k"))
    assert await t.requeue(dead.id) == ["blocked"]
    await t.shows(dead, state="blocked")
    await t.logged(dead, state="blocked")
    await t.settle(ack(held))
    assert (await t.lease()).id == dead.id


async def requeue_refused_where_its_key_waits(t: Twin) -> None:
    """Scheduled, ready or blocked."""
    dead = await _dead(t, key="k")
    await t.add(key="k", run_at_us=t.now + SECOND)
    await _not_requeued(t, errors.KeyConflict, dead.id)
    t.advance(1)
    await _not_requeued(t, errors.KeyConflict, dead.id)
    await t.lease()
    await t.add(key="k")
    await _not_requeued(t, errors.KeyConflict, dead.id)


async def two_dead_jobs_of_a_key_cannot_both_come_back(t: Twin) -> None:
    one, two = await _dead(t, key="k"), await _dead(t, key="k")
    first, second = await t.requeue(one.id, two.id)
    assert (first, type(second)) == ("ready", errors.KeyConflict)


async def the_same_key_in_another_queue_is_no_conflict(t: Twin) -> None:
    dead = await _dead(t, key="k")
    await t.add(key="k", queue="other")
    assert await t.requeue(dead.id) == ["ready"]
