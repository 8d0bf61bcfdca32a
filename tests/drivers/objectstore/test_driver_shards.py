"""A queue in several objects: what still holds for the queue as a whole, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.jobs_here import NOW, a_job, opened
from taskharbor.drivers.contract import Ack, Fail, JobFilter, QueueSettings
from taskharbor.drivers.engine import inspect
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.catalog import state_name
from taskharbor.drivers.objectstore.options import Options
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, Failure, JobState
from taskharbor_testkit.waits import waits_of

THREE = Options(poll=None, shards=3, segment_rows=10, merge=2)


def run(test: Callable[[ObjectStoreDriver, HeldBlobs], Awaitable[None]]) -> None:
    async def with_driver() -> None:
        blobs = HeldBlobs()
        async with ObjectStoreDriver(lambda: blobs, THREE) as driver:
            await test(driver, blobs)

    asyncio.run(with_driver())


def test_jobs_are_spread_over_all_shards_and_counted_as_one_queue() -> None:
    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        jobs = [a_job() for _ in range(60)]
        await driver.enqueue(jobs, now=NOW, new_ids=True)
        assert all(state_name("q", shard) in blobs.objects for shard in range(3))
        (stats,) = await driver.stats(now=NOW)
        assert (stats.counts[JobState.READY], stats.head_run_at_us) == (60, NOW)
        listed = (await driver.list_jobs(JobFilter(), now=NOW, limit=100)).jobs
        assert [job.id for job in listed] == [job.id for job in reversed(jobs)], "newest accepted first"
        found = await driver.get([job.id for job in jobs], now=NOW)
        assert [job and job.id for job in found] == [job.id for job in jobs]

    run(test)


def test_pages_of_a_listing_and_of_the_log_neither_skip_nor_repeat() -> None:
    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        jobs = [a_job() for _ in range(45)]
        await driver.enqueue(jobs, now=NOW)
        held = await driver.reserve("q", limit=100, lease_for=SECOND, now=NOW, worker="w")
        await driver.settle([Ack(job.id, job.token or "") for job in held], now=NOW)
        await driver.store.settled()
        ids: list[str] = []
        cursor: str | None = None
        while True:
            page = await driver.list_jobs(JobFilter(), now=NOW, limit=7, cursor=cursor)
            ids += [job.id for job in page.jobs]
            cursor = page.cursor
            if cursor is None:
                break
        assert ids == [job.id for job in reversed(jobs)]
        rows: list[str] = []
        after: str | None = None
        while (log := await driver.read_attempts(after=after, limit=7)).attempts:
            rows += [row.job_id for row in log.attempts]
            after = log.cursor
        assert sorted(rows) == sorted(ids)

    run(test)


def test_one_reserve_goes_round_the_shards_until_it_has_enough() -> None:
    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        await driver.enqueue([a_job(priority=n % 3) for n in range(30)], now=NOW)
        first = await driver.reserve("q", limit=20, lease_for=SECOND, now=NOW, worker="w")
        rest = await driver.reserve("q", limit=20, lease_for=SECOND, now=NOW, worker="w")
        assert (len(first), len(rest)) == (20, 10)
        assert len({job.id for job in first + rest}) == 30
        assert [job.priority for job in first] == sorted((job.priority for job in first), reverse=True)

    run(test)


def test_w_is_divided_and_never_exceeded_by_the_queue() -> None:
    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        await driver.configure("q", QueueSettings(max_inflight=5), now=NOW)
        await driver.enqueue([a_job() for _ in range(60)], now=NOW)
        handles = [driver.clone() for _ in range(4)]
        for handle in handles:
            await handle.open()
        parts = await asyncio.gather(
            *(handle.reserve("q", limit=5, lease_for=SECOND, now=NOW, worker="w") for handle in handles)
        )
        assert sum(map(len, parts)) == 5
        for handle in handles:
            await handle.close()

    run(test)


def test_a_w_that_some_shard_would_have_no_share_of_is_refused() -> None:
    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        with pytest.raises(InvalidRequest, match="3 shards"):
            await driver.configure("q", QueueSettings(max_inflight=2), now=NOW)
        assert await driver.stats(now=NOW) == []

    run(test)


def test_jobs_of_a_key_meet_and_so_do_those_of_an_idempotency_key() -> None:
    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        for name in ("a", "b", "c", "d", "e"):
            first, second = await driver.enqueue([a_job(key=name), a_job(key=name)], now=NOW)
            assert (second.id, second.existed) == (first.id, True)
            first, second = await driver.enqueue(
                [a_job(idempotency_key=name), a_job(idempotency_key=name)], now=NOW
            )
            assert (second.id, second.existed) == (first.id, True)
        held = await driver.reserve("q", limit=100, lease_for=SECOND, now=NOW, worker="w")
        assert len(held) == 10

    run(test)


def test_an_id_is_known_in_whatever_shard_it_is() -> None:
    """The same id with another key leads elsewhere, and must not make a second job."""

    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        job = a_job(key="a")
        await driver.enqueue([job], now=NOW)
        for name in ("b", "c", "d", "e", None):
            (again,) = await driver.enqueue([a_job(id=job.id, key=name)], now=NOW)
            assert (again.id, again.existed) == (job.id, True)

    run(test)


def test_deaths_are_told_of_and_retention_and_purge_reach_every_shard() -> None:
    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        await driver.configure("q", QueueSettings(failure_queue="failed", keep_dead_us=0), now=NOW)
        await driver.enqueue([a_job() for _ in range(12)], now=NOW)
        held = await driver.reserve("q", limit=12, lease_for=SECOND, now=NOW, worker="w")
        boom = Failure("ValueError", "boom")
        await driver.settle([Fail(job.id, job.token or "", 1, boom) for job in held], now=NOW)
        (notices,) = await driver.stats(now=NOW, queue="failed")
        assert notices.counts[JobState.READY] == 12
        assert await driver.purge(JobFilter(queue="q"), limit=5) == 5
        assert await driver.prune(now=NOW + SECOND, limit=100) == 7

    run(test)


def test_a_waiter_hears_of_any_shard() -> None:
    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        other = driver.clone()
        await other.open()
        for _ in range(6):
            while await waits_of(other)(["q"], now=NOW, timeout=0):
                pass
            waiter = asyncio.create_task(waits_of(other)(["q"], now=NOW, timeout=30))
            await asyncio.sleep(0)
            await driver.enqueue([a_job()], now=NOW)
            assert await waiter
        await other.close()

    run(test)


async def test_the_number_of_shards_is_the_stores_for_good(tmp_path: pytest.TempPathFactory) -> None:
    first = await opened(f"file://{tmp_path}/s?shards=3")
    await first.close()
    again = await opened(f"file://{tmp_path}/s")
    assert again.store.catalog.shards == 3
    await again.close()
    with pytest.raises(InvalidRequest, match="shards=3"):
        await opened(f"file://{tmp_path}/s?shards=2")


def test_a_shard_that_is_damaged_keeps_nobody_from_the_jobs_of_the_others() -> None:
    """Jobs that a claim leased before it failed were handed to nobody, until they were dead."""

    async def test(driver: ObjectStoreDriver, blobs: HeldBlobs) -> None:
        await driver.enqueue([a_job() for _ in range(60)], now=NOW, new_ids=True)
        await driver.store.settled()
        name = state_name("q", 1)
        blobs._keep(name, b"not what was written")
        async with ObjectStoreDriver(lambda: blobs, THREE) as other:
            claimed = await other.reserve("q", limit=60, lease_for=SECOND, now=NOW, worker="w")
            left = 0
            for shard in (0, 2):
                stats = await other.store.shards_of("q")[shard].look(lambda tx: inspect.stats(tx, NOW, "q"))
                left += stats[0].counts[JobState.READY]
            assert claimed
            assert left == 0

    run(test)
