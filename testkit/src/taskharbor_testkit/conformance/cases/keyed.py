"""Keyed jobs: for a (queue, key) at most one waits and one is inflight; the rest is updating and merging."""

from __future__ import annotations

from taskharbor.drivers.contract import Enqueued
from taskharbor.jobs import SECOND, JobRecord, JobState, Outcome, UpdateFlags
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.twin import Twin, ack, discard, fail, release, retry


async def _inflight_and_blocked(t: Twin, **blocked: object) -> tuple[JobRecord, JobRecord]:
    held = await t.lease(t.job(key="k", payload=b"old"))
    job = t.job(key="k", **({"payload": b"new"} | blocked))
    assert await t.enqueue(job) == [Enqueued(job.id)]
    return held, job


@case()
async def a_key_waits_once(t: Twin) -> None:
    first, second = t.job(key="k"), t.job(key="k", payload=b"new")
    await t.enqueue(first)
    assert await t.enqueue(second) == [Enqueued(first.id, existed=True)]
    assert (await t.get(first.id)).payload == b"new"
    assert await t.driver.get([second.id], now=t.now) == [None]


@case()
async def a_key_waits_once_within_a_batch(t: Twin) -> None:
    first, second = t.job(key="k"), t.job(key="k", payload=b"new")
    assert await t.enqueue(first, second) == [Enqueued(first.id), Enqueued(first.id, existed=True)]


@case()
async def keys_are_per_queue(t: Twin) -> None:
    one, two = t.job(key="k"), t.job(key="k", queue="other")
    assert await t.enqueue(one, two) == [Enqueued(one.id), Enqueued(two.id)]


@case()
async def different_keys_do_not_meet(t: Twin) -> None:
    await t.enqueue(*[t.job(key=f"k{n}") for n in range(3)], t.job())
    assert len(await t.reserve(10)) == 4


@case()
async def an_ended_job_of_the_key_is_no_obstacle(t: Twin) -> None:
    await t.settle(ack(await t.lease(t.job(key="k"))))
    await t.settle(fail(await t.lease(t.job(key="k"))))
    await t.settle(discard(await t.lease(t.job(key="k"))))
    job = t.job(key="k")
    assert await t.enqueue(job) == [Enqueued(job.id)]
    assert await t.state(job.id) is JobState.READY


@case()
async def enqueue_while_inflight_is_blocked(t: Twin) -> None:
    _, blocked = await _inflight_and_blocked(t)
    assert await t.state(blocked.id) is JobState.BLOCKED
    assert (await t.stats()).counts[JobState.BLOCKED] == 1


@case()
async def enqueue_while_the_lease_is_over_is_blocked(t: Twin) -> None:
    """Inflight is inflight, valid lease or not, until somebody reclaims."""
    await t.lease(t.job(key="k"), lease=10)
    t.advance(60)
    job = t.job(key="k")
    await t.enqueue(job)
    assert await t.state(job.id) is JobState.BLOCKED


@case()
async def a_second_one_while_blocked_updates_the_blocked_one(t: Twin) -> None:
    _, blocked = await _inflight_and_blocked(t)
    assert await t.enqueue(t.job(key="k", payload=b"newer")) == [Enqueued(blocked.id, existed=True)]
    assert (await t.get(blocked.id)).payload == b"newer"


@case()
async def a_blocked_job_does_not_run_at_its_time(t: Twin) -> None:
    _, blocked = await _inflight_and_blocked(t, run_at_us=t.now + SECOND)
    t.advance(2)
    assert await t.reserve() == []
    assert await t.state(blocked.id) is JobState.BLOCKED


@case()
async def ack_unblocks(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t)
    await t.settle(ack(held))
    assert await t.state(blocked.id) is JobState.READY
    assert (await t.lease()).id == blocked.id


@case()
async def fail_unblocks(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t)
    await t.settle(fail(held))
    assert await t.state(blocked.id) is JobState.READY


@case()
async def discard_unblocks(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t)
    await t.settle(discard(held))
    assert await t.state(blocked.id) is JobState.READY


