"""Bulk calls: blobs that are no jobs, portions that are published once, a log and a listing that are cut into shares."""

from __future__ import annotations

from itertools import pairwise

from taskharbor.bulk.stage import pack
from taskharbor.drivers.contract import JobFilter, LogStream
from taskharbor.errors import InvalidRequest, JobError, JobNotFound
from taskharbor.jobs import Attempt, JobRecord, JobState
from taskharbor_testkit.conformance.twin import QUEUE, Twin


async def a_blob_is_read_as_it_was_put_until_it_is_dropped(t: Twin) -> None:
    driver = t.driver
    data = bytes(range(256)) * 300
    await driver.put_blob("staging/a/1", b"old")
    for name in ("staging/a/1", "staging/b/1", "staging/a/2"):
        await driver.put_blob(name, data)
    assert await driver.read_blobs(["staging/a/2", "nothing", "staging/a/1"]) == [data, None, data]
    assert await driver.list_blobs("staging/a") == ["staging/a/1", "staging/a/2"]
    assert await driver.list_blobs("staging") == ["staging/a/1", "staging/a/2", "staging/b/1"]
    await driver.drop_blobs(["staging/a/1", "nothing"])
    assert await driver.list_blobs("staging/a") == ["staging/a/2"]
    assert await driver.stats(now=t.now) == []


async def a_blob_is_swapped_only_where_it_holds_what_is_expected(t: Twin) -> None:
    driver = t.driver
    assert not await driver.swap_blob("record", b"1", expected=b"0")
    assert await driver.swap_blob("record", b"1", expected=None)
    assert not await driver.swap_blob("record", b"2", expected=None)
    assert not await driver.swap_blob("record", b"2", expected=b"0")
    assert await driver.swap_blob("record", b"2", expected=b"1")
    assert await driver.read_blobs(["record"]) == [b"2"]


async def a_portion_of_a_write_is_published_once(t: Twin) -> None:
    driver = t.driver
    first, second = [t.job(), t.job(key="k")], [t.job(key="k"), t.job(queue="other")]
    await driver.put_blob("staging/w/1", pack(first))
    await driver.put_blob("staging/w/2", pack(second))

    async def publish(names: list[str], number: int, portion: int) -> int:
        added = await driver.publish_blobs(names, series="s", number=number, portion=portion, now=t.now)
        return sum(added.values())

    async def ids() -> set[str]:
        return {job.id for job in (await driver.list_jobs(JobFilter(), now=t.now)).jobs}

    assert await publish(["staging/w/1"], 1, 1) == 2
    t.model.enqueue(first, now=t.now)
    assert await publish(["staging/w/1"], 1, 1) == 2
    assert await publish(["staging/w/2", "staging/w/lost"], 1, 2) == 3
    t.model.enqueue(second, now=t.now)
    expected = {first[0].id, first[1].id, second[1].id}
    assert await ids() == expected
    # Whoever finishes what another began publishes all portions again; keyed jobs whose ids nobody kept among them.
    assert await publish(["staging/w/1"], 1, 1) >= 2
    assert await publish(["staging/w/2"], 1, 2) == 3
    assert await publish(["staging/w/1"], 0, 5) == 0
    assert await ids() == expected
    third = t.job()
    await driver.put_blob("staging/w/3", pack([third]))
    assert await publish(["staging/w/3"], 2, 1) == 1
    t.model.enqueue([third], now=t.now)
    assert await ids() == expected | {third.id}


async def a_blob_that_holds_no_jobs_is_not_published(t: Twin) -> None:
    bad = t.job()
    bad.queue = ""
    for data in (b"nonsense", pack([bad])):
        await t.driver.put_blob("staging/w/1", data)
        try:
            await t.driver.publish_blobs(["staging/w/1"], series="s", number=1, portion=1, now=t.now)
        except InvalidRequest:
            continue
        raise AssertionError(f"{data!r} was published")
    assert await t.driver.stats(now=t.now) == []


async def _rows(t: Twin, one: LogStream, after: int, until: int, limit: int) -> list[Attempt]:
    rows: list[Attempt] = []
    while after < until:
        page = await t.driver.read_log(one.name, after=after, until=until, limit=limit)
        assert page.place > after
        rows += page.attempts
        after = page.place
    return rows


async def the_streams_hold_every_row_of_the_log_once_wherever_they_are_cut(t: Twin) -> None:
    driver = t.driver
    assert all(one.last == 0 for one in (await driver.log_streams()).streams)
    jobs = [t.job(queue=QUEUE if n % 3 else "other") for n in range(30)]
    for start in range(0, 30, 10):
        await t.enqueue(*jobs[start : start + 10])
        await t.cancel(*[job.id for job in jobs[start : start + 10]])
    every = sorted(one.seq for one in (await driver.read_attempts(limit=100)).attempts)
    assert len(every) == 30
    for limit in (1, 7, 100):
        streams = (await driver.log_streams()).streams
        seen = [row.seq for one in streams for row in await _rows(t, one, 0, one.last, limit)]
        assert sorted(seen) == every
    cut: list[int] = []
    for one in (await driver.log_streams()).streams:
        edges = await driver.split_log(one.name, after=0, until=one.last, rows=5)
        assert edges == sorted(edges)
        places = [0, *edges, one.last]
        for low, high in pairwise(places):
            cut += [row.seq for row in await _rows(t, one, low, high, 100)]
    assert sorted(cut) == every


async def shares_of_the_listing_hold_every_job_once(t: Twin) -> None:
    driver = t.driver
    jobs = [t.job(queue=QUEUE if n % 3 else "other") for n in range(30)]
    await t.enqueue(*jobs)
    for queue in (None, QUEUE, "other"):
        found: list[JobRecord] = []
        for share in await driver.split_jobs(queue=queue, parts=4):
            cursor = share.after
            while True:
                wanted = JobFilter(queue=share.queue or queue, until=share.until)
                page = await driver.list_jobs(wanted, now=t.now, limit=3, cursor=cursor)
                found += page.jobs
                cursor = page.cursor
                if cursor is None:
                    break
        expected = [job.id for job in jobs if queue in (None, job.queue)]
        assert sorted(job.id for job in found) == sorted(expected)


async def only_jobs_that_have_ended_are_removed_by_id(t: Twin) -> None:
    driver = t.driver
    ended, waiting = t.job(idempotency_key="i"), t.job()
    await t.enqueue(ended, waiting)
    await t.cancel(ended.id)
    answers = await t.call("remove", [ended.id, waiting.id, "nobody", ended.id])
    assert answers[0] == answers[3] == JobState.CANCELLED
    assert isinstance(answers[1], JobError)
    assert isinstance(answers[2], JobNotFound)
    assert await driver.get([ended.id], now=t.now) == [None]
    (again,) = await t.enqueue(t.job(idempotency_key="i"))
    assert not again.existed
