"""What a URL may say, what a handle says of itself, and what happens when it is used the wrong way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.jobs_here import NOW, a_job, opened, run_through
from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "file", "mem"])
def test_every_scheme_leads_to_the_driver(scheme: str) -> None:
    place = "/folder" if scheme == "file" else "place"
    assert isinstance(connect(f"{scheme}://{place}"), ObjectStoreDriver)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("shards=0", "shards"),
        ("shards=many", "shards"),
        ("shards=1000", "shards"),
        ("poll=-1", "poll"),
        ("poll=soon", "poll"),
        ("segment_rows=0", "segment_rows"),
        ("merge=1", "merge"),
        ("colour=red", "colour"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_its_name(query: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ObjectStoreDriver.from_url(f"mem://name?{query}")


def test_a_store_in_memory_claims_no_durability_and_one_in_a_folder_does(tmp_path: Path) -> None:
    in_memory = ObjectStoreDriver.from_url("mem://").capabilities
    in_a_folder = ObjectStoreDriver.from_url(f"file://{tmp_path}").capabilities
    assert (in_memory.durable, in_memory.multi_process) == (False, False)
    assert (in_a_folder.durable, in_a_folder.multi_process) == (True, True)


async def test_a_handle_that_is_not_open_says_so() -> None:
    with pytest.raises(BackendUnavailable, match=r"open\(\)"):
        await ObjectStoreDriver.from_url("mem://").stats(now=NOW)


async def test_a_handle_can_be_closed_twice_and_opened_again(tmp_path: Path) -> None:
    driver = await opened(f"file://{tmp_path}/store")
    await driver.enqueue([a_job()], now=NOW)
    await driver.close()
    await driver.close()
    await driver.open()
    await driver.open()
    (stats,) = await driver.stats(now=NOW)
    assert stats.queue == "q"
    await driver.close()


async def test_handles_on_one_name_in_memory_share_it_and_private_ones_do_not() -> None:
    first, second = await opened("mem://shared-here"), await opened("mem://shared-here")
    await first.enqueue([a_job()], now=NOW)
    assert len(await second.stats(now=NOW)) == 1
    alone, own = await opened("mem://"), await opened("mem://")
    await alone.enqueue([a_job()], now=NOW)
    assert await own.stats(now=NOW) == []
    for driver in (first, second, alone, own):
        await driver.close()


def test_any_name_will_do_for_a_queue(tmp_path: Path) -> None:
    """Names become folders: whatever is in them must neither collide nor escape."""
    names = ["q", "Q", "../up", "a/b", "a%2fb", " x ", "ü", "x" * 200, ".", "con:", "q=51"]

    async def test() -> None:
        driver = await opened(f"file://{tmp_path}/store")
        for name in names:
            await driver.enqueue([a_job(queue=name)], now=NOW)
        assert sorted(stats.queue for stats in await driver.stats(now=NOW)) == sorted(names)
        for name in names:
            assert [
                job.queue for job in await driver.reserve(name, limit=9, lease_for=1, now=NOW, worker="w")
            ] == [name]
        await driver.close()

    asyncio.run(test())
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


async def test_a_cursor_of_another_store_is_refused() -> None:
    one, other = await opened("mem://"), await opened("mem://")
    await run_through(one, 3)
    cursor = (await one.read_attempts(limit=2)).cursor
    with pytest.raises(InvalidRequest, match="another store"):
        await other.read_attempts(after=cursor)
    page = await one.list_jobs(JobFilter(), now=NOW, limit=2)
    assert page.cursor is not None
    assert len((await one.list_jobs(JobFilter(), now=NOW, cursor=page.cursor)).jobs) == 1
    with pytest.raises(InvalidRequest, match="another store"):
        await other.list_jobs(JobFilter(), now=NOW, cursor=page.cursor)
    with pytest.raises(InvalidRequest, match="another store"):
        await other.list_jobs(JobFilter(until=page.cursor), now=NOW)
    for broken in ("", "x", "!!", "gA=="):
        with pytest.raises(InvalidRequest, match="not a cursor"):
            await one.read_attempts(after=broken)
        with pytest.raises(InvalidRequest, match="not a cursor"):
            await one.list_jobs(JobFilter(), now=NOW, cursor=broken)
    await one.close()
    await other.close()


def test_time_is_this_machines_unless_the_stores_differs_by_more_than_can_be_told() -> None:
    class Clock:
        def now(self) -> int:
            return NOW

    async def test(theirs: int | None) -> int:
        class Timed(HeldBlobs):
            async def now(self) -> int | None:
                return theirs

        async with ObjectStoreDriver(Timed, clock=Clock()) as driver:
            return await driver.time()

    assert asyncio.run(test(None)) == NOW
    assert asyncio.run(test(NOW - 1_500_000)) == NOW
    assert asyncio.run(test(NOW + 3_600_000_000)) == NOW + 3_600_000_000


async def test_settings_of_a_queue_that_nobody_used_are_the_defaults_and_make_no_queue() -> None:
    driver = await opened("mem://")
    assert await driver.settings("new") == QueueSettings()
    assert await driver.reserve("new", limit=1, lease_for=1, now=NOW, worker="w") == []
    assert await driver.stats(now=NOW) == []
    await driver.close()
