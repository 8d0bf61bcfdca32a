"""Claiming: the lease, the claim order, and the jobs that reserve must never return."""

from __future__ import annotations

from taskharbor.drivers.contract import DAY
from taskharbor.jobs import SECOND, JobRecord
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.twin import START, Twin, ack, fail, release, retry


async def a_lease_carries_everything(t: Twin) -> None:
    """Inflight, with token, worker, reserved_at = now, expires_at = now + lease_for, and fence one higher."""
    held = await t.lease(t.job(), lease=86_400, worker="w7")
    assert held.token
    assert await t.get(held.id) == held
    expiry = t.now + DAY
    await t.shows(held, state="inflight", worker="w7", reserved_at_us=t.now, expires_at_us=expiry, fence=1)


async def at_most_limit_jobs(t: Twin) -> None:
    await t.add_many(5)
    assert [len(await t.reserve(limit)) for limit in (0, 3, 3, 3)] == [0, 3, 2, 0]


async def queue_names_are_exact(t: Twin) -> None:
    await t.enqueue(*[t.job(queue=name) for name in ("Q", "q ", "q%", "q:x", "other")])
    async with t.unchanged():
        assert await t.reserve(10) == await t.reserve(10, queue="never seen") == []
    assert len(await t.reserve(10, queue="q%")) == 1


async def due_at_run_at_exactly(t: Twin) -> None:
    """Scheduled jobs are promoted by reserve itself: no sweeper is needed."""
    job = await t.add(run_at_us=t.now + 10 * SECOND)
    t.now = job.run_at_us - 1
    assert await t.reserve() == []
    t.now += 1
    assert await _order(t) == [job.id]


async def types_restrict(t: Twin) -> None:
    mail, sms, push = t.job(type="mail"), t.job(type="sms"), t.job(type="push")
    await t.enqueue(mail, sms, push)
    assert await _order(t, types=["push", "mail"]) == _ids(mail, push)
    await t.shows(sms, state="ready")


async def types_do_not_count_against_the_limit(t: Twin) -> None:
    """A backlog of another type in front hides nothing."""
    await t.add_many(20, type="mail")
    wanted = await t.add(type="sms")
    assert await _order(t, 1, types=["sms"]) == [wanted.id]


async def no_types_match_nothing(t: Twin) -> None:
    await t.add()
    assert await t.reserve(10, types=[]) == []
    assert await t.reserve(10, types=["unknown"]) == []


async def types_promote_scheduled_jobs_too(t: Twin) -> None:
    job = t.job(type="sms", run_at_us=t.now + SECOND)
    await t.enqueue(job, t.job(type="mail", run_at_us=t.now + SECOND))
    t.advance(1)
    assert await _order(t, types=["sms"]) == [job.id]


async def the_fence_counts_every_lease(t: Twin) -> None:
    """Strictly increasing over releases, retries and expiries alike."""
    await t.settle(release(await t.lease(t.job(max_attempts=9))))
    held = await t.lease()
    await t.settle(retry(held, t.now))
    again = await t.lease(lease=5)
    t.advance(5)
    assert [held.fence, again.fence, (await t.lease()).fence] == [2, 3, 4]


async def an_expired_lease_is_reclaimed_on_the_way(t: Twin) -> None:
    """A dead worker's job is reservable as soon as its lease is over, with no sweep in between; not if it dies by that."""
    first = await t.lease(t.job(), lease=10, worker="dead")
    last = await t.lease(t.job(max_attempts=1), lease=10, worker="dead")
    t.advance(10)
    assert await _order(t) == [first.id]
    await t.shows(first, worker="w1", fence=2, stalls=1)
    await t.shows(last, state="dead")


async def reclaiming_on_the_way_ignores_the_types(t: Twin) -> None:
    """It keeps to the queue."""
    held = await t.lease(t.job(type="mail"), lease=10)
    other = await t.lease(t.job(queue="other"), queue="other", lease=10)
    t.advance(10)
    assert await t.reserve(types=["sms"]) == []
    assert await t.states(held, other) == "ready inflight"


# -- the claim order: priority descending, run_at, insertion -----------------------------------------------------


async def _order(t: Twin, limit: int = 100, types: list[str] | None = None) -> list[str]:
    return _ids(*await t.reserve(limit, types=types))


def _ids(*jobs: JobRecord) -> list[str]:
    return [job.id for job in jobs]


@parametrised
async def _ordered(t: Twin, /, wanted: str, **jobs: dict[str, int]) -> None:
    """These jobs, given by id and fields, are claimed in this order."""
    await t.enqueue(*[t.job(id=job_id, **fields) for job_id, fields in jobs.items()])
    assert " ".join(await _order(t)) == wanted


