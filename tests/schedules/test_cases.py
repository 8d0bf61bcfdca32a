"""Numbered edge cases that need a store of their own, and what a repeated or late try may do."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from redis import Redis

from drivers.objectstore.fake_blobs import FaultyBlobs, HeldBlobs, Weather
from drivers.objectstore.harness import driver_on
from schedules.conftest import EVERYWHERE
from schedules.harness import MINUTE, START, Crash, Crashing, Harness
from taskharbor import BackendUnavailable, Harbor, JobState, Schedule
from taskharbor.clock import FakeClock
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, to_datetime
from taskharbor.schedules.specification import LEASE
from taskharbor.schedules.ticking import tick

everywhere = pytest.mark.parametrize("store", EVERYWHERE, indirect=True)


async def nothing() -> None: ...


def test_case_2_what_code_no_longer_declares_stays_and_what_was_made_at_run_time_is_untouched() -> None:
    clock, driver = FakeClock(START), MemoryDriver()
    old, new = Harbor(driver, clock=clock), Harbor(driver, clock=clock)
    old.job(type="gone", every=60)(nothing)
    new.job(type="kept", every=60)(nothing)
    old.worker(until_empty=True).run()
    new.client.schedules.put(Schedule(name="free", job="kept", every=60))
    clock.advance(60)
    new.worker(until_empty=True).run()
    found = {one.name: one for one in new.client.schedules.list(app=new)}
    assert {name: one.state for name, one in found.items()} == {
        "free": "active",
        "gone": "orphaned",
        "kept": "active",
    }
    # An orphan goes on until somebody deletes it.
    assert found["gone"].last is not None
    assert {one.state for one in new.client.schedules.list()} == {"active"}


async def test_case_13_a_batch_of_ticks_is_three_writes() -> None:
    """One for the leases, one for the jobs of a queue, one for the releases; and none while nothing is due."""
    weather = Weather()
    store = Harness(driver_on(FaultyBlobs(HeldBlobs(), weather)))
    async with store.client:
        for number in range(40):
            await store.put(f"s{number}")
        await store.tick()
        await store.forward()
        for _ in range(3):
            before = weather.writes
            await store.forward()
            assert weather.writes - before == 3
        before = weather.writes
        await store.tick()
        await store.forward(1)
        assert weather.writes == before
        assert len(await store.ticks()) == 160


class Rollback:
    """A Redis that loses all that came after a moment, as a failover to a replica that was behind does."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._prefix = dict(parse_qsl(parts.query))["prefix"]
        self._client = Redis.from_url(f"redis://{parts.netloc}{parts.path}")
        self._kept: dict[bytes, bytes] = {}

    def keep(self) -> None:
        keys = list(self._client.scan_iter(match=f"{self._prefix}*"))
        self._kept = {key: value for key in keys if (value := self._client.dump(key)) is not None}

    def lose(self) -> None:
        for key in list(self._client.scan_iter(match=f"{self._prefix}*")):
            self._client.delete(key)
        for key, value in self._kept.items():
            self._client.restore(key, 0, value)

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def rollback(redis_url: str) -> Iterator[Rollback]:
    made = Rollback(redis_url)
    yield made
    made.close()


@pytest.mark.parametrize("overlap", ["allow", "skip", "queue_one"])
@pytest.mark.parametrize("survives", [False, True])
async def test_case_14_a_redis_that_lost_the_last_second(
    survives: bool, overlap: str, redis_url: str, rollback: Rollback
) -> None:
    store = Harness(connect(redis_url))
    async with store.client:
        await store.begin(overlap=overlap)
        await store.forward()
        await store.end()
        store.clock.advance(MINUTE)
        if survives:
            # The job reached the replica, the release of the schedule did not.
            with pytest.raises(Crash):
                await store.tick(Crashing(store.driver, "settle"))
        rollback.keep()
        if survives:
            await store.driver.reclaim(now=store.clock.now() + LEASE)
        await store.tick()
        (made,) = {job.id for job in await store.jobs()} - {(await store.jobs())[0].id}
        rollback.lose()
        assert await store.ticks() == ([60, 120] if survives else [60])
        await store.forward(LEASE / SECOND)
        assert await store.ticks() == [60, 120]
        assert (await store.jobs())[-1].id == made
        assert (await store.own()).run_at_us == START + 180 * SECOND
        await store.end()
        await store.forward()
        assert await store.ticks() == [60, 120, 180]


