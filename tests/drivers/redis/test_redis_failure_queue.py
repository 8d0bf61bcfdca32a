"""Deaths are told of even if the one who was to tell of them died as well, and told of once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from drivers.redis.redis_shelf import LEASE, Shelf, ack, fail
from taskharbor.drivers.contract import FailurePayload, JobFilter, QueueSettings
from taskharbor.drivers.redis import leases
from taskharbor.drivers.redis.enqueue import deliver
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import BackendUnavailable


async def _dies(store: Store, queue: str) -> None:
    raise BackendUnavailable("the client is gone")


async def _dead_and_untold(on: Shelf, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> list[str]:
    """Jobs that died while their worker did: written down, but not told."""
    await on.driver.configure("q", QueueSettings(failure_queue="failed"), now=on.now)
    held = await on.claimed(count)
    with monkeypatch.context() as patch:
        patch.setattr(leases, "deliver", _dies)
        with pytest.raises(BackendUnavailable):
            await on.driver.settle([fail(job) for job in held], now=on.now)
    assert on.ask("LLEN", "outbox") == count
    return sorted(job.id for job in held)


async def _told(on: Shelf) -> list[str]:
    page = await on.driver.list_jobs(JobFilter(queue="failed"), now=on.now, limit=1000)
    assert on.ask("EXISTS", "outbox") == 0
    return sorted(msgspec.json.decode(job.payload, type=FailurePayload).job_id for job in page.jobs)


async def _by_reserve(on: Shelf) -> None:
    assert await on.reserve() == []


async def _by_settle(on: Shelf) -> None:
    await on.settle(*map(ack, await on.claimed(1)))


async def _by_reclaim(on: Shelf) -> None:
    await on.enqueue(on.job())
    await on.reserve()
    on.now += LEASE
    assert await on.driver.reclaim(now=on.now) == 1


async def _by_four_at_once(on: Shelf) -> None:
    await asyncio.gather(*[deliver(on.driver._store, "q") for _ in range(4)])


@pytest.mark.parametrize("next_one", [_by_reserve, _by_settle, _by_reclaim, _by_four_at_once])
async def test_what_a_client_left_untold_is_told_once_by_the_next_one(
    on: Shelf, next_one: Callable[[Shelf], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await _dead_and_untold(on, monkeypatch, count=250 if next_one is _by_four_at_once else 3)
    await next_one(on)
    assert await _told(on) == ids


async def test_what_was_leased_is_not_lost_when_telling_fails(
    on: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _dead_and_untold(on, monkeypatch)
    await on.enqueue(job := on.job())
    monkeypatch.setattr(leases, "deliver", _dies)
    assert [held.id for held in await on.reserve()] == [job.id]
