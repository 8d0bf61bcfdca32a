"""Deaths are told of even if the one who was to tell of them died as well, and told of once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from drivers.redis.redis_shelf import LEASE, Shelf, ack, fail, shelf
from taskharbor.drivers.contract import FailurePayload, JobFilter, QueueSettings
from taskharbor.drivers.redis import leases
from taskharbor.drivers.redis.enqueue import deliver
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import BackendUnavailable


async def _dead_and_untold(on: Shelf, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> list[str]:
    """Jobs that died while their worker did: written down, but not told."""

    async def dies(store: Store, queue: str) -> None:
        raise BackendUnavailable("the client is gone")

    await on.driver.configure("q", QueueSettings(failure_queue="failed"), now=on.now)
    await on.enqueue(*[on.job(payload=b"%d" % n) for n in range(count)])
    held = await on.reserve(count)
    with monkeypatch.context() as patch:
        patch.setattr(leases, "deliver", dies)
        with pytest.raises(BackendUnavailable):
            await on.driver.settle([fail(job) for job in held], now=on.now)
    assert on.ask("LLEN", "outbox") == count
    return [job.id for job in held]


async def _told(on: Shelf) -> list[str]:
    page = await on.driver.list_jobs(JobFilter(queue="failed"), now=on.now, limit=1000)
    return sorted(msgspec.json.decode(job.payload, type=FailurePayload).job_id for job in page.jobs)


async def _by_reserve(on: Shelf) -> None:
    assert await on.reserve() == []


async def _by_settle(on: Shelf) -> None:
    (other,) = await on.reserve()
    await on.settle(ack(other))


async def _by_reclaim(on: Shelf) -> None:
    await on.reserve()
    on.now += LEASE
    assert await on.driver.reclaim(now=on.now) == 1


@pytest.mark.parametrize("next_one", [_by_reserve, _by_settle, _by_reclaim])
async def test_what_a_client_left_untold_is_told_by_the_next_one(
    next_one: Callable[[Shelf], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shelf() as on:
        ids = await _dead_and_untold(on, monkeypatch)
        if next_one is not _by_reserve:
            await on.enqueue(on.job())
        await next_one(on)
        assert await _told(on) == sorted(ids)
        assert on.ask("EXISTS", "outbox") == 0


async def test_two_who_tell_at_once_tell_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelf() as on:
        ids = await _dead_and_untold(on, monkeypatch, count=250)
        store = on.driver._store
        await asyncio.gather(*[deliver(store, "q") for _ in range(4)])
        assert await _told(on) == sorted(ids)
        assert on.ask("EXISTS", "outbox") == 0


async def test_a_settle_that_is_repeated_after_the_outage_tells_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with shelf() as on:
        await on.driver.configure("q", QueueSettings(failure_queue="failed"), now=on.now)
        held = await on.lease(on.job())
        lost = True

        async def dies_once(store: Store, queue: str) -> None:
            nonlocal lost
            if lost:
                lost = False
                raise BackendUnavailable("no answer")
            await deliver(store, queue)

        monkeypatch.setattr(leases, "deliver", dies_once)
        with pytest.raises(BackendUnavailable):
            await on.driver.settle([fail(held)], now=on.now)
        await on.settle(fail(held))
        assert await _told(on) == [held.id]


async def test_what_was_leased_is_not_lost_when_telling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelf() as on:
        await _dead_and_untold(on, monkeypatch)
        await on.enqueue(job := on.job())

        async def dies(store: Store, queue: str) -> None:
            raise BackendUnavailable("no answer")

        monkeypatch.setattr(leases, "deliver", dies)
        assert [held.id for held in await on.reserve()] == [job.id]
