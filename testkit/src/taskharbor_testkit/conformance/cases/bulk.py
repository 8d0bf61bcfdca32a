"""Bulk calls: blobs that are no jobs, portions that are published once, a log and a listing that are cut into shares."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from taskharbor.bulk.stage import pack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import JobFilter, LogStream
from taskharbor.errors import InvalidRequest, JobError, JobNotFound
from taskharbor.jobs import SECOND, Attempt
from taskharbor_testkit.conformance.snapshot import list_all, read_log, same_answer
from taskharbor_testkit.conformance.twin import QUEUE, Twin


async def a_blob_is_read_as_it_was_put_until_it_is_dropped(t: Twin) -> None:
    """Also by another handle. A folder's name and a blob's name are not the beginning of another one's."""
    driver, other = t.driver, await t.store.connect()
    data = bytes(range(256)) * 300
    blobs = {"staging/a/1": data, "staging/a/12": b"", "staging/ab/1": data}
    await driver.put_blob("staging/a/1", b"old")
    for name in reversed(blobs):
        await driver.put_blob(name, blobs[name])
    assert await other.read_blobs(["staging/nothing", *blobs]) == [None, *blobs.values()]
    assert await other.list_blobs("staging/a") == ["staging/a/1", "staging/a/12"]
    assert await other.list_blobs("staging") == list(blobs)
    await driver.drop_blobs(["staging/a/1", "staging/nothing"])
    assert await other.list_blobs("staging") == ["staging/a/12", "staging/ab/1"]
    assert await driver.stats(now=t.now) == []


async def a_blob_is_swapped_only_where_it_holds_what_is_expected(t: Twin) -> None:
    """An empty blob is not a missing one, and of two who swap at once one succeeds."""
    driver, other = t.driver, await t.store.connect()
    assert not await driver.swap_blob("writes", b"1", expected=b"0")
    both = ((driver, b"1"), (other, b"2"))
    won = await asyncio.gather(*(one.swap_blob("writes", data, expected=None) for one, data in both))
    held = both[won.index(True)][1]
    assert (sorted(won), await other.read_blobs(["writes"])) == ([False, True], [held])
    assert not await driver.swap_blob("writes", b"3", expected=b"0")
    assert await other.swap_blob("writes", b"", expected=held)
    assert not await driver.swap_blob("writes", b"3", expected=None)
    assert await driver.swap_blob("writes", b"3", expected=b"")
    assert await other.read_blobs(["writes"]) == [b"3"]


async def a_portion_of_a_write_is_published_once(t: Twin) -> None:
    """The note decides, not the ids: nothing comes back after the jobs are gone, weeks later."""
    fields: dict[str, Any] = {"headers": {"a": "1"}, "priority": 3, "max_attempts": 2}
    blobs = {
        "staging/w/1": [t.job(), t.job(key="k")],
        "staging/w/2": [t.job(key="k"), t.job(queue="other")],
        "staging/w/3": [t.job(run_at_us=t.now + SECOND, **fields)],
        **{f"staging/w/{n}": [t.job()] for n in (4, 5, 6, 7)},
    }
    for name, jobs in blobs.items():
        await t.driver.put_blob(name, pack(jobs))
    handles = [t.driver, await t.store.connect()]

    async def publish(series: str, number: int, portion: int, name: str, wanted: set[int]) -> None:
        """Two processes at once, as when one finishes the write of another."""
        how: dict[str, Any] = {"series": series, "number": number, "portion": portion, "now": t.now}
        both = (one.publish_blobs([name, "staging/w/lost"], **how) for one in handles)
        for added in await asyncio.gather(*both):
            assert sum(added.values()) in wanted
        listed = await list_all(t.driver, JobFilter(), t.now)
        wrong = same_answer(t.model.listing(JobFilter(), now=t.now), listed)
        assert wrong is None, wrong

    writes = (
        ("s", 1, 1, "staging/w/1", {2}),
        ("s", 1, 2, "staging/w/2", {3}),
        ("s", 1, 1, "staging/w/1", {2, 3}),
        ("s", 2, 1, "staging/w/3", {1}),
        ("another", 1, 1, "staging/w/4", {1}),
        *((f"single-{n}", -1, 1, f"staging/w/{n}", {1}) for n in (5, 6)),
    )
    for write in writes:
        t.model.enqueue(blobs[write[3]], now=t.now)
        await publish(*write)
    await publish("s", 1, 5, "staging/w/4", {0})
    assert await t.driver.list_blobs("staging") == list(blobs)
    await t.cancel(*t.model.jobs)
    assert await t.purge() == 7
    t.advance(20 * 86_400)
    # A store forgets old notes when it writes another.
    t.model.enqueue(blobs["staging/w/7"], now=t.now)
    await publish("later", 1, 1, "staging/w/7", {1})
    for write in writes:
        await publish(*write[:4], set(range(4)))


async def a_blob_that_holds_no_jobs_is_not_published(t: Twin) -> None:
    """Nor are the others of its call."""
    for data in (b"nonsense", pack([t.job(queue="")])):
        await t.driver.put_blob("staging/w/1", data)
        await t.driver.put_blob("staging/w/0", pack([t.job()]))
        async with t.unchanged():
            names = ["staging/w/0", "staging/w/1"]
            publish = t.driver.publish_blobs(names, series="s", number=1, portion=1, now=t.now)
            (raised,) = await asyncio.gather(publish, return_exceptions=True)
        assert isinstance(raised, InvalidRequest), f"{data!r} was published"


async def _rows(t: Twin, one: LogStream, after: int, until: int, limit: int) -> list[Attempt]:
    rows: list[Attempt] = []
    while after < until:
        page = await t.driver.read_log(one.name, after=after, until=until, limit=limit)
        assert page.place > after
        assert page.place == until or len(page.attempts) >= limit
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
    state = await driver.log_streams()
    for limit in (1, 7, 100):
        seen: list[int] = []
        for one in state.streams:
            edges = await driver.split_log(one.name, after=0, until=one.last, rows=5) if limit == 100 else []
            assert edges == sorted(edges)
            for after, until in pairwise([0, *edges, one.last]):
                seen += [row.seq for row in await _rows(t, one, after, until, limit)]
        assert sorted(seen) == every
    await t.configure(keep_attempts_us=0)
    await t.configure("other", keep_attempts_us=0)
    t.advance(1)
    assert await t.prune() == 30
    later = await (await t.store.connect()).log_streams()
    assert later.store_id == state.store_id
    assert [one.last for one in later.streams] == [one.last for one in state.streams], "places are used again"
    assert all(one.trimmed in (one.last, None) for one in later.streams)


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
    ended, held, waiting = (
        await t.add(idempotency_key="i", priority=-1),
        await t.lease(t.job()),
        await t.add(),
    )
    await t.cancel(ended.id)
    ids = [ended.id, held.id, waiting.id, "nobody", ended.id]
    first, *refused, again = await t.call(op.Remove(ids))
    assert (first, again) == ("cancelled", "cancelled")
    assert [type(one) for one in refused] == [JobError, JobError, JobNotFound]
    await t.stores(t.job(idempotency_key="i"))
