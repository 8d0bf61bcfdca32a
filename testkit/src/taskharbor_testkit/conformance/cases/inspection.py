"""Looking: get, listings with filters and cursors, statistics."""

from __future__ import annotations

from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.jobs import SECOND, JobState
from taskharbor_testkit.conformance.case import case
from taskharbor_testkit.conformance.snapshot import list_all
from taskharbor_testkit.conformance.twin import Twin, ack, discard, fail, release


@case()
async def get_answers_in_the_given_order(t: Twin) -> None:
    jobs = [t.job() for _ in range(3)]
    await t.enqueue(*jobs)
    asked = [jobs[2].id, "unknown", jobs[0].id, jobs[2].id]
    found = await t.driver.get(asked, now=t.now)
    assert [None if job is None else job.id for job in found] == [jobs[2].id, None, jobs[0].id, jobs[2].id]


@case()
async def get_of_nothing_is_nothing(t: Twin) -> None:
    assert await t.driver.get([], now=t.now) == []


@case()
async def a_scheduled_job_whose_time_has_come_reads_as_ready(t: Twin) -> None:
    """By get, in listings and filters, and in the counts: no sweep needed."""
    job = t.job(run_at_us=t.now + SECOND)
    await t.enqueue(job)
    t.now += SECOND - 1
    assert await t.state(job.id) is JobState.SCHEDULED
    t.now += 1
    assert await t.state(job.id) is JobState.READY
    for state, wanted in ((JobState.READY, [job.id]), (JobState.SCHEDULED, [])):
        listed = await list_all(t.driver, JobFilter(states=frozenset({state})), t.now)
        assert [one.id for one in listed] == wanted
        assert (await t.stats()).counts[state] == len(wanted)


@case()
async def newest_accepted_first(t: Twin) -> None:
    """Whatever run_at, priority or id say."""
    jobs = [t.job(id=f"id-{n * 7 % 5}", priority=n, run_at_us=t.now - n) for n in range(5)]
    for job in jobs:
        await t.enqueue(job)
    listed = await list_all(t.driver, JobFilter(), t.now)
    assert [job.id for job in listed] == [job.id for job in reversed(jobs)]


@case()
async def pages_neither_repeat_nor_skip(t: Twin) -> None:
    jobs = [t.job() for _ in range(23)]
    await t.enqueue(*jobs)
    for limit in (1, 5, 22, 23, 24):
        listed = await list_all(t.driver, JobFilter(), t.now, limit=limit)
        assert [job.id for job in listed] == [job.id for job in reversed(jobs)]


@case()
async def pages_hold_at_most_limit(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(10)])
    page = await t.driver.list_jobs(JobFilter(), now=t.now, limit=4)
    assert len(page.jobs) == 4
    assert page.cursor is not None


@case()
async def no_cursor_when_nothing_follows(t: Twin) -> None:
    await t.enqueue(t.job())
    page = await t.driver.list_jobs(JobFilter(), now=t.now, limit=10)
    assert page.cursor is None
    empty = await t.driver.list_jobs(JobFilter(queue="none"), now=t.now)
    assert (empty.jobs, empty.cursor) == ([], None)


@case()
async def a_page_is_not_disturbed_by_what_comes_and_goes(t: Twin) -> None:
    """What stood still between calls is neither repeated nor skipped."""
    jobs = [t.job() for _ in range(8)]
    await t.enqueue(*jobs)
    page = await t.driver.list_jobs(JobFilter(), now=t.now, limit=3)
    await t.enqueue(t.job(), t.job())
    held = await t.reserve(2)
    await t.settle(*[ack(job) for job in held])
    await t.purge()
    seen = [job.id for job in page.jobs]
    cursor = page.cursor
    while cursor is not None:
        page = await t.driver.list_jobs(JobFilter(), now=t.now, limit=3, cursor=cursor)
        seen += [job.id for job in page.jobs]
        cursor = page.cursor
    stood_still = [job.id for job in reversed(jobs) if job.id not in {one.id for one in held}]
    assert [job_id for job_id in seen if job_id in stood_still] == stood_still
    assert len(set(seen)) == len(seen)


