"""Settings that several connections change at once, keyed updates by every way in, and the bytes of a failure job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from drivers.postgres.harness import NOW, Raw, claim, held, make_record, present
from taskharbor.bulk.stage import new_write
from taskharbor.drivers.contract import Fail, QueueSettings, Release, failure_record
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.drivers.postgres.bulk import PostgresBulkStore
from taskharbor.jobs import Failure, JobRecord, JobState, UpdateFlags


async def test_changes_of_different_settings_at_once_all_hold(
    store: PostgresDriver, other: PostgresDriver
) -> None:
    given = QueueSettings(paused=True, max_inflight=3, keep_done_us=None, declaration="d")
    for n in range(40):
        # Also of a queue that both make.
        await asyncio.gather(
            store.configure(f"q{n}", given, now=NOW, fields=["paused"]),
            other.configure(f"q{n}", given, now=NOW, fields=["max_inflight"]),
            store.configure(f"q{n}", given, now=NOW, fields=["keep_done_us"], declares=True),
        )
        assert await other.settings(f"q{n}") == given


async def test_a_declaration_does_not_undo_an_operators_change(store: PostgresDriver) -> None:
    declared = QueueSettings(max_inflight=3, failure_queue="f", declaration="one")
    for _ in range(2):
        await store.configure("q", declared, now=NOW, fields=["max_inflight"], declares=True)
        await store.configure("q", QueueSettings(max_inflight=9), now=NOW, fields=["max_inflight"])
        assert await store.settings("q") == QueueSettings(max_inflight=9, declaration="one")
    await store.configure("q", QueueSettings(), now=NOW)
    assert await store.settings("q") == QueueSettings(declaration="one")


Way = Callable[[PostgresDriver, Raw, str, JobRecord], Awaitable[object]]


async def _enqueue(driver: PostgresDriver, raw: Raw, url: str, job: JobRecord) -> None:
    await driver.enqueue([job], now=NOW)


async def _publish(driver: PostgresDriver, raw: Raw, url: str, job: JobRecord) -> None:
    def write() -> None:
        with PostgresBulkStore(url) as bulk:
            write = new_write()
            bulk.stage(write, "0.1", [[job]])
            bulk.publish(write, ["0.1"], now=NOW)

    await asyncio.to_thread(write)


async def _within(driver: PostgresDriver, raw: Raw, url: str, job: JobRecord) -> None:
    with raw.connection.transaction():
        joined: Any = driver.within(raw.connection)
        joined.enqueue([job], now=NOW)


@pytest.mark.parametrize("way", [_enqueue, _publish, _within])
async def test_the_priority_of_a_keyed_job_changes_by_every_way_in(
    store: PostgresDriver, raw: Raw, url: str, way: Way
) -> None:
    """Of a job that waits; then of one that runs, by the job that it blocks."""
    flags = UpdateFlags(payload=False, priority=True)
    await store.enqueue([make_record("first", key="k"), make_record("second")], now=NOW)
    await way(store, raw, url, make_record(key="k", priority=5, update=flags))
    (job,) = await claim(store)
    assert (job.id, job.priority) == ("first", 5)
    await way(store, raw, url, make_record("blocked", key="k", priority=-5, update=flags))
    blocked = present((await store.get(["blocked"], now=NOW))[0])
    assert (blocked.state, blocked.update) == (JobState.BLOCKED, flags)
    assert await store.settle([Release(*held(job))], now=NOW) == [None]
    assert [(job.id, job.priority) for job in await claim(store, 3)] == [("second", 0), ("first", -5)]


@pytest.mark.parametrize("key", [None, 'k "ü\\'])
async def test_a_failure_job_has_the_bytes_of_every_store(store: PostgresDriver, key: str | None) -> None:
    await store.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
    await store.enqueue([make_record("bad", key=key)], now=NOW)
    (bad,) = await claim(store)
    assert await store.settle([Fail(*held(bad), 1, Failure("E", "no"))], now=NOW) == [None]
    (dead,) = await store.get(["bad"], now=NOW)
    (failed,) = await claim(store, queue="failed")
    assert failed.payload == failure_record(present(dead), job_id="", queue="failed", now=NOW).payload
