"""Claiming: what a lease carries, what reserve promotes, and what it must never return."""

from __future__ import annotations

from taskharbor.jobs import SECOND, JobState
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.twin import QUEUE, Twin, ack, fail, release, retry


@case()
async def an_empty_queue_gives_nothing(t: Twin) -> None:
    async with t.unchanged():
        assert await t.reserve(10) == []
        assert await t.reserve(10, queue="never seen") == []


@case()
async def a_lease_carries_everything(t: Twin) -> None:
    """Inflight, with token, worker, reserved_at = now, expires_at = now + lease_for, and fence one higher."""
    job = t.job()
    held = await t.lease(job, lease=30, worker="w7")
    assert held.state is JobState.INFLIGHT
    assert held.token
    assert (held.worker, held.reserved_at_us, held.expires_at_us) == ("w7", t.now, t.now + 30 * SECOND)
    assert held.fence == 1
    assert await t.get(job.id) == held


@case()
async def at_most_limit_jobs(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(5)])
    assert len(await t.reserve(3)) == 3
    assert len(await t.reserve(3)) == 2
    assert await t.reserve(3) == []


@case()
async def a_valid_lease_is_not_granted_again(t: Twin) -> None:
    await t.lease(t.job(), lease=30)
    t.now += 30 * SECOND - 1
    assert await t.reserve() == []


@case()
async def only_from_the_queue_asked_for(t: Twin) -> None:
    await t.enqueue(t.job(queue="other"))
    assert await t.reserve() == []
    assert len(await t.reserve(queue="other")) == 1


@case()
async def queue_names_are_exact(t: Twin) -> None:
    await t.enqueue(t.job(queue="Q"), t.job(queue="q "), t.job(queue="q%"), t.job(queue="q:x"))
    assert await t.reserve(10) == []
    assert len(await t.reserve(10, queue="q%")) == 1


@case()
async def never_before_run_at(t: Twin) -> None:
    job = t.job(run_at_us=t.now + 10 * SECOND)
    await t.enqueue(job)
    t.now = job.run_at_us - 1
    assert await t.reserve() == []


@case()
async def due_at_run_at_exactly(t: Twin) -> None:
    """Scheduled jobs are promoted by reserve itself: no sweeper is needed."""
    job = t.job(run_at_us=t.now + 10 * SECOND)
    await t.enqueue(job)
    t.now = job.run_at_us
    assert [held.id for held in await t.reserve()] == [job.id]


@case()
async def types_restrict(t: Twin) -> None:
    mail, sms, push = t.job(type="mail"), t.job(type="sms"), t.job(type="push")
    await t.enqueue(mail, sms, push)
    assert [job.id for job in await t.reserve(10, types=["push", "mail"])] == [mail.id, push.id]
    assert await t.state(sms.id) is JobState.READY


@case()
async def types_do_not_count_against_the_limit(t: Twin) -> None:
    """A backlog of another type in front hides nothing."""
    wanted = t.job(type="sms")
    await t.enqueue(*[t.job(type="mail") for _ in range(20)], wanted)
    assert [job.id for job in await t.reserve(1, types=["sms"])] == [wanted.id]


@case()
async def no_types_match_nothing(t: Twin) -> None:
    await t.enqueue(t.job())
    assert await t.reserve(10, types=[]) == []
    assert await t.reserve(10, types=["unknown"]) == []


@case()
async def types_promote_scheduled_jobs_too(t: Twin) -> None:
    job = t.job(type="sms", run_at_us=t.now + SECOND)
    await t.enqueue(job, t.job(type="mail", run_at_us=t.now + SECOND))
    t.advance(1)
    assert [held.id for held in await t.reserve(10, types=["sms"])] == [job.id]


@case()
async def blocked_jobs_are_not_runnable(t: Twin) -> None:
    await t.lease(t.job(key="k"))
    await t.enqueue(t.job(key="k"))
    assert await t.reserve(10) == []


@case()
async def ended_jobs_are_not_runnable(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(3)])
    done, dead, cancelled = await t.reserve(3)
    await t.settle(ack(done), fail(dead))
    await t.cancel(cancelled.id)
    await t.settle(release(cancelled))
    assert await t.reserve(10) == []


@case()
async def the_fence_counts_every_lease(t: Twin) -> None:
    """Strictly increasing over releases, retries and expiries alike."""
    held = await t.lease(t.job(max_attempts=9))
    await t.settle(release(held))
    held = await t.lease()
    assert held.fence == 2
    await t.settle(retry(held, t.now))
    held = await t.lease(lease=5)
    assert held.fence == 3
    t.advance(5)
    assert (await t.lease()).fence == 4


@case()
async def every_lease_has_its_own_token(t: Twin) -> None:
    tokens = []
    held = await t.lease(t.job())
    for _ in range(5):
        tokens.append(held.token)
        await t.settle(release(held))
        held = await t.lease()
    assert len({*tokens, held.token}) == 6


@case()
async def an_expired_lease_is_reclaimed_on_the_way(t: Twin) -> None:
    """A dead worker's job is reservable as soon as its lease is over, with no sweep in between."""
    first = await t.lease(t.job(), lease=10, worker="dead")
    t.advance(10)
    second = await t.lease(worker="alive")
    assert (second.id, second.worker, second.fence, second.stalls) == (first.id, "alive", 2, 1)


@case()
async def reclaiming_on_the_way_ignores_the_types(t: Twin) -> None:
    held = await t.lease(t.job(type="mail"), lease=10)
    t.advance(10)
    assert await t.reserve(types=["sms"]) == []
    assert await t.state(held.id) is JobState.READY


@case()
async def reclaiming_on_the_way_keeps_to_the_queue(t: Twin) -> None:
    held = await t.lease(t.job(queue="other"), queue="other", lease=10)
    t.advance(10)
    assert await t.reserve(queue=QUEUE) == []
    assert await t.state(held.id) is JobState.INFLIGHT


@case()
async def a_job_that_dies_on_the_way_is_not_returned(t: Twin) -> None:
    held = await t.lease(t.job(max_attempts=1), lease=10)
    t.advance(10)
    assert await t.reserve() == []
    assert await t.state(held.id) is JobState.DEAD


@case()
async def several_workers_share_a_queue_without_overlap(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(30)])
    handles = [await t.store.connect() for _ in range(3)]
    taken = [
        job.id
        for n in range(5)
        for handle in handles
        for job in await t.reserve(2, worker=f"w{n}", by=handle)
    ]
    assert len(set(taken)) == len(taken) == 30
