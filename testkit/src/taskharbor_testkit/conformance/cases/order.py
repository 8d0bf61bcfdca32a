"""The claim order: priority descending, run_at, insertion; and who keeps a place when coming back."""

from __future__ import annotations

from taskharbor.jobs import SECOND, JobRecord
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.twin import Twin, ack, fail, release, retry


async def _order(t: Twin, limit: int = 100) -> list[str]:
    return [job.id for job in await t.reserve(limit)]


def _ids(*jobs: JobRecord) -> list[str]:
    return [job.id for job in jobs]


@case()
async def higher_priority_first(t: Twin) -> None:
    low, normal, high = t.job(priority=-5), t.job(), t.job(priority=32_767)
    await t.enqueue(low, normal, high)
    assert await _order(t) == _ids(high, normal, low)


@case()
async def then_run_at(t: Twin) -> None:
    late, early = t.job(run_at_us=t.now - 1), t.job(run_at_us=t.now - 2)
    await t.enqueue(late, early)
    assert await _order(t) == _ids(early, late)


@case()
async def priority_beats_run_at(t: Twin) -> None:
    old, urgent = t.job(run_at_us=t.now - 1000), t.job(priority=1)
    await t.enqueue(old, urgent)
    assert await _order(t) == _ids(urgent, old)


@case()
async def then_insertion(t: Twin) -> None:
    """FIFO at equal priority and run_at, whatever the ids look like."""
    jobs = [t.job(id=f"id-{name}") for name in ["zebra", "apple", "mango", "banana"]]
    for job in jobs:
        await t.enqueue(job)
    assert await _order(t) == _ids(*jobs)


@case()
async def insertion_holds_across_batches_and_handles(t: Twin) -> None:
    jobs = [t.job(id=f"id-{99 - n}") for n in range(12)]
    for n in range(0, 12, 3):
        await t.enqueue(*jobs[n : n + 3], by=await t.store.connect())
    assert await _order(t) == _ids(*jobs)


@case()
async def order_holds_over_several_reserves(t: Twin) -> None:
    jobs = [t.job(priority=n % 3) for n in range(12)]
    await t.enqueue(*jobs)
    taken: list[str] = []
    while found := await _order(t, limit=2):
        taken += found
    assert taken == _ids(*sorted(jobs, key=lambda job: -job.priority))


@case()
async def a_promoted_job_takes_the_place_of_its_run_at(t: Twin) -> None:
    scheduled = t.job(run_at_us=t.now + 1)
    await t.enqueue(scheduled)
    t.advance(1)
    await t.enqueue(t.job(id="later"))
    assert await _order(t) == [scheduled.id, "later"]


@case()
async def a_due_scheduled_job_of_high_priority_goes_first(t: Twin) -> None:
    scheduled, ready = t.job(run_at_us=t.now + SECOND, priority=1), t.job()
    await t.enqueue(ready, scheduled)
    t.advance(1)
    assert await _order(t, 1) == [scheduled.id]


@case()
async def types_keep_the_order(t: Twin) -> None:
    """Several types merge into one order; they are not taken type by type."""
    jobs = [t.job(type=kind, priority=n % 2) for n, kind in enumerate("abcabcab")]
    await t.enqueue(*jobs)
    wanted = sorted((job for job in jobs if job.type in "ac"), key=lambda job: -job.priority)
    assert [job.id for job in await t.reserve(100, types=["c", "a"])] == _ids(*wanted)


@case()
async def a_retry_takes_the_place_of_its_new_run_at(t: Twin) -> None:
    first, second = t.job(), t.job()
    await t.enqueue(first, second)
    (held,) = await t.reserve()
    await t.settle(retry(held, t.now + 1))
    t.advance(1)
    assert await _order(t) == _ids(second, first)


@case()
async def a_released_job_keeps_its_place(t: Twin) -> None:
    jobs = [t.job() for _ in range(4)]
    await t.enqueue(*jobs)
    (held,) = await t.reserve()
    t.advance(5)
    await t.settle(release(held))
    assert await _order(t) == _ids(*jobs)


@case()
async def a_snoozed_job_takes_the_place_of_its_new_run_at(t: Twin) -> None:
    first, second = t.job(), t.job()
    await t.enqueue(first, second)
    (held,) = await t.reserve()
    await t.settle(release(held, t.now + 5))
    t.advance(5)
    assert await _order(t) == _ids(second, first)


@case()
async def a_reclaimed_job_keeps_its_place(t: Twin) -> None:
    """A crash under a long backlog does not send the job to the back."""
    jobs = [t.job() for _ in range(6)]
    await t.enqueue(*jobs)
    await t.reserve(2, lease=10)
    t.advance(10)
    await t.reclaim()
    assert await _order(t) == _ids(*jobs)


@case()
async def a_job_reclaimed_by_reserve_keeps_its_place(t: Twin) -> None:
    jobs = [t.job() for _ in range(6)]
    await t.enqueue(*jobs)
    await t.reserve(2, lease=10)
    t.advance(10)
    assert await _order(t) == _ids(*jobs)


@case()
async def an_unblocked_job_takes_the_place_of_its_own_run_at(t: Twin) -> None:
    held = await t.lease(t.job(key="k"))
    blocked = t.job(key="k", run_at_us=t.now + 1)
    await t.enqueue(blocked)
    await t.enqueue(t.job(id="before", run_at_us=t.now), t.job(id="after", run_at_us=t.now + 2))
    await t.settle(ack(held))
    t.advance(1)
    assert await _order(t) == ["before", blocked.id, "after"]


@case()
async def a_requeued_job_is_due_now(t: Twin) -> None:
    held = await t.lease(t.job())
    await t.settle(fail(held))
    t.advance(1)
    await t.enqueue(t.job(id="before", run_at_us=t.now - 1), t.job(id="after", run_at_us=t.now + 1))
    await t.requeue(held.id)
    t.advance(1)
    assert await _order(t) == ["before", held.id, "after"]
