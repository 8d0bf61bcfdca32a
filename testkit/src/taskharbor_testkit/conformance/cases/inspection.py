"""Reading: get, listings with filters and cursors, statistics, and the attempt log."""

from __future__ import annotations

from typing import Any

from taskharbor.clock import SystemClock
from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.jobs import SECOND, JobState
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.snapshot import list_all, read_log
from taskharbor_testkit.conformance.twin import BOOM, SETTLEMENTS, START, Twin, ack, fail, release, retry


async def get_answers_in_the_given_order(t: Twin) -> None:
    first, _, last = await t.add_many(3)
    found = await t.driver.get([last.id, "unknown", first.id, last.id], now=t.now)
    assert [job and job.id for job in found] == [last.id, None, first.id, last.id]


async def a_scheduled_job_whose_time_has_come_reads_as_ready(t: Twin) -> None:
    """In get, in listings and filters, and in the counts; no sweep is needed."""
    job = await t.add(run_at_us=t.now + SECOND)
    t.now += SECOND - 1
    await t.shows(job, state="scheduled")
    t.now += 1
    await t.shows(job, state="ready")
    for state, wanted in ((JobState.READY, {job.id}), (JobState.SCHEDULED, set[str]())):
        assert await _listed(t, states=frozenset({state})) == wanted
        assert (await t.stats()).counts[state] == len(wanted)


async def pages_neither_repeat_nor_skip(t: Twin) -> None:
    """The newest accepted job comes first, whatever run_at, priority or id say."""
    jobs = [t.job(id=f"id-{n * 7 % 23}", priority=n % 3, run_at_us=t.now - n) for n in range(23)]
    await t.enqueue(*jobs)
    for limit in (1, 5, 22, 23, 24):
        listed = await list_all(t.driver, JobFilter(), t.now, limit=limit)
        assert [job.id for job in listed] == [job.id for job in reversed(jobs)]
        page = await t.driver.list_jobs(JobFilter(), now=t.now, limit=limit)
        assert (len(page.jobs), page.cursor is None) == (min(limit, 23), limit >= 23)
        assert await list_all(t.driver, JobFilter(until=page.cursor), t.now, 4) == listed[: len(page.jobs)]


async def the_unknown_reads_as_empty(t: Twin) -> None:
    """A question about an unknown queue or job does not make it known."""
    empty = await t.driver.list_jobs(JobFilter(queue="none"), now=t.now)
    assert (empty.jobs, empty.cursor) == ([], None)
    assert await t.driver.get([], now=t.now) == []
    assert await t.driver.job_attempts("none") == []
    stats = await t.stats("none")
    assert stats.counts == dict.fromkeys(JobState, 0)
    assert (stats.queue, stats.settings) == ("none", QueueSettings())
    assert await t.driver.stats(now=t.now) == []


async def a_page_is_not_disturbed_by_what_comes_and_goes(t: Twin) -> None:
    """A job that stood still between calls is neither repeated nor skipped."""
    jobs = await t.add_many(8)
    page = await t.driver.list_jobs(JobFilter(), now=t.now, limit=3)
    await t.add_many(2)
    held = await t.reserve(2)
    await t.settle(*map(ack, held))
    await t.purge()
    seen = [job.id for job in page.jobs]
    while page.cursor is not None:
        page = await t.driver.list_jobs(JobFilter(), now=t.now, limit=3, cursor=page.cursor)
        seen += [job.id for job in page.jobs]
    stood_still = [job.id for job in reversed(jobs) if job.id not in {one.id for one in held}]
    assert [job_id for job_id in seen if job_id in stood_still] == stood_still
    assert len(set(seen)) == len(seen)


async def a_page_goes_on_although_the_cursors_job_has_left_the_listing(t: Twin) -> None:
    """It no longer matches, or it is gone. A cursor works on any handle."""
    jobs, other = await t.add_many(6), await t.store.connect()
    ready = JobFilter(states=frozenset({JobState.READY}))
    page = await t.driver.list_jobs(ready, now=t.now, limit=2)
    await t.cancel(page.jobs[-1].id)
    for _ in range(2):
        rest = await list_all(other, ready, t.now, 2, page.cursor)
        assert [job.id for job in rest] == [job.id for job in jobs[3::-1]]
        await t.purge()


