"""Which keys there are, where they live, and that none is left behind once everything has ended and expired."""

from __future__ import annotations

import hashlib
import re

import pytest
from redis.crc import key_slot

from drivers.redis.redis_shelf import BOOM, LEASE, NOW, Shelf, ack, fail, shelf, token
from taskharbor.drivers.contract import Discard, Extension, JobFilter, QueueSettings, Release, Retry
from taskharbor.drivers.redis.library import FAMILIES, LAYOUT, lua
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import Store, keys_of
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, UpdateFlags

TYPES = {
    "waiting": "zset", "active": "zset", "waiting_job": "hash", "active_job": "hash", "finished_job": "hash", "ready": "zset",
    "types": "set", "scheduled": "zset", "jobs": "zset", "done": "zset", "dead": "zset", "cancelled": "zset",
    "waiting_key": "hash", "active_key": "hash", "accepted": "hash", "led_here": "hash", "settings": "hash", "meta": "hash",
    "attempts": "stream",
}  # fmt: skip
"""Of a busy queue. What is only there in trouble: late, outbox, repeated."""
FOR_GOOD = {"taskharbor:queues", "{q}:meta", "{q}:notify", "{q}:settings", "{failed}:meta", "{failed}:notify"}

NAMES = ["q", "a b", "a}b", "{a}", "}", "{", "%7D", "%", "ü🚢", "a:b", "*", "x" * 200]


async def _everything(on: Shelf) -> None:
    """Jobs that come and go in every way there is."""
    settings = QueueSettings(
        failure_queue="failed", keep_done_us=SECOND, keep_dead_us=SECOND, keep_attempts_us=SECOND
    )
    await on.driver.configure("q", settings, now=on.now)
    await on.enqueue(
        *[on.job(max_attempts=9) for _ in range(8)],
        on.job(key="k", idempotency_key="i1"),
        on.job(idempotency_key="i2"),
        on.job(run_at_us=on.now + 5 * SECOND),
        on.job(key="later", run_at_us=on.now + 5 * SECOND),
    )
    await on.enqueue(on.job(key="later", idempotency_key="i3", update=UpdateFlags(run_at="yes")))
    done, dead, retried, released, dropped, stalled, beaten, wanted, keyed, known, moved = await on.reserve(
        100
    )
    await on.enqueue(on.job(key="k", idempotency_key="i4"), on.job())
    await on.driver.cancel([wanted.id], now=on.now)
    await on.driver.extend_lease(
        [Extension(beaten.id, token(beaten), b"half")], lease_for=2 * LEASE, now=on.now
    )
    assert {family for family in TYPES if on.ask("EXISTS", family)} >= set(TYPES) - {
        "done",
        "dead",
        "cancelled",
    } - {
        "finished_job",
        "attempts",
    }
    await on.settle(
        ack(done),
        fail(dead),
        Retry(retried.id, token(retried), on.now + SECOND, 1, BOOM),
        Release(released.id, token(released)),
        Discard(dropped.id, token(dropped), BOOM),  # type: ignore[arg-type]
        Release(wanted.id, token(wanted)),
        Release(keyed.id, token(keyed)),
        ack(known),
        ack(moved),
    )
    for family, kind in TYPES.items():
        if on.ask("EXISTS", family):
            assert on.ask("TYPE", family) == kind.encode(), family
    await on.driver.requeue([dead.id], now=on.now)
    # A row that ends before one in front of it, because its caller's clock is behind.
    (one,) = await on.reserve()
    assert await on.driver.settle([ack(one)], now=on.now - 10) == [None]
    on.now += LEASE
    await on.driver.reclaim(now=on.now)
    assert stalled.id


async def _drain(on: Shelf) -> None:
    for queue in ("q", "failed"):
        on.now += 3 * LEASE
        while held := await on.reserve(100, queue=queue):
            await on.settle(*[ack(job) for job in held])
    page = await on.driver.list_jobs(JobFilter(), now=on.now, limit=1000)
    assert all(job.state.is_terminal for job in page.jobs)


async def test_nothing_but_what_is_documented_remains_when_all_has_ended_and_expired() -> None:
    async with shelf() as on:
        await _everything(on)
        await _drain(on)
        short = QueueSettings(keep_done_us=SECOND, keep_dead_us=SECOND, keep_attempts_us=SECOND)
        await on.driver.configure("failed", short, now=on.now)
        on.now += 3600 * SECOND
        while await on.driver.prune(now=on.now, limit=7):
            pass
        assert on.all_keys() == FOR_GOOD | {"{failed}:settings"}