_ordered("higher_priority_first", "high usual low", low={"priority": -5}, usual={}, high={"priority": 32_767})
_ordered("then_run_at", "early late", late={"run_at_us": START - 1}, early={"run_at_us": START - 2})
_ordered("priority_beats_run_at", "urgent old", old={"run_at_us": START - 1000}, urgent={"priority": 1})
_ordered("then_insertion", "zebra apple mango banana", zebra={}, apple={}, mango={}, banana={})


async def insertion_holds_across_batches_and_handles(t: Twin) -> None:
    jobs = [t.job(id=f"id-{99 - n}") for n in range(12)]
    for n in range(0, 12, 3):
        await t.enqueue(*jobs[n : n + 3], by=await t.store.connect())
    assert await _order(t) == _ids(*jobs)


async def order_holds_over_several_reserves(t: Twin) -> None:
    """With several workers, on several handles."""
    jobs = [t.job(priority=n % 3) for n in range(12)]
    await t.enqueue(*jobs)
    handles = [await t.store.connect() for _ in range(3)] * 2
    taken = [job for n, by in enumerate(handles) for job in await t.reserve(2, worker=f"w{n}", by=by)]
    assert _ids(*taken) == _ids(*sorted(jobs, key=lambda job: -job.priority))


async def a_promoted_job_takes_the_place_of_its_priority_and_run_at(t: Twin) -> None:
    ready, scheduled = await t.add(), await t.add(run_at_us=t.now + 1)
    high = await t.add(run_at_us=t.now + SECOND, priority=1)
    t.advance(1)
    later = await t.add()
    assert await _order(t) == _ids(high, ready, scheduled, later)


async def types_keep_the_order(t: Twin) -> None:
    """Several types merge into one order; they are not taken type by type."""
    jobs = [t.job(type=kind, priority=n % 2) for n, kind in enumerate("abcabcab")]
    await t.enqueue(*jobs)
    wanted = sorted((job for job in jobs if job.type in "ac"), key=lambda job: -job.priority)
    assert await _order(t, types=["c", "a"]) == _ids(*wanted)


async def many_types_merge_however_unevenly(t: Twin) -> None:
    """Small and large claims, fewer and more types than jobs asked for, some types with most of the jobs and some with none."""
    jobs = [t.job(type=f"t{n * n % 7}", priority=n % 3, run_at_us=t.now - n * 37 % 11) for n in range(80)]
    await t.enqueue(*jobs)
    types = ["t4", "t2", "t1", *(f"none{n}" for n in range(20))]
    wanted = sorted((job for job in jobs if job.type != "t0"), key=lambda job: (-job.priority, job.run_at_us))
    taken = [job_id for limit in (1, 3, 15, 30, 80) for job_id in await _order(t, limit, types)]
    assert taken == _ids(*wanted)


async def a_retry_or_snooze_takes_the_place_of_its_new_run_at(t: Twin) -> None:
    first, second, third = await t.add_many(3)
    await t.settle(retry(await t.lease(), t.now + 1))
    await t.settle(release(await t.lease(), t.now + 2))
    t.advance(1)
    assert await _order(t) == _ids(third, first, second)


async def a_released_job_keeps_its_place(t: Twin) -> None:
    jobs = await t.add_many(4)
    held = await t.lease()
    t.advance(5)
    await t.settle(release(held))
    assert await _order(t) == _ids(*jobs)


async def a_reclaimed_job_keeps_its_place(t: Twin) -> None:
    """With reclaim and with reserve: a crash under a long backlog does not send the job to the back."""
    jobs = await t.add_many(14)
    await t.reserve(2, lease=10)
    t.advance(10)
    await t.reclaim()
    await t.reserve(12, lease=10)
    t.advance(10)
    assert await _order(t) == _ids(*jobs)


async def an_unblocked_job_takes_the_place_of_its_own_run_at(t: Twin) -> None:
    held = await t.lease(t.job(key="k"))
    blocked = await t.add(key="k", run_at_us=t.now + 1)
    before, after = await t.add(), await t.add(run_at_us=t.now + 2)
    await t.settle(ack(held))
    t.advance(1)
    assert await _order(t) == _ids(before, blocked, after)


async def a_requeued_job_is_due_now(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(fail(held))
    t.advance(1)
    before, after = await t.add(run_at_us=t.now - 1), await t.add(run_at_us=t.now + 1)
    await t.requeue(held.id)
    t.advance(1)
    assert await _order(t) == _ids(before, held, after)
