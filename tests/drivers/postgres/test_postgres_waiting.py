"""Waking those who wait: NOTIFY once for many, by queue and schema, and without it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from drivers.postgres.harness import NOW, Heard, Raw, ack, claim, enqueue_on, held, make_record, wait
from taskharbor.drivers.contract import Discard, QueueSettings
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres import driver as notifying
from taskharbor_testkit.servers import drop_schema, with_fresh_schema
from worker.stage import eventually, finish


async def quiet(driver: PostgresDriver, *queues: str) -> None:
    """Wait until the handle listens, if it is to, and has nothing more to say."""

    async def is_quiet() -> bool:
        is_woken = await wait(driver, *queues, timeout=0.02)
        listens = driver._listener is not None and driver._listener.is_up
        return not is_woken and (listens or not driver.options.notify)

    await eventually(is_quiet)


# -- what is said -----------------------------------------------------------------------------------------------


async def test_a_queue_is_notified_of_by_its_name(store: PostgresDriver, url: str, heard: Heard) -> None:
    elsewhere = with_fresh_schema(url)
    async with PostgresDriver.from_url(elsewhere) as stranger:
        # Each schema has its own channel.
        await stranger.enqueue([make_record(queue="theirs")], now=NOW)
    drop_schema(elsewhere)
    for n in range(3):
        await store.enqueue([make_record(queue=f"q{n}")], now=NOW)
        assert heard() == [f"q{n}"]
    await store.enqueue([make_record(queue="zwei ü 'quoted'"), make_record(queue="third")], now=NOW)
    assert sorted(heard()) == ["third", "zwei ü 'quoted'"]


async def test_many_enqueues_are_notified_of_together(
    driver: PostgresDriver, raw: Raw, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for a slow machine to store some jobs in.
    monkeypatch.setattr(notifying, "_WINDOW", 0.2)
    counts: list[int] = []

    def count() -> None:
        counts.extend(raw.one("SELECT count(*) FROM jobs") for _ in heard())

    async with driver:
        for _ in range(200):
            await driver.enqueue([make_record()], now=NOW)
            count()
    # Closing the handle says what is left to say.
    count()
    assert counts[0] <= 2
    assert counts[-1] == 200
    assert len(counts) < 70, counts


async def test_what_makes_nothing_runnable_is_not_notified_of(store: PostgresDriver, heard: Heard) -> None:
    await store.enqueue([make_record() for _ in range(3)], now=NOW)
    first, second, third = await claim(store, 3)
    heard()
    await ack(store, [first])
    await store.settle([Discard(*held(second))], now=NOW)
    await store.stats(now=NOW)
    await store.prune(now=NOW)
    assert heard() == []
    # Where there is a limit, an end is room for another.
    await store.configure("q", QueueSettings(max_inflight=1), now=NOW)
    assert heard() == ["q"]
    await ack(store, [third])
    assert heard() == ["q"]
    # A declaration is applied once.
    for expected in (["q"], []):
        await store.configure("q", QueueSettings(declaration="d"), now=NOW, fields=[], declares=True)
        assert heard() == expected


async def test_switched_off_nothing_is_said_and_nobody_listens(url: str, heard: Heard, raw: Raw) -> None:
    silent = f"{url}&notify=off&poll=0.01&application_name=th_silent"
    async with PostgresDriver.from_url(silent) as driver, driver.clone() as other:
        await quiet(driver, "q", "r")
        waiter = wait(driver, "q", "r")
        await other.enqueue([make_record(queue="r")], now=NOW)
        assert await finish(waiter) is True
        (job,) = await claim(other, queue="r")
        await quiet(driver, "q", "r")
        waiter = wait(driver, "r")
        await other.release(*held(job), now=NOW)
        assert await finish(waiter) is True
        joined: Any = driver.within(raw.connection)
        with raw.connection.transaction():
            joined.enqueue([make_record()], now=NOW)
        listening = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'th_silent' AND query ILIKE 'LISTEN%'"
        assert raw.one(listening) == 0
    assert heard() == []


# -- who hears it -----------------------------------------------------------------------------------------------


async def test_what_a_claim_has_seen_wakes_nobody(store: PostgresDriver, other: PostgresDriver) -> None:
    await quiet(store, "q")
    await other.enqueue([make_record()], now=NOW)
    assert len(await claim(store, 5)) == 1
    assert await wait(store, "q", timeout=0) is False


async def test_a_transaction_that_was_open_during_a_look_wakes(url: str, raw: Raw) -> None:
    """It began before the waiter looked, and committed when the waiter was not waiting."""
    async with PostgresDriver.from_url(f"{url}&notify=off&poll=0.01") as driver:
        await driver.enqueue([make_record(queue="other")], now=NOW)
        with raw.another() as late:
            enqueue_on(late, make_record())
            await driver.enqueue([make_record(queue="other")], now=NOW)
            await quiet(driver, "q")
            assert await claim(driver) == []
            await quiet(driver, "q")
            late("COMMIT")
        assert await wait(driver, "q") is True


async def test_a_transaction_wakes_when_it_commits_and_not_when_it_is_rolled_back(
    store: PostgresDriver, other: PostgresDriver, raw: Raw, heard: Heard
) -> None:
    await other.enqueue([make_record(queue="elsewhere")], now=NOW)
    await quiet(store, "fresh")
    heard()
    waiter = wait(store, "fresh", timeout=0.2)
    with raw.another() as undone:
        enqueue_on(undone, make_record(queue="fresh"))
    await other.enqueue([make_record(queue="elsewhere")], now=NOW)
    assert await waiter is False
    assert set(heard()) == {"elsewhere"}
    waiter = wait(store, "fresh")
    with raw.another() as late:
        enqueue_on(late, make_record(queue="fresh"))
        await store.stats(now=NOW)
        assert not waiter.done()
        late("COMMIT")
    assert await finish(waiter) is True
    assert len(await claim(store, queue="fresh")) == 1


async def test_closing_leaves_no_connection(url: str, raw: Raw) -> None:
    mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'th_closing'"
    async with PostgresDriver.from_url(f"{url}&application_name=th_closing") as driver:
        await quiet(driver, "q")
        await asyncio.gather(*(driver.enqueue([make_record()], now=NOW) for _ in range(8)))
        assert raw.one(mine) >= 2
    await eventually(lambda: raw.one(mine) == 0)
