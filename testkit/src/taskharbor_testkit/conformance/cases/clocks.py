"""Clocks: a caller reads its clock before its call takes effect, so calls take effect in another order than their
clocks were read. A lease that follows another in the store follows it in time; and no clock makes a job run early."""

from __future__ import annotations

from taskharbor import errors
from taskharbor.jobs import SECOND, JobState, Micros
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.invariants import check_no_overlap, most_at_once, spans
from taskharbor_testkit.conformance.snapshot import read_log
from taskharbor_testkit.conformance.twin import SETTLEMENTS, End, Twin, ack, beat

LAG: Micros = 3_000
"""Between reading the clock and taking effect: some milliseconds in production."""


@parametrised
async def _w_holds_after(t: Twin, end: End) -> None:
    """The log never shows more than W at once, whatever the clocks said."""
    await t.configure(max_inflight=1)
    await t.add_many(2)
    first = await t.lease()
    t.advance(1)
    await t.settle(end(first))
    second = await t.lease(now=t.now - LAG)
    assert (second.reserved_at_us, second.expires_at_us) == (t.now, t.now + 30 * SECOND)
    t.advance(1)
    await t.settle(ack(second))
    assert most_at_once(spans((await read_log(t.driver)).attempts, [])) == 1


@parametrised
async def _same_job_again_after(t: Twin, end: End) -> None:
    """Two leases of one job never overlap in the log, whatever the clocks said."""
    first = await t.lease(t.job())
    t.advance(1)
    await t.settle(end(first))
    second = await t.lease(now=t.now - LAG)
    assert (second.id, second.reserved_at_us) == (first.id, t.now)
    check_no_overlap(spans((await read_log(t.driver)).attempts, [second]))


@parametrised
async def _never_ends_before_it_began(t: Twin, end: End) -> None:
    """ended_at, and finished_at of a job that ended, is never before the lease's reserved_at."""
    await t.enqueue(t.job(key="k"), t.job())
    held = await t.reserve(2)
    assert await t.settle(*map(end, held), now=t.now - LAG) == [None, None]
    for job in held:
        await t.logged(job, ended_at_us=job.reserved_at_us, reserved_at_us=job.reserved_at_us)
        is_terminal = (await t.get(job.id)).state.is_terminal
        await t.shows(job, finished_at_us=job.reserved_at_us if is_terminal else None)


for _name, _end in SETTLEMENTS.items():
    _w_holds_after(f"w_holds_in_the_log_after_{_name}", _end)
    _never_ends_before_it_began(f"{_name}_never_ends_a_lease_before_it_began", _end)
for _name in ("release", "retry"):
    _same_job_again_after(f"a_job_leased_again_after_{_name}_begins_at_its_end", SETTLEMENTS[_name])


async def a_job_leased_again_after_a_reclaim_begins_at_its_expiry(t: Twin) -> None:
    """Not at the reclaimer's now: one whose clock is an hour ahead must not put the queue an hour ahead."""
    first = await t.lease(t.job(), lease=5)
    t.advance(6)
    assert await t.reclaim() == 1
    second = await t.lease(now=(first.expires_at_us or 0) - LAG)
    assert (second.id, second.reserved_at_us) == (first.id, first.expires_at_us)


async def an_end_by_another_reserve_counts(t: Twin) -> None:
    """A lease that a reserve ended, because it was over, held until its expiry."""
    await t.enqueue(t.job(max_attempts=1), t.job(), t.job())
    first = await t.lease(lease=5)
    t.advance(6)
    await t.reserve()
    third = await t.lease(now=(first.expires_at_us or 0) - LAG)
    assert third.reserved_at_us == first.expires_at_us


async def an_end_in_another_queue_holds_nothing_back(t: Twin) -> None:
    first = await t.lease(t.job(queue="other"), queue="other")
    await t.add()
    t.advance(1)
    await t.settle(ack(first))
    second = await t.lease(now=t.now - LAG)
    assert (second.reserved_at_us, second.expires_at_us) == (t.now - LAG, t.now - LAG + 30 * SECOND)


async def acks_of_several_queues_end_each_at_its_own_time(t: Twin) -> None:
    """One batch, settled with a now from before one of its leases began."""
    await t.enqueue(t.job(), t.job(queue="other"), t.job(), t.job(queue="other"))
    old = await t.lease()
    t.advance(1)
    young = await t.lease(queue="other")
    assert await t.settle(ack(old), ack(young), now=t.now - LAG) == [None, None]
    await t.logged(old, ended_at_us=t.now - LAG)
    await t.logged(young, ended_at_us=t.now)
    assert (await t.lease(now=t.now - SECOND)).reserved_at_us == t.now - LAG
    assert (await t.lease(queue="other", now=t.now - SECOND)).reserved_at_us == t.now


async def the_latest_end_counts_not_the_last(t: Twin) -> None:
    await t.add_many(3)
    one, two = await t.reserve(2)
    t.advance(1)
    await t.settle(ack(one))
    await t.settle(ack(two), now=t.now - LAG)
    assert (await t.lease(now=t.now - 2 * LAG)).reserved_at_us == t.now