async def _one_of_each(t: Twin) -> None:
    """One job in every state, its id being the state's name, and one more in another queue."""
    await t.enqueue(*[t.job(id=name, type=name) for name in ("done", "dead", "cancelled")])
    for end in ("ack", "fail", "discard"):
        await t.settle(SETTLEMENTS[end](await t.lease()))
        t.advance(1)
    await t.lease(t.job(id="inflight", key="k"), worker="w9")
    await t.add(id="blocked", key="k")
    await t.add(id="scheduled", run_at_us=t.now + SECOND)
    await t.add(id="ready")
    await t.lease(t.job(id="elsewhere", queue="other", type="done", key="k"), queue="other")


async def _listed(t: Twin, **selection: Any) -> set[str]:
    wanted = JobFilter(**selection)
    listed = await list_all(t.driver, wanted, t.now, limit=2)
    assert [job.id for job in listed] == [job.id for job in t.model.listing(wanted, now=t.now)]
    return {job.id for job in listed}


@parametrised
async def _filters(t: Twin, *wanted: tuple[dict[str, Any], str]) -> None:
    """Each of these filters lists these jobs."""
    await _one_of_each(t)
    for selection, ids in wanted:
        assert await _listed(t, **selection) == set(ids.split())


_filters(
    "filters_restrict_one_by_one",
    ({"queue": "other"}, "elsewhere"),
    ({"types": frozenset({"done", "dead"})}, "done dead elsewhere"),
    ({"key": "k"}, "inflight blocked elsewhere"),
    ({"worker": "w9"}, "inflight"),
    ({"queue": "none"}, ""),
)
_filters(
    "filters_by_state",
    *(({"queue": "q", "states": frozenset({state})}, state.value) for state in JobState),
    ({"states": frozenset(JobState)}, " ".join([*JobState, "elsewhere"])),
)
_filters(
    "filters_by_end",
    ({"finished_before_us": START + SECOND}, "done"),
    ({"finished_before_us": START + SECOND + 1}, "done dead"),
    ({"finished_before_us": START + 9 * SECOND}, "done dead cancelled"),
)
_filters(
    "filters_combine",
    ({"queue": "q", "key": "k", "states": frozenset({JobState.BLOCKED, JobState.READY})}, "blocked"),
    ({"queue": "q", "key": "k", "types": frozenset({"done"})}, ""),
)
_filters("empty_sets_match_nothing", ({"states": frozenset()}, ""), ({"types": frozenset()}, ""))


async def stats_name_every_queue_in_order(t: Twin) -> None:
    """Stats list queues with settings and queues that ever had a job."""
    await t.configure("b", paused=True)
    await t.enqueue(t.job(queue="c"), t.job(queue="a"))
    assert [stats.queue for stats in await t.driver.stats(now=t.now)] == ["a", "b", "c"]
    await t.cancel(*t.model.jobs)
    await t.purge()
    assert [stats.queue for stats in await t.driver.stats(now=t.now)] == ["a", "b", "c"]


async def the_head_is_the_job_claimed_next(t: Twin) -> None:
    """The claim order decides, not the oldest run_at."""
    assert (await t.stats()).head_run_at_us is None
    await t.add(run_at_us=t.now - 500)
    assert (await t.stats()).head_run_at_us == t.now - 500
    await t.add(run_at_us=t.now - 100, priority=5)
    assert (await t.stats()).head_run_at_us == t.now - 100
    held = await t.lease()
    assert (await t.stats()).head_run_at_us == t.now - 500
    await t.settle(release(held))
    assert (await t.stats()).head_run_at_us == t.now - 100


async def looking_changes_nothing(t: Twin) -> None:
    await _one_of_each(t)
    t.advance(3600)
    async with t.unchanged():
        await t.finish()