@case()
async def an_honoured_cancel_unblocks(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t)
    await t.cancel(held.id)
    await t.settle(retry(held, t.now))
    assert await t.state(held.id) is JobState.CANCELLED
    assert await t.state(blocked.id) is JobState.READY


@case()
async def death_by_stall_unblocks(t: Twin) -> None:
    await t.lease(t.job(key="k", max_attempts=1), lease=5)
    blocked = t.job(key="k")
    await t.enqueue(blocked)
    t.advance(5)
    assert (await t.lease()).id == blocked.id


@case()
async def an_unblocked_job_waits_for_its_own_run_at(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t, run_at_us=t.now + 9 * SECOND)
    await t.settle(ack(held))
    assert await t.state(blocked.id) is JobState.SCHEDULED
    t.advance(9)
    assert (await t.lease()).id == blocked.id


@case()
async def unblocking_keeps_to_key_and_queue(t: Twin) -> None:
    held, _ = await _inflight_and_blocked(t)
    other_key = await t.lease(t.job(key="k2"))
    blocked_key = t.job(key="k2")
    other_queue = await t.lease(t.job(key="k", queue="other"), queue="other")
    blocked_queue = t.job(key="k", queue="other")
    await t.enqueue(blocked_key, blocked_queue)
    await t.settle(ack(held))
    assert await t.state(blocked_key.id) is JobState.BLOCKED
    assert await t.state(blocked_queue.id) is JobState.BLOCKED
    await t.settle(ack(other_key), ack(other_queue))
    assert await t.state(blocked_key.id) is JobState.READY
    assert await t.state(blocked_queue.id) is JobState.READY


@case()
async def retry_absorbs_the_blocked_job(t: Twin) -> None:
    """The survivor gets what the flags say, the other reads as merged into it."""
    held, blocked = await _inflight_and_blocked(t)
    await t.settle(retry(held, t.now + SECOND))
    survivor, merged = await t.get(held.id), await t.get(blocked.id)
    assert (survivor.state, survivor.payload, survivor.attempts) == (JobState.SCHEDULED, b"new", 1)
    assert (merged.state, merged.merged_into, merged.finished_at_us) == (JobState.CANCELLED, held.id, t.now)
    assert (await t.last_row(blocked.id)).outcome is Outcome.MERGED
    assert (await t.stats()).cancelled_total == 1


@case()
async def release_absorbs_the_blocked_job(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t)
    await t.settle(release(held))
    assert (await t.get(held.id)).payload == b"new"
    assert (await t.get(blocked.id)).merged_into == held.id


@case()
async def a_stall_absorbs_the_blocked_job(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t)
    t.advance(30)
    assert await t.reclaim() == 1
    assert (await t.get(held.id)).payload == b"new"
    assert (await t.get(blocked.id)).merged_into == held.id


@case()
async def a_stall_seen_by_reserve_absorbs_and_leases_what_it_became(t: Twin) -> None:
    held, _ = await _inflight_and_blocked(t, type="sms")
    t.advance(30)
    again = await t.lease(types=["sms"])
    assert (again.id, again.payload, again.stalls) == (held.id, b"new", 1)


@case()
async def a_merge_may_send_the_survivor_to_later(t: Twin) -> None:
    held, _ = await _inflight_and_blocked(t, run_at_us=t.now + 60 * SECOND, update=UpdateFlags(run_at="yes"))
    await t.settle(release(held))
    assert await t.state(held.id) is JobState.SCHEDULED
    assert await t.reserve() == []
    t.advance(60)
    assert (await t.lease()).id == held.id


@case()
async def a_merge_may_bring_the_survivor_forward(t: Twin) -> None:
    held, _ = await _inflight_and_blocked(t, update=UpdateFlags(run_at="earlier"))
    await t.settle(retry(held, t.now + 60 * SECOND))
    assert await t.state(held.id) is JobState.READY


@case()
async def a_merge_may_reset_the_counts_of_this_very_failure(t: Twin) -> None:
    """The survivor changes by its own end first, then by the flags."""
    held, _ = await _inflight_and_blocked(t, update=UpdateFlags(reset_counts=True))
    await t.settle(retry(held, t.now))
    job = await t.get(held.id)
    assert (job.attempts, job.stalls) == (0, 0)
    assert job.last_error