async def what_ends_without_a_lease_holds_nothing_back(t: Twin) -> None:
    """Cancelled while waiting: no lease ended."""
    gone, _ = await t.add_many(2)
    t.advance(1)
    await t.cancel(gone.id)
    assert (await t.lease(now=t.now - LAG)).reserved_at_us == t.now - LAG


async def the_latest_end_outlives_its_job(t: Twin) -> None:
    """Retention may remove job and row; another handle still knows when the lease ended."""
    await t.configure(keep_done_us=0, keep_attempts_us=0)
    first = await t.lease(t.job())
    await t.add()
    t.advance(1)
    await t.settle(ack(first))
    t.now += 1
    assert await t.prune() == 2
    second = await t.lease(now=t.now - LAG, by=await t.store.connect())
    assert second.reserved_at_us == t.now - 1


# -- judged by the caller's clock ----------------------------------------------------------------------------


async def a_clock_ahead_makes_no_job_run_early(t: Twin) -> None:
    """A job that a reserve with a later now made ready, and left, is not due to the others yet."""
    first, later = t.job(priority=1), t.job(run_at_us=t.now + 10 * SECOND)
    await t.enqueue(first, later, t.job(run_at_us=t.now + 11 * SECOND, priority=2))
    start = t.now
    t.advance(12)
    assert len(await t.reserve(1)) == 1
    assert [job.id for job in await t.reserve(10, now=start)] == [first.id]
    assert (await t.lease()).id == later.id


async def an_enqueue_by_a_clock_ahead_makes_no_job_run_early(t: Twin) -> None:
    start = t.now
    t.advance(5)
    await t.add_many(3)
    low = await t.add(run_at_us=start, priority=-1)
    assert [job.id for job in await t.reserve(2, now=start)] == [low.id]
    assert (await t.stats()).counts[JobState.READY] == 3
    assert len(await t.reserve(10)) == 3


async def a_claim_by_type_asks_the_callers_clock_too(t: Twin) -> None:
    start = t.now
    t.advance(5)
    await t.enqueue(t.job(type="sms"), t.job(type="mail"))
    assert await t.reserve(10, types=["sms"], now=start) == []
    assert len(await t.reserve(10, types=["sms"])) == 1


async def a_late_end_makes_no_lease_expire_early(t: Twin) -> None:
    """Expiry is judged by the caller's now alone, however late other leases ended."""
    await t.add_many(2)
    long, short = await t.lease(lease=60), await t.lease(lease=10)
    start = t.now
    t.advance(30)
    await t.settle(ack(long))
    assert await t.reclaim(now=start + SECOND) == 0
    assert await t.settle(ack(short), now=start + SECOND) == [None]


async def an_earlier_now_still_counts_what_it_sees_as_valid(t: Twin) -> None:
    """W is judged by the caller's now: a lease that is over to others still takes its place."""
    await t.configure(max_inflight=1)
    await t.add_many(2)
    await t.reserve(lease=10)
    start = t.now
    t.advance(10)
    assert await t.reserve(now=start + SECOND) == []
    assert len(await t.reserve()) == 1


async def a_lease_begun_at_an_end_is_judged_by_its_own_expiry(t: Twin) -> None:
    """lease_for counts from reserved_at, and so does the last instant at which it may be settled."""
    await t.add_many(2)
    first = await t.lease()
    t.advance(1)
    await t.settle(ack(first))
    second = await t.lease(now=t.now - LAG, lease=5)
    assert second.expires_at_us == t.now + 5 * SECOND
    t.advance(5)
    await t.refuses(errors.LeaseExpired, ack(second))
    assert await t.settle(ack(second), now=t.now - 1) == [None]


async def a_late_heartbeat_takes_nothing_away(t: Twin) -> None:
    """Two heartbeats that overtake each other leave the later expiry. The late one is told of a cancel request, too."""
    held = await t.lease(t.job(), lease=10)
    await t.cancel(held.id)
    t.advance(5)
    held = await t.keep(held, lease=10)
    late = await t.keep(held, b"50%", lease=10, now=t.now - LAG)
    assert late.expires_at_us == held.expires_at_us == t.now + 10 * SECOND
    await t.shows(held, progress=b"50%")


async def a_batch_of_heartbeats_keeps_the_longer_of_each(t: Twin) -> None:
    await t.add_many(2)
    long, short = await t.lease(lease=60), await t.lease(lease=10)
    await t.extend(beat(long), beat(short), lease=30)
    await t.shows(long, expires_at_us=t.now + 60 * SECOND)
    await t.shows(short, expires_at_us=t.now + 30 * SECOND)


async def what_is_not_due_yet_wakes_its_waiter_when_it_is(t: Twin) -> None:
    """A job that is ready to its producer but not to a worker is waited for like any scheduled one."""
    start = t.now
    t.now += LAG
    await t.add()
    told = await t.driver.wait(["q"], now=start, timeout=0)
    assert await t.reserve(now=start) == []
    assert (await t.driver.wait(["q"], now=start, timeout=5, seen=told.seen)).woken
    assert len(await t.reserve()) == 1