# -- a repeated try, and one that comes late -----------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    "options", [{"overlap": "replace"}, {"catch_up_mode": "last", "pause_on_failure": True}]
)
async def test_a_repeated_try_makes_no_older_tick(store: Harness, options: dict[str, Any]) -> None:
    await store.begin(catch_up=timedelta(hours=1), **options)
    store.clock.advance(3 * MINUTE)
    with pytest.raises(Crash):
        await store.tick(Crashing(store.driver, "settle"))
    await store.forward(LEASE / SECOND)
    assert await store.ticks() == [180]
    (job,) = await store.jobs()
    assert job.state is JobState.READY


class Freezing:
    """A driver of a worker that stands still, for longer than its leases, after a call of this name."""

    def __init__(self, store: Harness, name: str) -> None:
        self._store, self._name = store, name

    def __getattr__(self, name: str) -> object:
        method = getattr(self._store.driver, name)
        if name != self._name:
            return method

        async def freeze(*args: object, **options: object) -> object:
            answer = await method(*args, **options)
            # Another worker goes on meanwhile, and the job is forgotten.
            await self._store.forward(LEASE / SECOND)
            await self._store.end()
            await self._store.forward(10 * MINUTE)
            await self._store.driver.prune(now=self._store.clock.now())
            return answer

        return freeze


@pytest.mark.parametrize(
    ("overlap", "call"), [("allow", "reserve"), ("replace", "get"), ("skip", "list_jobs")]
)
async def test_a_worker_that_was_frozen_makes_and_cancels_nothing(
    store: Harness, overlap: str, call: str
) -> None:
    await store.client.configure("default", create=True, keep_done=60)
    await store.begin(overlap=overlap, catch_up=0)
    store.clock.advance(MINUTE)
    with pytest.raises(BackendUnavailable, match="the leases of schedules are over"):
        await tick(Freezing(store, call), store.clock.now(), "w-2", store.clock)  # type: ignore[arg-type]
    (job,) = await store.jobs()
    assert (await store.ticks(), job.state) == ([660], JobState.READY)


async def test_a_repeated_resume_forgets_no_tick(store: Harness) -> None:
    await store.begin()
    await store.schedules.pause("s")
    await store.schedules.resume("s")
    store.clock.advance(MINUTE + timedelta(seconds=1))
    await store.schedules.resume("s")
    await store.tick()
    assert await store.ticks() == [60]


@everywhere
async def test_a_sweep_brings_a_schedule_back_with_its_nominal_time(store: Harness) -> None:
    await store.begin(catch_up=timedelta(hours=1))
    store.clock.advance(MINUTE)
    with pytest.raises(Crash):
        await store.tick(Crashing(store.driver, "enqueue"))
    store.clock.advance(2 * MINUTE)
    assert await store.driver.reclaim(now=store.clock.now()) == 1
    assert (await store.own()).run_at_us == START + 60 * SECOND
    await store.tick()
    assert await store.ticks() == [60, 120, 180]


class Ahead:
    """A driver that leases by a clock that is ahead of the worker's, as some stores do for a moment."""

    def __init__(self, store: Harness) -> None:
        self._driver = store.driver

    def __getattr__(self, name: str) -> object:
        return getattr(self._driver, name)

    async def reserve(self, queue: str, *, now: int, **options: int) -> object:
        return await self._driver.reserve(queue, now=now + SECOND, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"start": to_datetime(START + 60 * SECOND)}])
async def test_a_tick_that_is_not_due_by_the_clock_of_the_worker_is_made_next(
    store: Harness, options: dict[str, Any]
) -> None:
    await store.begin(**options)
    store.clock.advance(59.5)
    assert await tick(Ahead(store), store.clock.now(), "w-2") == 1  # type: ignore[arg-type]
    assert (await store.own()).run_at_us == START + 60 * SECOND
    await store.forward(0.5)
    assert await store.ticks() == [60]