@case()
async def the_row_of_the_end_tells_of_the_job_that_ran(t: Twin) -> None:
    """Type and payload size in the log are those of the execution, not of what was merged in after it."""
    held, _ = await _inflight_and_blocked(t, type="sms", payload=b"a much longer payload")
    await t.settle(retry(held, t.now))
    row = await t.last_row(held.id)
    assert (row.type, row.payload_size) == ("mail", 3)


@case()
async def a_survivor_that_merged_is_one_job(t: Twin) -> None:
    """After the merge the key waits once more: the next enqueue updates the survivor."""
    held, blocked = await _inflight_and_blocked(t)
    await t.settle(release(held))
    assert await t.enqueue(t.job(key="k", payload=b"third")) == [Enqueued(held.id, existed=True)]
    assert [job.id for job in await t.reserve(10)] == [held.id]
    assert await t.state(blocked.id) is JobState.CANCELLED


@case()
async def cancelling_the_blocked_one_leaves_the_inflight_one(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t)
    assert await t.cancel(blocked.id) == [JobState.CANCELLED]
    await t.settle(retry(held, t.now))
    survivor = await t.get(held.id)
    assert (survivor.payload, survivor.cancel_requested) == (b"old", False)
    assert (await t.get(blocked.id)).merged_into is None


@case()
async def after_cancelling_the_blocked_one_the_key_may_block_again(t: Twin) -> None:
    held, blocked = await _inflight_and_blocked(t)
    await t.cancel(blocked.id)
    third = t.job(key="k")
    assert await t.enqueue(third) == [Enqueued(third.id)]
    assert await t.state(third.id) is JobState.BLOCKED
    await t.settle(ack(held))
    assert await t.state(third.id) is JobState.READY


@case()
async def updating_a_scheduled_job_may_make_it_ready(t: Twin) -> None:
    job = t.job(key="k", run_at_us=t.now + 60 * SECOND)
    await t.enqueue(job)
    await t.enqueue(t.job(key="k", update=UpdateFlags(run_at="yes")))
    assert await t.state(job.id) is JobState.READY
    assert (await t.lease()).id == job.id


@case()
async def updating_a_ready_job_may_schedule_it(t: Twin) -> None:
    job = t.job(key="k")
    await t.enqueue(job)
    await t.enqueue(t.job(key="k", run_at_us=t.now + SECOND, update=UpdateFlags(run_at="later")))
    assert await t.state(job.id) is JobState.SCHEDULED
    assert await t.reserve() == []


@case()
async def an_update_leaves_who_the_job_is(t: Twin) -> None:
    """Whatever the flags: id, priority, created_at, place of insertion and idempotency key stay."""
    job, behind = t.job(key="k", priority=3, idempotency_key="i"), t.job(priority=3)
    await t.enqueue(job, behind)
    t.advance(1)
    flags = UpdateFlags(payload=True, retry=True, reset_counts=True)
    await t.enqueue(t.job(key="k", priority=9, idempotency_key="j", update=flags, type="sms"))
    stored = await t.get(job.id)
    assert (stored.priority, stored.created_at_us, stored.idempotency_key) == (3, job.created_at_us, "i")
    assert [held.id for held in await t.reserve(2)] == [job.id, behind.id]


@case()
async def an_update_may_change_the_type_it_is_claimed_by(t: Twin) -> None:
    job = t.job(key="k", type="mail")
    await t.enqueue(job)
    await t.enqueue(t.job(key="k", type="sms"))
    assert await t.reserve(types=["mail"]) == []
    assert (await t.lease(types=["sms"])).id == job.id


@case()
async def never_two_inflight_for_one_key(t: Twin) -> None:
    for n in range(6):
        await t.enqueue(t.job(key="k", payload=b"%d" % n))
        held = await t.reserve(10)
        assert len(held) <= 1
        if n % 2 and held:
            await t.settle(ack(held[0]))