@case()
async def a_cursor_works_on_any_handle(t: Twin) -> None:
    jobs = [t.job() for _ in range(6)]
    await t.enqueue(*jobs)
    page = await t.driver.list_jobs(JobFilter(), now=t.now, limit=3)
    other = await t.store.connect()
    rest = await other.list_jobs(JobFilter(), now=t.now, limit=3, cursor=page.cursor)
    assert [job.id for job in page.jobs + rest.jobs] == [job.id for job in reversed(jobs)]


async def _zoo(t: Twin) -> dict[str, str]:
    """One job in every state, with different queues, types, keys and workers; name -> id."""
    await t.enqueue(*[t.job(id=name, type=name) for name in ("done", "dead", "cancelled")])
    done, dead, cancelled = await t.reserve(3)
    await t.settle(ack(done))
    t.advance(1)
    await t.settle(fail(dead))
    t.advance(1)
    await t.settle(discard(cancelled))
    t.advance(1)
    await t.lease(t.job(id="inflight", key="k"), worker="w9")
    await t.enqueue(
        t.job(id="blocked", key="k"), t.job(id="scheduled", run_at_us=t.now + SECOND), t.job(id="ready")
    )
    await t.lease(t.job(id="elsewhere", queue="other", type="done", key="k"), queue="other")
    names = ("done", "dead", "cancelled", "inflight", "blocked", "scheduled", "ready", "elsewhere")
    return {name: name for name in names}


async def _listed(t: Twin, selection: JobFilter) -> set[str]:
    listed = await list_all(t.driver, selection, t.now, limit=2)
    assert [job.id for job in listed] == [job.id for job in t.model.listing(selection, now=t.now)]
    return {job.id for job in listed}


@case()
async def filters_restrict_one_by_one(t: Twin) -> None:
    await _zoo(t)
    assert await _listed(t, JobFilter(queue="other")) == {"elsewhere"}
    assert await _listed(t, JobFilter(types=frozenset({"done", "dead"}))) == {"done", "dead", "elsewhere"}
    assert await _listed(t, JobFilter(key="k")) == {"inflight", "blocked", "elsewhere"}
    assert await _listed(t, JobFilter(worker="w9")) == {"inflight"}
    assert await _listed(t, JobFilter(queue="none")) == set()


@case()
async def filters_by_state(t: Twin) -> None:
    zoo = await _zoo(t)
    for state in JobState:
        wanted = {state.value} | ({"elsewhere"} if state is JobState.INFLIGHT else set())
        assert await _listed(t, JobFilter(states=frozenset({state}))) == wanted
    assert await _listed(t, JobFilter(states=frozenset(JobState))) == set(zoo)


@case()
async def filters_by_end(t: Twin) -> None:
    """finished_before is exclusive, and only ended jobs have an end."""
    await _zoo(t)
    dead_at = (await t.get("dead")).finished_at_us
    assert dead_at is not None
    assert await _listed(t, JobFilter(finished_before_us=dead_at)) == {"done"}
    assert await _listed(t, JobFilter(finished_before_us=dead_at + 1)) == {"done", "dead"}
    assert await _listed(t, JobFilter(finished_before_us=t.now + 1)) == {"done", "dead", "cancelled"}


@case()
async def filters_combine(t: Twin) -> None:
    await _zoo(t)
    both = JobFilter(queue="q", key="k", states=frozenset({JobState.BLOCKED, JobState.READY}))
    assert await _listed(t, both) == {"blocked"}
    assert await _listed(t, JobFilter(queue="q", types=frozenset({"done"}), key="k")) == set()


@case()
async def empty_sets_match_nothing(t: Twin) -> None:
    """Only what is None does not restrict."""
    await _zoo(t)
    assert await _listed(t, JobFilter(states=frozenset())) == set()
    assert await _listed(t, JobFilter(types=frozenset())) == set()


