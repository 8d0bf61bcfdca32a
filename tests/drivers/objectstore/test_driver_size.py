"""A state that grows too large: said early, refused late, and never in the way of what makes it smaller."""

from __future__ import annotations

import asyncio

import pytest

from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.jobs_here import NOW, a_job
from taskharbor.drivers.contract import Ack
from taskharbor.drivers.objectstore import ObjectStoreDriver, cas, queue
from taskharbor.drivers.objectstore.options import Options
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, JobState


def test_a_large_state_is_warned_of_once_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cas, "WARN_BYTES", 2000)

    async def test() -> None:
        async with ObjectStoreDriver(HeldBlobs, Options(poll=None)) as driver:
            for _ in range(5):
                await driver.enqueue([a_job(payload=b"x" * 1000)], now=NOW)

    asyncio.run(test())
    (record,) = [record for record in caplog.records if "MiB" in record.getMessage()]
    assert "shards" in record.getMessage()


async def test_beyond_the_limit_nothing_is_accepted_and_everything_else_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue, "MAX_BYTES", 100_000)

    async with ObjectStoreDriver(HeldBlobs, Options(poll=None, segment_rows=2)) as driver:
        await driver.enqueue([a_job(payload=b"x" * 20_000) for _ in range(3)], now=NOW)
        with pytest.raises(InvalidRequest, match="is full"):
            await driver.enqueue([a_job(queue="other"), a_job(payload=b"x" * 20_000)], now=NOW)
        assert len(await driver.stats(now=NOW)) == 1, "a part of a refused batch was stored"
        held = await driver.reserve("q", limit=2, lease_for=SECOND, now=NOW, worker="w")
        assert await driver.settle([Ack(job.id, job.token or "") for job in held], now=NOW) == [None] * 2
        await driver.store.settled()
        await driver.enqueue([a_job(payload=b"x" * 20_000)], now=NOW)
        (stats,) = await driver.stats(now=NOW)
        assert (stats.counts[JobState.DONE], stats.counts[JobState.READY]) == (2, 2)


async def test_the_limit_holds_for_every_handle_and_by_what_the_object_says_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue, "MAX_BYTES", 100_000)

    blobs = HeldBlobs()
    first = ObjectStoreDriver(lambda: blobs, Options(poll=None, segment_rows=1))
    async with first, first.clone() as second:
        jobs = [a_job(payload=b"x" * 20_000) for _ in range(3)]
        await first.enqueue(jobs, now=NOW)
        with pytest.raises(InvalidRequest, match="is full"):
            await second.enqueue([a_job(payload=b"x" * 20_000)], now=NOW)
        assert [one.existed for one in await second.enqueue(jobs, now=NOW)] == [True] * 3, "a repeated try"
        held = await first.reserve("q", limit=2, lease_for=SECOND, now=NOW, worker="w")
        await first.settle([Ack(job.id, job.token or "") for job in held], now=NOW)
        await first.store.settled()
        await second.enqueue([a_job(payload=b"x" * 20_000)], now=NOW)
