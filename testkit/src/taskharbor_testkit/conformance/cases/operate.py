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


async def cancel_only_what_waits_leaves_the_inflight(t: Twin) -> None:
    """INFLIGHT is the answer for a marked job too, and its mark stays."""
    held, marked = await t.hold(2)
    ready, later = await t.add(), await t.add(run_at_us=t.now + SECOND)
    await t.cancel(marked.id)
    ids = [job.id for job in (held, marked, ready, later)]
    answers = await t.cancel(*ids, only_waiting=True)
    assert answers == ["inflight", "inflight", "cancelled", "cancelled"]
    await t.shows(held, state="inflight", cancel_requested=False)
    await t.shows(marked, state="inflight", cancel_requested=True)
    assert await t.settle(retry(held, t.now), retry(marked, t.now)) == [None, None]
    assert await t.states(held, marked) == "ready cancelled"
    unknown, finished = await t.cancel("unknown", (await _dead(t)).id, only_waiting=True)
    assert [type(unknown), type(finished)] == [errors.JobNotFound, errors.JobFinished]


# -- cancel by key ---------------------------------------------------------------------------------------------


async def _of_key(t: Twin) -> tuple[JobRecord, JobRecord]:
    """One job of the key `k` is inflight, one is blocked."""
    held = await t.lease(t.job(key="k"))
    return held, await t.add(key="k")


async def cancel_by_key_ends_the_waiting_and_marks_the_inflight(t: Twin) -> None:
    """A marked job counts again. The row of the log tells of the job that waited."""
    held, blocked = await _of_key(t)
    ready, later = await t.add(key="ready"), await t.add(key="löse", run_at_us=t.now + SECOND)
    others = [await t.add(), await t.add(key="other"), await t.add(key="k", queue="other")]
    assert await t.cancel_keys("k", "löse", "ready") == [2, 1, 1]
    assert await t.states(held, blocked, later, ready) == "inflight cancelled cancelled cancelled"
    assert await t.states(*others) == "ready ready ready"
    await t.shows(held, cancel_requested=True)
    await t.logged(blocked, outcome="cancelled", state="cancelled", ended_at_us=t.now)
    async with t.unchanged():
        assert await t.cancel_keys("k") == [1]
    await t.settle(release(held))
    await t.shows(held, state="cancelled")


async def cancel_by_key_finds_only_jobs_that_have_not_ended(t: Twin) -> None:
    """An unknown key, a key of another queue, a key whose jobs have all ended: 0. No queue comes into being."""
    await t.settle(ack(await t.lease(t.job(key="k"))))
    await t.cancel((await t.add(key="k")).id)
    await _dead(t, key="k")
    async with t.unchanged():
        assert await t.cancel_keys("k", "unknown") == [0, 0]
        assert await t.cancel_keys("k", queue="never seen") == [0]
    assert await t.cancel_keys() == []


async def a_key_that_is_named_twice_is_cancelled_once(t: Twin) -> None:
    """The second answer is that of a second call."""
    held, blocked = await _of_key(t)
    ready = await t.add(key="l")
    assert await t.cancel_keys("k", "l", "k", "l") == [2, 1, 1, 0]
    assert [len(await t.rows(job.id)) for job in (held, blocked, ready)] == [0, 1, 1]


async def cancel_by_key_only_what_waits_leaves_the_inflight(t: Twin) -> None:
    held, blocked = await _of_key(t)
    assert await t.cancel_keys("k", "k", only_waiting=True) == [1, 0]
    await t.shows(held, state="inflight", cancel_requested=False)
    await t.shows(blocked, state="cancelled")
    await t.settle(release(held))
    await t.shows(held, state="ready")


async def a_cancelled_key_is_free(t: Twin) -> None:
    """A new job of the key is blocked by the inflight one, and merged into nothing."""
    held, _ = await _of_key(t)
    await t.cancel_keys("k")
    new = t.job(key="k")
    await t.stores(new)
    await t.shows(new, state="blocked")
    await t.settle(SETTLEMENTS["retry"](held))
    assert await t.states(held, new) == "cancelled ready"


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


@parametrised
async def _requeued(t: Twin, delay: int | None, keep_counts: bool, state: str) -> None:
    """Due at its time, and behind what was due before it."""
    dead, failed_at = await _dead(t), t.now
    t.advance(7)
    run_at = None if delay is None else t.now + delay
    assert await t.requeue(dead.id, run_at=run_at, keep_counts=keep_counts) == [state]
    due = t.now if run_at is None else run_at
    attempts, stalls = (4, 1) if keep_counts else (0, 0)
    await t.shows(dead, state=state, run_at_us=due, attempts=attempts, stalls=stalls)
    await t.shows(dead, last_error=BOOM.text, failed_at_us=failed_at, finished_at_us=None)
    await t.logged(dead, outcome="requeued", state=state, ended_at_us=t.now)
    first = await t.add()
    t.now = max(t.now, due)
    held = [job.id for job in await t.reserve(2)]
    assert held == ([dead.id, first.id] if due < first.run_at_us or delay is None else [first.id, dead.id])


_requeued("a_job_requeued_at_a_time_is_scheduled", 5 * SECOND, False, "scheduled")
_requeued("a_job_requeued_at_a_time_in_the_past_is_ready_in_that_place", -5 * SECOND, False, "ready")
_requeued("a_job_may_be_requeued_with_its_counts", None, True, "ready")
_requeued("a_job_may_be_requeued_at_a_time_with_its_counts", 5 * SECOND, True, "scheduled")


async def a_job_requeued_with_its_counts_dies_by_its_next_stall(t: Twin) -> None:
    dead = await _dead(t, max_attempts=5)
    await t.requeue(dead.id, keep_counts=True)
    await t.lease(lease=5)
    t.advance(5)
    await t.reclaim()
    await t.shows(dead, state="dead", attempts=4, stalls=2)


async def a_job_requeued_as_blocked_keeps_its_time_and_counts(t: Twin) -> None:
    dead = await _dead(t, key="k")
    held = await t.lease(t.job(key="k"))
    later = t.now + 9 * SECOND
    assert await t.requeue(dead.id, run_at=later, keep_counts=True) == ["blocked"]
    await t.shows(dead, state="blocked", run_at_us=later, attempts=4, stalls=1)
    await t.settle(ack(held))
    await t.shows(dead, state="scheduled", run_at_us=later)
    t.advance(9)
    assert (await t.lease()).id == dead.id


async def a_time_and_counts_do_not_make_up_for_a_conflict(t: Twin) -> None:
    dead, waiting = await _dead(t, key="k"), await t.add(key="k")
    async with t.unchanged():
        answers = await t.requeue(dead.id, waiting.id, "unknown", run_at=t.now + SECOND, keep_counts=True)
    wanted = [errors.KeyConflict, errors.JobNotDead, errors.JobNotFound]
    assert [type(one) for one in answers] == wanted


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
