"""Putting, looking at and changing schedules, by both clients."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from schedules.conftest import EVERYWHERE
from schedules.harness import MINUTE, START, Harness
from taskharbor import Client, InvalidRequest, JobState, Schedule, ScheduleNotFound
from taskharbor.clock import FakeClock
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.jobs import LATEST, SECOND, UpdateFlags, to_datetime
from taskharbor.schedules import QUEUE
from taskharbor.schedules.specification import StoredSchedule, own_record


@pytest.mark.parametrize("store", EVERYWHERE, indirect=True)
async def test_pause_resume_and_put_meanwhile(store: Harness) -> None:
    await store.begin()
    await store.schedules.pause("s", "until the move is over")
    await store.put(every=2 * MINUTE)
    own, info = await store.own(), await store.schedules.get("s")
    assert (own.run_at_us, info.state, info.note, info.next) == (
        LATEST,
        "paused",
        "until the move is over",
        [],
    )
    await store.forward(10 * MINUTE)
    await store.schedules.resume("s")
    await store.tick()
    assert await store.ticks() == []
    await store.forward(2 * MINUTE)
    assert await store.ticks() == [720]
    assert (await store.schedules.get("s")).note is None


async def test_case_9_trigger_and_backfill_have_ids_of_their_own(store: Harness) -> None:
    await store.begin(payload={"n": 1})
    await store.forward()
    handle = await store.schedules.trigger("s")
    job = await store.client.get(handle.id)
    assert (job.payload, job.run_at_us) == (b'{"n":1}', store.clock.now())
    since, until = to_datetime(START - 300 * SECOND), to_datetime(START + 60 * SECOND)
    assert await store.schedules.backfill("s", since, until) == 7
    assert await store.schedules.backfill("s", since, until) == 0
    assert await store.ticks("backfill") == [-300, -240, -180, -120, -60, 0, 60]
    assert (len(await store.ticks()), len(await store.ticks("trigger"))) == (1, 1)


async def test_case_9_backfill_is_bounded_and_needs_overlap_allow(store: Harness) -> None:
    await store.begin(every=1)
    await store.begin("skips", overlap="skip")
    since, until = to_datetime(START - 20_000 * SECOND), to_datetime(START)
    with pytest.raises(InvalidRequest, match="more than 10000 ticks"):
        await store.schedules.backfill("s", since, until)
    with pytest.raises(InvalidRequest, match=r"overlap 'skip'.*put the schedule with overlap 'allow'"):
        await store.schedules.backfill("skips", until, until)
    with pytest.raises(InvalidRequest, match="two instants in the past"):
        await store.schedules.backfill("s", until, to_datetime(START + 99 * SECOND))
    assert await store.ticks("backfill") == []


async def test_backfill_keeps_to_the_first_and_the_last_instant(store: Harness) -> None:
    start, end = (to_datetime(START + seconds * SECOND) for seconds in (-120, 60))
    await store.begin(start=start, end=end)
    await store.forward(5 * MINUTE)
    assert await store.schedules.backfill("s", start - 9 * MINUTE, end + 2 * MINUTE) == 4
    assert await store.ticks("backfill") == [-120, -60, 0, 60]


async def test_case_12_all_that_is_shown_is_computed(store: Harness) -> None:
    await store.begin(cron="*/10 * * * *", zone="Europe/Berlin", catch_up=0)
    await store.forward(6 * MINUTE)
    await store.end()
    await store.forward(24 * MINUTE)
    (info,) = await store.schedules.list()
    assert info.schedule is not None
    assert (info.name, info.state, info.schedule.zone, info.origin) == ("s", "active", "Europe/Berlin", None)
    assert [one.minute for one in info.next] == [50, 0, 10, 20, 30]
    assert info.last == to_datetime(START + 360 * SECOND)
    assert (info.last_job, info.last_state) == ((await store.jobs())[0].id, JobState.DONE)
    assert info.missed == 2
    assert (await store.own()).last_error is None


async def test_jobs_that_retention_has_removed_are_not_missed(store: Harness) -> None:
    await store.client.configure("default", create=True, keep_done=120)
    await store.begin()
    for _ in range(6):
        await store.forward()
        await store.end()
    await store.driver.prune(now=store.clock.now())
    info = await store.schedules.get("s")
    assert (info.missed, info.last) == (0, to_datetime(START + 360 * SECOND))


async def test_what_is_not_there_is_said(store: Harness) -> None:
    for call in (store.schedules.get, store.schedules.pause, store.schedules.delete, store.schedules.trigger):
        with pytest.raises(ScheduleNotFound, match="there is no schedule 'x'"):
            await call("x")
    assert await store.schedules.list() == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a b"}, "name 'a b' of a schedule"),
        ({"name": "x" * 121}, "1 to 120 printable"),
        ({}, "schedule 's': give either cron or every"),
        ({"cron": "0 0 * * *", "every": 5}, "give either cron or every"),
        ({"cron": "61 * * * *"}, "schedule 's': cron '61 . . . .': minute '61'"),
        ({"cron": "0 0 */29 2 MON#2"}, "never matches"),
        ({"cron": ["* * * * *"] * 21}, "at most 20 texts"),
        ({"cron": "* * * * *", "zone": "Mars"}, "zone 'Mars' is not known"),
        ({"every": 60, "zone": "Mars"}, "zone 'Mars' is not known"),
        ({"cron": "* * * * *", "offset": 5}, "write it into the cron expression"),
        ({"every": 0.5}, "every 0.5: at least 1 second"),
        ({"every": -1}, "every -1: at least 1 second"),
        ({"every": 60, "jitter": -1}, "jitter -1: 0 or more"),
        ({"every": 60, "overlap": "queue_all"}, "needs lanes"),
        ({"every": 60, "overlap": "sometimes"}, "choose one of allow, skip, queue_one, replace"),
        ({"every": 60, "overlap": "skip", "key": "k"}, "key 'k': overlap 'skip'"),
        ({"every": 60, "limit": 0}, "limit 0: give a whole number from 1 to 10000"),
        ({"every": timedelta(milliseconds=500)}, "every 0.5: at least 1 second"),
        ({"every": 60, "start": to_datetime(START), "end": to_datetime(START - 1)}, "comes before start"),
        ({"every": 60, "payload": [1]}, "give a mapping of the job's arguments"),
        ({"every": 60, "queue": QUEUE}, "is for the schedules themselves"),
        ({"every": 60, "max_attempts": 0}, "max_attempts 0"),
    ],
)
async def test_wrong_values_are_refused(fields: dict[str, Any], message: str) -> None:
    async with Harness(MemoryDriver()).client as client:
        with pytest.raises(InvalidRequest, match=message):
            await client.schedules.put(Schedule(**{"name": "s", "job": "work", **fields}))
        assert await client.stats() == []


def test_the_synchronous_client() -> None:
    clock = FakeClock(START)
    with Client("memory://", clock=clock) as client:
        schedules = client.schedules
        assert schedules.put(Schedule(name="s", job="work", every=timedelta(minutes=1)))
        assert [one.name for one in schedules.list()] == ["s"]
        schedules.pause("s", "why")
        schedules.resume("s")
        handle = schedules.trigger("s")
        assert handle.state() is JobState.READY
        assert schedules.backfill("s", to_datetime(START - 60 * SECOND), to_datetime(START)) == 2
        assert schedules.get("s").state == "active"
        schedules.delete("s")
        assert schedules.list() == []


@pytest.mark.parametrize("store", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(
    ("key", "changes", "error"),
    [
        ("evil", {"queue": None}, "queue None cannot have its jobs"),
        ("evil", {"queue": ""}, "queue '' cannot have its jobs"),
        ("evil", {"queue": QUEUE}, f"queue '{QUEUE}' cannot have its jobs"),
        ("evil", {"queue": "a" * 300}, "queue"),
        ("evil", {"every": 1.1e-6}, "every 1.1e-06: at least 1 second"),
        ("other", {}, "the schedule 'evil' is stored under the key 'other'"),
        (None, {}, "the schedule 'evil' is stored under the key None"),
    ],
)
async def test_what_anybody_can_store_harms_no_other_schedule(
    store: Harness, key: str | None, changes: dict[str, Any], error: str
) -> None:
    await store.put()
    fields: dict[str, Any] = {"every": 60, "queue": "q"} | changes
    stored = StoredSchedule(spec=Schedule(name="evil", job="j", **fields), since=0)
    now = store.clock.now()
    record = replace(own_record(stored, now, now, UpdateFlags()), key=key)
    await store.driver.enqueue([record], now=now)
    await store.tick()
    found = {one.name: one for one in await store.schedules.list()}
    assert found["s"].error is None
    assert error in (found[key or ""].error or "")
    assert await store.jobs("q") == []
    if key is not None:
        await store.schedules.delete(key)
        store.clock.advance(timedelta(minutes=2))
        await store.tick()
        assert [one.name for one in await store.schedules.list()] == ["s"]