@case()
async def stats_of_an_empty_store(t: Twin) -> None:
    assert await t.driver.stats(now=t.now) == []


@case()
async def stats_of_an_unknown_queue(t: Twin) -> None:
    """Just the one asked for, known or not; asking does not make it known."""
    stats = await t.stats("unknown")
    assert (stats.queue, stats.settings) == ("unknown", QueueSettings())
    assert stats.counts == dict.fromkeys(JobState, 0)
    assert await t.driver.stats(now=t.now) == []


@case()
async def stats_count_every_state(t: Twin) -> None:
    await _zoo(t)
    stats = await t.stats()
    assert stats.counts == dict.fromkeys(JobState, 1)
    assert (stats.done_total, stats.dead_total, stats.cancelled_total) == (1, 1, 1)


@case()
async def stats_name_every_queue_in_order(t: Twin) -> None:
    """Those with settings and those that ever had a job."""
    await t.configure("b", paused=True)
    await t.enqueue(t.job(queue="c"), t.job(queue="a"))
    assert [stats.queue for stats in await t.driver.stats(now=t.now)] == ["a", "b", "c"]
    await t.cancel(*t.model.jobs)
    await t.purge()
    assert [stats.queue for stats in await t.driver.stats(now=t.now)] == ["a", "b", "c"]


@case()
async def stats_carry_the_settings(t: Twin) -> None:
    await t.configure(max_inflight=3, failure_queue="f")
    assert (await t.stats()).settings == QueueSettings(max_inflight=3, failure_queue="f")


@case()
async def the_head_is_the_job_claimed_next(t: Twin) -> None:
    """By claim order, not by the oldest run_at."""
    assert (await t.stats()).head_run_at_us is None
    await t.enqueue(t.job(run_at_us=t.now - 500))
    assert (await t.stats()).head_run_at_us == t.now - 500
    await t.enqueue(t.job(run_at_us=t.now - 100, priority=5))
    assert (await t.stats()).head_run_at_us == t.now - 100
    (held,) = await t.reserve()
    assert (await t.stats()).head_run_at_us == t.now - 500
    await t.settle(release(held))
    assert (await t.stats()).head_run_at_us == t.now - 100


@case()
async def a_job_that_is_not_due_is_no_head(t: Twin) -> None:
    job = t.job(run_at_us=t.now + SECOND)
    await t.enqueue(job)
    assert (await t.stats()).head_run_at_us is None
    t.advance(3)
    assert (await t.stats()).head_run_at_us == job.run_at_us


@case()
async def totals_outlive_the_jobs(t: Twin) -> None:
    await t.enqueue(*[t.job() for _ in range(3)])
    a, b, c = await t.reserve(3)
    await t.settle(ack(a), fail(b), discard(c))
    assert await t.purge() == 3
    stats = await t.stats()
    assert (stats.done_total, stats.dead_total, stats.cancelled_total) == (1, 1, 1)
    assert sum(stats.counts.values()) == 0


@case()
async def looking_changes_nothing(t: Twin) -> None:
    await _zoo(t)
    t.advance(3600)
    async with t.unchanged():
        await t.driver.get(list(t.model.jobs), now=t.now)
        await t.driver.stats(now=t.now)
        await list_all(t.driver, JobFilter(), t.now)
        await t.driver.settings("q")
        await t.driver.read_attempts()


@case()
async def the_backend_tells_its_time(t: Twin) -> None:
    """Microseconds since the epoch, never going back between two calls."""
    first = await t.driver.time()
    second = await t.driver.time()
    assert isinstance(first, int)
    assert first <= second


@case()
async def opening_and_closing_twice_is_harmless(t: Twin) -> None:
    other = await t.store.connect()
    await other.open()
    await t.enqueue(t.job(), by=other)
    await other.close()
    await other.close()
    assert len(await t.reserve()) == 1
