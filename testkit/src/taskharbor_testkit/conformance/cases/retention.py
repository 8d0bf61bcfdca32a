"""Removing: purge by filter, prune by age; never a job that has not ended."""

from __future__ import annotations

from taskharbor.drivers.contract import DAY, JobFilter
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor_testkit.conformance.twin import Twin, ack, discard, fail, release


async def _ended(t: Twin, queue: str = "q") -> list[JobRecord]:
    """A done, a dead and a cancelled job."""
    a, b, c = jobs = await t.hold(3, queue=queue)
    await t.settle(ack(a), fail(b), discard(c))
    return jobs


async def _unended(t: Twin) -> None:
    """An inflight, a blocked, a ready and a scheduled job."""
    await t.lease(t.job(key="k"))
    await t.enqueue(t.job(key="k"), t.job(), t.job(run_at_us=t.now + SECOND))


async def _gone(t: Twin, *jobs: JobRecord) -> list[bool]:
    return [job is None for job in await t.driver.get([job.id for job in jobs], now=t.now)]


async def purge_removes_only_ended_jobs(t: Twin) -> None:
    """Never others, whatever the filter says."""
    ended = await _ended(t)
    await _unended(t)
    assert await t.purge(states=frozenset(JobState)) == 3
    assert all(await _gone(t, *ended))
    assert sum((await t.stats()).counts.values()) == 4


async def purge_honours_every_filter(t: Twin) -> None:
    """Not `until`, which is for listings."""
    here, there = await _ended(t), await _ended(t, "other")
    until = (await t.driver.list_jobs(JobFilter(), now=t.now, limit=1)).cursor
    t.advance(10)
    await t.settle(ack(await t.lease(t.job(type="sms", key="k"))))
    assert await t.purge(queue="other", states=frozenset({JobState.DEAD})) == 1
    assert await t.purge(types=frozenset({"sms"}), finished_before_us=t.now) == 0
    assert await t.purge(worker="w1") == 0, "the worker is part of the lease, and an ended job has none"
    assert await t.purge(key="k") == 1
    assert await t.purge(finished_before_us=t.now, until=until) == 5
    assert all(await _gone(t, *here, *there))


async def purge_removes_at_most_limit(t: Twin) -> None:
    """A job that does not match the filter stays and does not count."""
    await _ended(t)
    await _ended(t)
    assert [await t.purge(limit=1, states=frozenset({JobState.DEAD})) for _ in range(3)] == [1, 1, 0]
    assert [await t.purge(limit=limit) for limit in (0, 3, 3, 3)] == [0, 3, 1, 0]


async def purge_leaves_the_log(t: Twin) -> None:
    ended = await _ended(t)
    await t.purge()
    assert [len(await t.rows(job.id)) for job in ended] == [1, 1, 1]


async def a_purged_id_may_be_accepted_anew(t: Twin) -> None:
    job = t.job()
    await t.settle(ack(await t.lease(job)))
    await t.purge()
    await t.stores(t.job(id=job.id))


async def prune_by_default_keeps_a_week_and_ninety_days(t: Twin) -> None:
    """Queues nobody configured have the default retention."""
    ended = await _ended(t)
    t.now += 7 * DAY - 1
    async with t.unchanged():
        assert await t.prune() == 0
    t.now += 1
    assert await t.prune() == 2
    assert await _gone(t, *ended) == [True, False, True]
    t.now += 83 * DAY
    assert await t.prune() == 1 + 3


async def prune_keeps_for_ever_where_told(t: Twin) -> None:
    await t.configure(keep_done_us=None, keep_dead_us=None, keep_attempts_us=None)
    await _ended(t)
    t.now += 3650 * DAY
    async with t.unchanged():
        assert await t.prune() == 0


async def prune_applies_each_queue_its_own(t: Twin) -> None:
    await t.configure("short", keep_done_us=SECOND, keep_dead_us=SECOND)
    kept, gone = await _ended(t), await _ended(t, "short")
    t.advance(10)
    assert await t.prune() == 3
    assert await _gone(t, *kept, *gone) == [False] * 3 + [True] * 3


async def prune_of_the_log_is_apart(t: Twin) -> None:
    await t.configure(keep_attempts_us=SECOND)
    ended = await _ended(t)
    t.advance(2)
    assert await t.prune() == 3
    assert [await t.rows(job.id) for job in ended] == [[], [], []]
    assert await t.states(*ended) == "done dead cancelled"


async def prune_takes_log_rows_of_living_jobs_too(t: Twin) -> None:
    """Rows age by `ended_at`, whatever became of their job."""
    await t.configure(keep_attempts_us=SECOND)
    await t.lease(t.job(), lease=1)
    t.advance(1)
    held = await t.lease(lease=60)
    t.advance(2)
    assert await t.prune() == 1
    await t.shows(held, state="inflight")


async def prune_never_takes_what_has_not_ended(t: Twin) -> None:
    await t.configure(keep_done_us=0, keep_dead_us=0)
    await _unended(t)
    t.now += 3650 * DAY
    async with t.unchanged():
        assert await t.prune() == 0


async def prune_takes_at_most_limit_of_each(t: Twin) -> None:
    await t.configure(keep_done_us=0, keep_dead_us=0, keep_attempts_us=0)
    await _ended(t)
    await _ended(t)
    t.advance(1)
    assert [await t.prune(limit=limit) for limit in (0, 4, 4, 4)] == [0, 8, 4, 0]


async def a_requeued_job_is_not_pruned(t: Twin) -> None:
    _, dead, _ = await _ended(t)
    await t.requeue(dead.id)
    t.now += 3650 * DAY
    await t.prune()
    await t.shows(dead, state="ready")


async def merged_jobs_go_like_cancelled_ones(t: Twin) -> None:
    held = await t.lease(t.job(key="k"))
    merged = await t.add(key="k")
    await t.settle(release(held))
    t.now += 8 * DAY
    assert await t.prune() == 1
    assert await _gone(t, merged) == [True]