async def the_backend_tells_its_time(t: Twin) -> None:
    """Microseconds since the epoch, never going back between two calls."""
    first, second = await t.driver.time(), await t.driver.time()
    assert isinstance(first, int)
    assert first <= second
    assert abs(first - SystemClock().now()) < 1800 * SECOND, "not UTC, or not microseconds"


async def opening_and_closing_twice_is_harmless(t: Twin) -> None:
    other = await t.store.connect()
    await other.open()
    await t.enqueue(t.job(), by=other)
    await other.close()
    await other.close()
    assert len(await t.reserve()) == 1


# -- the attempt log: one row for every lease that ended and every job that ended without one ----------------------


async def _done(t: Twin) -> str:
    held = await t.lease(t.job())
    await t.settle(ack(held))
    return held.id


async def an_empty_log_has_a_cursor(t: Twin) -> None:
    """`cursor` resumes after the last row, on any handle, even when no row came."""
    page = await t.driver.read_attempts()
    assert page.attempts == []
    done, other = await _done(t), await t.store.connect()
    rest = await other.read_attempts(after=page.cursor)
    assert [row.job_id for row in rest.attempts] == [done]
    assert (await t.driver.read_attempts(after=rest.cursor)).attempts == []


async def a_row_tells_everything(t: Twin) -> None:
    fields: dict[str, Any] = {"type": "sms", "key": "k", "priority": 4}
    fields |= {"run_at_us": t.now - 7, "created_at_us": t.now - 9}
    held = await t.lease(t.job(payload=b"12345", **fields), worker="w5", lease=10)
    t.advance(3)
    held = await t.keep(held, lease=30)
    await t.settle(retry(held, t.now + SECOND))
    await t.logged(held, job_id=held.id, queue="q", fence=1, worker="w5", payload_size=5, **fields)
    await t.logged(held, reserved_at_us=held.reserved_at_us, lease_expires_at_us=held.expires_at_us)
    await t.logged(held, ended_at_us=t.now, outcome="retried", state="scheduled")
    await t.logged(held, error_type=BOOM.type, error_message=BOOM.message)


async def run_at_is_that_of_the_execution(t: Twin) -> None:
    """A snooze or a retry changes when the job is due next, not when it was due."""
    held = await t.lease(t.job())
    due = held.run_at_us
    await t.settle(release(held, t.now + SECOND))
    t.advance(1)
    await t.settle(ack(await t.lease()))
    assert [row.run_at_us for row in await t.rows(held.id)] == [due, due + SECOND]


async def one_jobs_rows_are_in_order(t: Twin) -> None:
    held = await t.lease(t.job(max_attempts=9), lease=5)
    await t.settle(retry(held, t.now))
    for _ in range(10):
        await t.settle(release(await t.lease()))
    await t.reserve(lease=5)
    t.advance(5)
    await t.settle(fail(await t.lease()))
    await t.requeue(held.id)
    await t.settle(ack(await t.lease()))
    rows = await t.rows(held.id)
    assert " ".join(row.outcome for row in rows) == f"retried {'released ' * 10}expired dead requeued done"
    assert [row.fence for row in rows] == [*range(1, 14), 13, 14]
    assert [row.seq for row in rows] == sorted({row.seq for row in rows})


async def log_pages_in_any_size_tell_the_same(t: Twin) -> None:
    """Rows come in the order of the calls."""
    held = (await t.hold(17))[::-1]
    for job in held:
        await t.settle(ack(job))
    for limit in (1, 4, 16, 17, 18):
        assert [row.job_id for row in (await read_log(t.driver, limit=limit)).attempts] == [
            job.id for job in held
        ]
        assert len((await t.driver.read_attempts(limit=limit)).attempts) <= limit


async def a_log_cursor_survives_retention(t: Twin) -> None:
    """A slow reader misses the rows that retention removed, and no other."""
    await t.configure(keep_attempts_us=SECOND)
    await _done(t)
    page = await t.driver.read_attempts()
    await _done(t)
    t.advance(2)
    await t.prune()
    late = await _done(t)
    rest = await t.driver.read_attempts(after=page.cursor)
    assert [row.job_id for row in rest.attempts] == [late]
