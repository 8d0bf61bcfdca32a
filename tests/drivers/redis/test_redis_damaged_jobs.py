"""A stored job that no call could have stored harms nothing but itself."""

from __future__ import annotations

import pytest

from conformance.test_drivers import newest_redis
from records import NOW, make_record, present
from taskharbor.drivers.contract import Ack, JobFilter
from taskharbor.drivers.redis import RedisDriver
from taskharbor.errors import JobDamaged
from taskharbor.jobs import SECOND, JobState

Change = tuple[str, ...]

SCHEDULED = [("ZADD", "scheduled", "1", name) for name in ("one", "two")]
DAMAGES: dict[str, list[Change]] = {
    "no bytes": [("HSET", "waiting_job", "bad", "")],
    "other bytes": [("HSET", "waiting_job", "bad", "x" * 100)],
    "not stored": [("HDEL", "waiting_job", "bad")],
    "stored in no line": [("ZREM", "waiting", "bad"), ("HSET", "waiting_job", "bad", "x")],
    "other bytes and scheduled": [
        ("HSET", "waiting_job", "bad", "x"),
        ("DEL", "ready"),
        ("ZADD", "scheduled", "1", "bad"),
        *SCHEDULED,
    ],
    "no lease": [
        ("HSET", "active_job", "bad", "x"),
        ("ZADD", "active", "1", "bad:w"),
        ("HDEL", "waiting_job", "bad"),
    ],
}


@pytest.mark.parametrize("repairs", [False, True], ids=["found by a worker", "repaired"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_job_is_set_aside_and_its_neighbours_go_on(damage: str, repairs: bool) -> None:
    async with RedisDriver.from_url(newest_redis()) as driver:
        store = driver._store
        keys = store.keys("q")
        await driver.enqueue([make_record(name, payload=b"12") for name in ("one", "bad", "two")], now=NOW)
        for command, family, *words in DAMAGES[damage]:
            await store.command(command, keys[family], *words)
        if repairs:
            removed = "job 'bad' of queue 'q' could not be loaded: it was removed"
            assert await driver.repair() == ([] if damage.startswith("not stored") else [removed])
            assert await driver.repair() == []
        jobs = await driver.reserve("q", limit=10, lease_for=SECOND, now=NOW, worker="w")
        assert [(job.id, job.payload) for job in jobs] == [("one", b"12"), ("two", b"12")]
        acks = [Ack(job.id, present(job.token)) for job in jobs]
        assert await driver.settle(acks, now=NOW) == [None, None]
        assert await driver.reclaim(now=NOW + 100 * SECOND) <= 1
        assert await driver.reserve("q", limit=10, lease_for=SECOND, now=NOW, worker="w") == []
        await driver.repair()
        assert len((await driver.list_jobs(JobFilter(), now=NOW)).jobs) == 2
        (queue,) = await driver.stats(now=NOW)
        assert (queue.counts[JobState.DONE], sum(queue.counts.values())) == (2, 2)


async def test_a_key_and_the_blocked_job_of_a_damaged_one_are_free_again() -> None:
    async with RedisDriver.from_url(newest_redis()) as driver:
        await driver.enqueue([make_record("bad", key="k")], now=NOW)
        await driver.reserve("q", limit=1, lease_for=SECOND, now=NOW, worker="w")
        await driver.enqueue([make_record("next", key="k")], now=NOW)
        keys = driver._store.keys("q")
        await driver._store.command("HSET", keys["active_job"], "bad", "x")
        assert len(await driver.repair()) == 1
        (job,) = await driver.reserve("q", limit=9, lease_for=SECOND, now=NOW, worker="w")
        assert job.id == "next"
        assert await driver._store.command("HGET", keys["damaged"], "bad") == b"x"


@pytest.mark.parametrize("damage", ["no bytes", "other bytes"])
async def test_a_listing_names_the_damaged_job_and_what_mends_it(damage: str) -> None:
    async with RedisDriver.from_url(newest_redis()) as driver:
        await driver.enqueue([make_record(name) for name in ("one", "bad", "two")], now=NOW)
        for command, family, *words in DAMAGES[damage]:
            await driver._store.command(command, driver._store.keys("q")[family], *words)
        for look in (driver.list_jobs(JobFilter(), now=NOW), driver.get(["one", "bad"], now=NOW)):
            with pytest.raises(JobDamaged, match=r"job 'bad' .* run `taskharbor doctor --repair`"):
                await look
        assert len(await driver.repair()) == 1
        assert [job.id for job in (await driver.list_jobs(JobFilter(), now=NOW)).jobs] == ["two", "one"]
