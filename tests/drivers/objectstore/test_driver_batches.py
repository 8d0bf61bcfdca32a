"""A batch is one step in every queue it concerns, whatever the handle knows of its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from drivers.objectstore.faulty_blobs import FaultyBlobs, Weather
from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.jobs_here import NOW, a_job
from taskharbor.drivers.contract import Ack, JobFilter
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.options import Options
from taskharbor.errors import InvalidRequest, JobNotFound
from taskharbor.jobs import SECOND, JobRecord, JobState


def run(test: Callable[[ObjectStoreDriver, ObjectStoreDriver, Weather], Awaitable[None]]) -> None:
    async def with_handles() -> None:
        weather = Weather()
        blobs = FaultyBlobs(HeldBlobs(), weather)
        first = ObjectStoreDriver(lambda: blobs, Options(poll=None))
        async with first, first.clone() as second:
            await test(first, second, weather)

    asyncio.run(with_handles())


async def _reserved(driver: ObjectStoreDriver, queue: str = "q") -> JobRecord:
    (job,) = await driver.reserve(queue, limit=1, lease_for=SECOND, now=NOW, worker="w")
    return job


def test_a_settle_of_own_and_of_strange_jobs_is_one_write() -> None:
    """One that was split in two would let others act in between, and see half of it."""

    async def test(first: ObjectStoreDriver, second: ObjectStoreDriver, weather: Weather) -> None:
        await first.enqueue([a_job(), a_job(), a_job(queue="other")], now=NOW)
        jobs = [await _reserved(first), await _reserved(second)]
        before = weather.writes
        answers = await second.settle([Ack(job.id, job.token or "") for job in jobs], now=NOW)
        assert answers == [None, None]
        assert weather.writes - before == 1

    run(test)


def test_an_id_that_was_removed_in_one_queue_and_accepted_by_another_is_found_there() -> None:
    async def test(first: ObjectStoreDriver, second: ObjectStoreDriver, weather: Weather) -> None:
        job = a_job()
        await first.enqueue([job], now=NOW)
        held = await _reserved(first)
        await first.settle([Ack(held.id, held.token or "")], now=NOW)
        await second.purge(JobFilter())
        await second.enqueue([a_job(id=job.id, queue="other")], now=NOW)
        (found,) = await first.get([job.id], now=NOW)
        assert found is not None
        assert (found.queue, found.state) == ("other", JobState.READY)
        (unknown,) = await first.cancel(["nobody"], now=NOW)
        assert isinstance(unknown, JobNotFound)

    run(test)


def test_a_batch_over_several_queues_is_refused_before_any_part_of_it_is_stored() -> None:
    async def test(first: ObjectStoreDriver, second: ObjectStoreDriver, weather: Weather) -> None:
        bad = a_job(queue="other")
        bad.payload = "text"  # type: ignore[assignment]
        with pytest.raises(InvalidRequest):
            await first.enqueue([a_job(), bad], now=NOW)
        assert await second.stats(now=NOW) == []

    run(test)


def test_a_batch_over_several_queues_is_listed_in_its_order() -> None:
    async def test(first: ObjectStoreDriver, second: ObjectStoreDriver, weather: Weather) -> None:
        jobs = [a_job(queue=f"q{n % 3}") for n in range(9)]
        await first.enqueue(jobs, now=NOW)
        listed = (await second.list_jobs(JobFilter(), now=NOW)).jobs
        assert [job.id for job in listed] == [job.id for job in reversed(jobs)]

    run(test)


def test_an_empty_batch_costs_nothing() -> None:
    async def test(first: ObjectStoreDriver, second: ObjectStoreDriver, weather: Weather) -> None:
        before = weather.reads, weather.writes
        assert await first.enqueue([], now=NOW) == []
        assert await first.settle([], now=NOW) == []
        assert await first.extend_lease([], lease_for=SECOND, now=NOW) == []
        assert await first.get([], now=NOW) == []
        assert (weather.reads, weather.writes) == before

    run(test)
