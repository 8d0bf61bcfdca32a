"""Waking those who wait: NOTIFY once for many, by queue and schema, and without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from psycopg import sql

from drivers.postgres.pg_harness import NOW, Raw, enqueue_on, until
from taskharbor.drivers.contract import QueueSettings
from taskharbor.drivers.postgres import PostgresDriver, notifications
from taskharbor.drivers.postgres.rows import channel
from taskharbor.jobs import SECOND, JobRecord
from taskharbor_testkit.servers import drop_schema, with_fresh_schema
from taskharbor_testkit.waits import waits_of

MakeRecord = Callable[..., JobRecord]

_PATIENCE = 60.0


@pytest.fixture
def heard(raw: Raw) -> Callable[[], list[str]]:
    """The queues that were notified of since the last look, in order."""
    raw(sql.SQL("LISTEN {}").format(sql.Identifier(channel(raw.schema))))

    def look() -> list[str]:
        # A round trip: whatever was committed before is here now.
        raw("SELECT 1")
        return [notify.payload for notify in raw.connection.notifies(timeout=0)]

    return look


async def quiet(driver: PostgresDriver, *queues: str) -> None:
    """Wait until the handle listens, if it is to, and has nothing more to say."""
    for _ in range(500):
        is_woken = await waits_of(driver)(queues, now=NOW, timeout=0.02)
        assert driver._listener is not None
        if not is_woken and (not driver.options.notify or driver._listener.is_up):
            return
    raise AssertionError("it does not fall silent")


async def soon(waiter: asyncio.Task[bool]) -> bool:
    return await asyncio.wait_for(waiter, _PATIENCE)


def wait(driver: PostgresDriver, *queues: str) -> asyncio.Task[bool]:
    return asyncio.ensure_future(waits_of(driver)(queues, now=NOW, timeout=_PATIENCE))


# -- what is said -----------------------------------------------------------------------------------------------


async def test_a_queue_is_notified_of_by_its_name(
    driver: PostgresDriver, heard: Callable[[], list[str]], record: MakeRecord
) -> None:
    async with driver:
        await driver.enqueue([record(queue="one")], now=NOW)
        assert heard() == ["one"]
        await driver.enqueue([record(queue="zwei ü 'quoted'"), record(queue="third")], now=NOW)
        assert sorted(heard()) == ["third", "zwei ü 'quoted'"]


def test_many_enqueues_in_a_row_are_notified_of_together_and_the_last_one_too(
    driver: PostgresDriver, raw: Raw, record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for a slow machine to store some jobs in.
    monkeypatch.setattr(notifications, "_WINDOW", 0.2)
    counts: list[int] = []

    async def use() -> None:
        async with driver:
            raw(sql.SQL("LISTEN {}").format(sql.Identifier(channel(raw.schema))))
            for _ in range(300):
                await driver.enqueue([record()], now=NOW)
                _count()
            assert raw.one("SELECT count(*) FROM jobs") == 300
        # Closing the handle says what is left to say.
        _count()

    def _count() -> None:
        raw("SELECT 1")
        said = list(raw.connection.notifies(timeout=0))
        counts.extend(raw.one("SELECT count(*) FROM jobs") for _ in said)

    asyncio.run(use())
    assert counts[0] <= 2
    assert counts[-1] == 300
    assert len(counts) < 100, counts


async def test_one_at_a_time_is_notified_of_at_once(
    driver: PostgresDriver, heard: Callable[[], list[str]], record: MakeRecord
) -> None:
    async with driver:
        for n in range(5):
            await driver.enqueue([record(queue=f"q{n}")], now=NOW)
            assert heard() == [f"q{n}"]


async def test_what_makes_nothing_runnable_is_not_notified_of(
    driver: PostgresDriver, heard: Callable[[], list[str]], record: MakeRecord
) -> None:
    async with driver:
        await driver.enqueue([record() for _ in range(3)], now=NOW)
        jobs = await driver.reserve("q", limit=3, lease_for=SECOND, now=NOW, worker="w")
        heard()
        await driver.ack(jobs[0].id, jobs[0].token or "", now=NOW)
        await driver.discard(jobs[1].id, jobs[1].token or "", now=NOW)
        await driver.stats(now=NOW)
        await driver.prune(now=NOW)
        assert heard() == []
        # Where there is a limit, an end is room for another.
        await driver.configure("q", QueueSettings(max_inflight=1), now=NOW)
        assert heard() == ["q"]
        await driver.ack(jobs[2].id, jobs[2].token or "", now=NOW)
        assert heard() == ["q"]


async def test_switched_off_nothing_is_said_and_nobody_listens(
    postgres_url: str, heard: Callable[[], list[str]], raw: Raw, record: MakeRecord
) -> None:
    url = f"{postgres_url}&notify=off&poll=0.01&application_name=th_silent"
    async with PostgresDriver.from_url(url) as driver, driver.clone() as other:
        await quiet(driver, "q", "r")
        waiter = wait(driver, "q", "r")
        await other.enqueue([record(queue="r")], now=NOW)
        assert await soon(waiter) is True
        (job,) = await other.reserve("r", limit=1, lease_for=SECOND, now=NOW, worker="w")
        await quiet(driver, "q", "r")
        waiter = wait(driver, "r")
        await other.release(job.id, job.token or "", now=NOW)
        assert await soon(waiter) is True
        listening = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'th_silent' AND query ILIKE 'LISTEN%'"
        assert raw.one(listening) == 0
    assert heard() == []


def test_each_schema_has_a_channel(
    driver: PostgresDriver, postgres_url: str, heard: Callable[[], list[str]], record: MakeRecord
) -> None:
    elsewhere = with_fresh_schema(postgres_url)

    async def use() -> None:
        async with driver, PostgresDriver.from_url(elsewhere) as stranger:
            await stranger.enqueue([record(queue="theirs")], now=NOW)
            await driver.enqueue([record(queue="ours")], now=NOW)
            assert heard() == ["ours"]

    try:
        asyncio.run(use())
    finally:
        drop_schema(elsewhere)


# -- who hears it -----------------------------------------------------------------------------------------------


async def test_every_handle_that_waits_is_woken(driver: PostgresDriver, record: MakeRecord) -> None:
    async with driver, driver.clone() as second, driver.clone() as third:
        for handle in (second, third):
            await quiet(handle, "q", "r", "never used")
        waiters = [wait(second, "q", "r"), wait(third, "never used", "q"), wait(third, "q")]
        await driver.enqueue([record()], now=NOW)
        assert [await soon(waiter) for waiter in waiters] == [True, True, True]


async def test_a_handle_wakes_itself(driver: PostgresDriver, record: MakeRecord) -> None:
    async with driver:
        await quiet(driver, "q")
        waiter = wait(driver, "q")
        await driver.enqueue([record()], now=NOW)
        assert await soon(waiter) is True


async def test_a_queue_nobody_has_used_before(driver: PostgresDriver, record: MakeRecord) -> None:
    async with driver, driver.clone() as other:
        await quiet(driver, "fresh")
        waiter = wait(driver, "fresh")
        await other.enqueue([record(queue="fresh")], now=NOW)
        assert await soon(waiter) is True


async def test_another_queue_does_not_wake(driver: PostgresDriver, record: MakeRecord) -> None:
    async with driver, driver.clone() as other:
        await other.enqueue([record(queue="elsewhere")], now=NOW)
        await quiet(driver, "q")
        waiter = asyncio.ensure_future(waits_of(driver)(["q"], now=NOW, timeout=0.3))
        for _ in range(3):
            await other.enqueue([record(queue="elsewhere")], now=NOW)
        assert await waiter is False


async def test_a_wake_up_between_two_waits_is_not_missed(driver: PostgresDriver, record: MakeRecord) -> None:
    async with driver, driver.clone() as other:
        await quiet(driver, "q", "r")
        await other.enqueue([record(queue="r")], now=NOW)
        assert await waits_of(driver)(["q", "r"], now=NOW, timeout=_PATIENCE) is True
        await quiet(driver, "q", "r")


async def test_what_a_claim_has_seen_wakes_nobody(driver: PostgresDriver, record: MakeRecord) -> None:
    async with driver, driver.clone() as other:
        await quiet(driver, "q")
        await other.enqueue([record()], now=NOW)
        assert len(await driver.reserve("q", limit=5, lease_for=SECOND, now=NOW, worker="w")) == 1
        assert await waits_of(driver)(["q"], now=NOW, timeout=0) is False


# -- by a transaction of somebody else ----------------------------------------------------------------------------


async def test_a_transaction_wakes_when_it_commits(
    driver: PostgresDriver, raw: Raw, record: MakeRecord
) -> None:
    async with driver:
        await quiet(driver, "q")
        waiter = wait(driver, "q")
        raw("BEGIN")
        enqueue_on(raw, [record()], NOW)
        await driver.stats(now=NOW)
        assert not waiter.done()
        raw("COMMIT")
        assert await soon(waiter) is True
        assert len(await driver.reserve("q", limit=1, lease_for=SECOND, now=NOW, worker="w")) == 1


async def test_a_transaction_that_was_open_during_a_look_wakes_without_being_heard(
    postgres_url: str, raw: Raw, record: MakeRecord
) -> None:
    """It began before the waiter looked, and committed when the waiter was not waiting."""

    async with PostgresDriver.from_url(f"{postgres_url}&notify=off&poll=0.01") as driver:
        await driver.enqueue([record(queue="other")], now=NOW)
        raw("BEGIN")
        enqueue_on(raw, [record()], NOW)
        await driver.enqueue([record(queue="other")], now=NOW)
        await quiet(driver, "q")
        assert await driver.reserve("q", limit=1, lease_for=SECOND, now=NOW, worker="w") == []
        await quiet(driver, "q")
        raw("COMMIT")
        assert await waits_of(driver)(["q"], now=NOW, timeout=_PATIENCE) is True


async def test_a_transaction_that_is_rolled_back_wakes_nobody(
    driver: PostgresDriver, raw: Raw, record: MakeRecord, heard: Callable[[], list[str]]
) -> None:
    async with driver:
        await quiet(driver, "q")
        waiter = asyncio.ensure_future(waits_of(driver)(["q"], now=NOW, timeout=0.2))
        raw("BEGIN")
        enqueue_on(raw, [record()], NOW)
        raw("ROLLBACK")
        assert await waiter is False
        assert heard() == []


# -- when the connection that listens is lost -----------------------------------------------------------------------


async def test_a_listener_that_is_cut_off_comes_back(postgres_url: str, raw: Raw, record: MakeRecord) -> None:
    # Nobody looks by himself within the patience of the test.
    url = f"{postgres_url}&poll=3600&application_name=th_listener"
    listeners = "FROM pg_stat_activity WHERE application_name = 'th_listener' AND query ILIKE 'LISTEN%'"

    async with PostgresDriver.from_url(url) as driver, driver.clone() as other:
        await quiet(driver, "q")
        (pid,) = raw(f"SELECT pid {listeners}")[0]
        waiter = wait(driver, "q")
        assert raw.one("SELECT pg_terminate_backend(%s, 30000)", pid)
        # Something may have been said meanwhile, so that it has to look.
        assert await soon(waiter) is True
        await asyncio.to_thread(
            until, lambda: raw.one(f"SELECT count(*) {listeners}") == 1, "it listens again"
        )
        await quiet(driver, "q")
        waiter = wait(driver, "q")
        await other.enqueue([record()], now=NOW)
        assert await soon(waiter) is True


async def test_closing_leaves_no_connection(postgres_url: str, raw: Raw, record: MakeRecord) -> None:
    mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'th_closing'"

    async with PostgresDriver.from_url(f"{postgres_url}&application_name=th_closing") as driver:
        await quiet(driver, "q")
        await asyncio.gather(*(driver.enqueue([record()], now=NOW) for _ in range(8)))
        assert raw.one(mine) >= 2
    until(lambda: raw.one(mine) == 0, "all connections are gone")


async def test_a_wait_that_is_cancelled_leaves_nothing_behind(
    driver: PostgresDriver, record: MakeRecord
) -> None:
    async with driver, driver.clone() as other:
        await quiet(driver, "q")
        waiter = wait(driver, "q")
        await other.stats(now=NOW)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await other.enqueue([record()], now=NOW)
        assert await soon(wait(driver, "q")) is True