async def test_nothing_remains_of_purged_jobs_either() -> None:
    async with shelf() as on:
        await _everything(on)
        await _drain(on)
        while await on.driver.purge(JobFilter(), limit=3):
            pass
        log = {"{q}:attempts", "{failed}:attempts", "{q}:late"}
        assert on.all_keys() - log == FOR_GOOD


async def test_looking_at_what_does_not_exist_leaves_no_key() -> None:
    async with shelf() as on:
        driver = on.driver
        assert await on.reserve(10) == []
        assert await driver.reclaim(now=on.now) == 0
        assert await driver.reclaim(now=on.now, queue="q") == 0
        await driver.stats(now=on.now, queue="q")
        await driver.settings("q")
        await driver.get(["x"], now=on.now)
        await driver.list_jobs(JobFilter(queue="q"), now=on.now)
        await driver.read_attempts()
        await driver.job_attempts("x")
        await driver.cancel(["x"], now=on.now)
        await driver.requeue(["x"], now=on.now)
        await driver.purge(JobFilter(queue="q"))
        await driver.prune(now=on.now)
        await driver.wait(["q"], now=on.now, timeout=0)
        await driver.settle([Release("x", "0" * 24 + "q"), Release("x", "short")], now=on.now)
        await driver.extend_lease([Extension("x", "0" * 24 + "q")], lease_for=LEASE, now=on.now)
        assert on.all_keys() == set()


@pytest.mark.parametrize("queue", NAMES)
def test_all_keys_of_a_queue_are_in_one_slot(queue: str) -> None:
    keys = keys_of("", queue)
    assert len(set(keys.all)) == len(FAMILIES)
    assert len({key_slot(key.encode()) for key in (*keys.all, keys.channel)}) == 1


def test_no_two_queues_share_a_key() -> None:
    keys = [key for queue in NAMES for key in keys_of("p:", queue).all]
    assert len(set(keys)) == len(keys)
    assert Store(parse_url("redis://localhost?prefix=p:")).queues_key not in keys


def test_the_names_of_the_keys_are_those_of_seed_002() -> None:
    keys = keys_of("", "mail")
    assert keys["waiting"] == "{mail}:waiting"
    assert keys["active_job"] == "{mail}:active_job"
    assert keys.all[:2] == ("{mail}:waiting", "{mail}:active")


@pytest.mark.parametrize("queue", NAMES)
async def test_a_queue_of_any_name_works(queue: str) -> None:
    async with shelf() as on:
        await on.enqueue(on.job(queue=queue), on.job(queue="other"))
        (held,) = await on.reserve(queue=queue)
        assert held.queue == queue
        await on.settle(ack(held))
        assert {stats.queue for stats in await on.driver.stats(now=on.now)} == {queue, "other"}
        assert [row.queue for row in (await on.driver.read_attempts()).attempts] == [queue]


async def test_a_server_that_lost_its_data_learns_the_names_of_queues_again() -> None:
    async with shelf() as on:
        await on.enqueue(on.job())
        for key in on.all_keys():
            on.server.execute("DEL", on.prefix + key)
        job = on.job()
        await on.enqueue(job, new_ids=True)
        assert [stats.queue for stats in await on.driver.stats(now=on.now)] == ["q"]
        assert (await on.get(job.id)).created_at_us == NOW


@pytest.mark.parametrize("stored", [{"q": "1"}, {"": "1", "q": "1"}, {"": "99"}])
async def test_a_store_of_another_layout_is_refused(stored: dict[str, str]) -> None:
    async with shelf() as on:
        for name, value in stored.items():
            on.server.execute("HSET", f"{on.prefix}taskharbor:queues", name, value)
        other = on.driver.clone()
        with pytest.raises(InvalidRequest, match="another layout") as refused:
            await other.open()
        assert on.driver.options.place in str(refused.value)
        with pytest.raises(InvalidRequest, match="another layout"):
            await on.enqueue(on.job())
        assert on.all_keys() == {"taskharbor:queues"}
        assert on.server.execute("HLEN", f"{on.prefix}taskharbor:queues") == len(stored)


def test_a_change_of_the_layout_has_another_number() -> None:
    """A change of `layout.lua` that stored jobs show needs a new LAYOUT_VERSION. Both are noted here."""
    code = re.sub(r"\s*--.*", "", lua("layout"))
    digest = hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest()[:8]
    assert (LAYOUT["LAYOUT_VERSION"], digest) == (2, "630b3a20")
