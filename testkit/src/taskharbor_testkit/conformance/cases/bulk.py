"""Bulk calls: blobs that are no jobs, portions that are published once, a log and a listing that are cut into shares."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from taskharbor.bulk.stage import pack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import JobFilter, LogStream
from taskharbor.errors import InvalidRequest, JobError, JobNotFound
from taskharbor.jobs import Attempt
from taskharbor_testkit.conformance.snapshot import list_all, read_log
from taskharbor_testkit.conformance.twin import QUEUE, Twin


async def a_blob_is_read_as_it_was_put_until_it_is_dropped(t: Twin) -> None:
    driver = t.driver
    data = bytes(range(256)) * 300
    await driver.put_blob("staging/a/1", b"old")
    for name in ("staging/a/1", "staging/b/1", "staging/a/2"):
        await driver.put_blob(name, data)
    assert await driver.read_blobs(["staging/a/2", "staging/nothing", "staging/a/1"]) == [data, None, data]
    assert await driver.list_blobs("staging/a") == ["staging/a/1", "staging/a/2"]
    assert await driver.list_blobs("staging") == ["staging/a/1", "staging/a/2", "staging/b/1"]
    await driver.drop_blobs(["staging/a/1", "staging/nothing"])
    assert await driver.list_blobs("staging/a") == ["staging/a/2"]
    assert await driver.stats(now=t.now) == []


async def a_blob_is_swapped_only_where_it_holds_what_is_expected(t: Twin) -> None:
    driver = t.driver
    assert not await driver.swap_blob("writes", b"1", expected=b"0")
    assert await driver.swap_blob("writes", b"1", expected=None)
    assert not await driver.swap_blob("writes", b"2", expected=None)
    assert not await driver.swap_blob("writes", b"2", expected=b"0")
    assert await driver.swap_blob("writes", b"2", expected=b"1")
    assert await driver.read_blobs(["writes"]) == [b"2"]


async def a_portion_of_a_write_is_published_once(t: Twin) -> None:
    blobs = {
        "staging/w/1": [t.job(), t.job(key="k")],
        "staging/w/2": [t.job(key="k"), t.job(queue="other")],
        "staging/w/3": [t.job()],
    }
    for name, jobs in blobs.items():
        await t.driver.put_blob(name, pack(jobs))
    # A process that finishes the write of another publishes all portions again.
    for number, portion, names, is_new, wanted in (
        (1, 1, ["staging/w/1"], True, {2}),
        (1, 1, ["staging/w/1"], False, {2}),
        (1, 2, ["staging/w/2", "staging/w/lost"], True, {3}),
        (1, 1, ["staging/w/1"], False, {2, 3}),
        (1, 2, ["staging/w/2"], False, {3}),
        (0, 5, ["staging/w/1"], False, {0}),
        (2, 1, ["staging/w/3"], True, {1}),
    ):
        added = await t.driver.publish_blobs(names, series="s", number=number, portion=portion, now=t.now)
        assert sum(added.values()) in wanted
        if is_new:
            t.model.enqueue(blobs[names[0]], now=t.now)
        listed = await list_all(t.driver, JobFilter(), t.now)
        assert {job.id for job in listed} == set(t.model.jobs)


async def a_blob_that_holds_no_jobs_is_not_published(t: Twin) -> None:
    for data in (b"nonsense", pack([t.job(queue="")])):
        await t.driver.put_blob("staging/w/1", data)
        async with t.unchanged():
            publish = t.driver.publish_blobs(["staging/w/1"], series="s", number=1, portion=1, now=t.now)
            (raised,) = await asyncio.gather(publish, return_exceptions=True)
        assert isinstance(raised, InvalidRequest), f"{data!r} was published"


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
    for _ in range(3):
        jobs = [t.job(queue=QUEUE if n % 3 else "other") for n in range(10)]
        await t.enqueue(*jobs)
        await t.cancel(*[job.id for job in jobs])
    every = sorted(row.seq for row in (await read_log(driver)).attempts)
    assert len(every) == 30
    streams = (await driver.log_streams()).streams
    for limit in (1, 7, 100):
        seen: list[int] = []
        for one in streams:
            edges = await driver.split_log(one.name, after=0, until=one.last, rows=5) if limit == 100 else []
            assert edges == sorted(edges)
            for after, until in pairwise([0, *edges, one.last]):
                seen += [row.seq for row in await _rows(t, one, after, until, limit)]
        assert sorted(seen) == every


async def shares_of_the_listing_hold_every_job_once(t: Twin) -> None:
    jobs = [t.job(queue=QUEUE if n % 3 else "other") for n in range(30)]
    await t.enqueue(*jobs)
    for queue in (None, QUEUE, "other"):
        found: list[str] = []
        for share in await t.driver.split_jobs(queue=queue, parts=4):
            wanted = JobFilter(queue=share.queue or queue, until=share.until)
            found += [job.id for job in await list_all(t.driver, wanted, t.now, 3, share.after)]
        assert sorted(found) == sorted(job.id for job in jobs if queue in (None, job.queue))


async def only_jobs_that_have_ended_are_removed_by_id(t: Twin) -> None:
    """An idempotency key that led to a removed job is forgotten with it."""
    ended, waiting = await t.add(idempotency_key="i"), await t.add()
    await t.cancel(ended.id)
    first, refused, unknown, again = await t.call(op.Remove([ended.id, waiting.id, "nobody", ended.id]))
    assert (first, type(refused), type(unknown), again) == ("cancelled", JobError, JobNotFound, "cancelled")
    await t.stores(t.job(idempotency_key="i"))
