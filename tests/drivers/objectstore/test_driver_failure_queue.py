"""A death and its notice are in different objects: the notice waits in the first until it is in the second."""

from __future__ import annotations

import asyncio

import pytest

from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.jobs_here import NOW, a_job
from taskharbor.drivers.contract import FAILURE_TYPE, Fail, JobFilter, QueueSettings
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore import queue as queues
from taskharbor.drivers.objectstore.options import Options
from taskharbor.drivers.objectstore.queue import Store
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState

BOOM = Failure("ValueError", "boom")


def driver_on(blobs: HeldBlobs) -> ObjectStoreDriver:
    return ObjectStoreDriver(lambda: blobs, Options(poll=None))


async def _a_held_job(driver: ObjectStoreDriver) -> JobRecord:
    await driver.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
    await driver.enqueue([a_job(payload=b"precious")], now=NOW)
    (held,) = await driver.reserve("q", limit=1, lease_for=SECOND, now=NOW, worker="w")
    return held


async def _notices(driver: ObjectStoreDriver) -> list[JobRecord]:
    page = await driver.list_jobs(JobFilter(queue="failed"), now=NOW)
    assert all(job.type == FAILURE_TYPE for job in page.jobs)
    return page.jobs


async def _outbox(driver: ObjectStoreDriver) -> int:
    return await driver.store.shards_of("q")[0].state.look(lambda image: len(image.outbox()))


async def test_who_is_told_of_a_death_finds_its_notice_in_the_failure_queue() -> None:
    blobs = HeldBlobs()
    async with driver_on(blobs) as driver, driver_on(blobs) as other:
        held = await _a_held_job(driver)
        assert await driver.settle([Fail(held.id, held.token or "", 1, BOOM)], now=NOW) == [None]
        assert len(await _notices(other)) == 1
        assert await _outbox(other) == 0


def _put_in_outbox(transaction: Transaction, notice: JobRecord) -> None:
    assert transaction.outbox is not None
    transaction.outbox.append(notice)


def _never_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deliver(self: Store, notices: list[JobRecord]) -> None:
        raise BackendUnavailable("the process dies here")

    monkeypatch.setattr(Store, "deliver", deliver)


async def test_a_crash_before_the_notice_is_delivered_loses_none_and_makes_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever comes to the queue next finds it and brings it, once."""

    blobs = HeldBlobs()
    with monkeypatch.context() as patch:
        _never_delivers(patch)
        async with driver_on(blobs) as driver:
            held = await _a_held_job(driver)
            with pytest.raises(BackendUnavailable):
                await driver.settle([Fail(held.id, held.token or "", 1, BOOM)], now=NOW)
            assert await _notices(driver) == []
    async with driver_on(blobs) as one, driver_on(blobs) as two:
        assert await asyncio.gather(one.reclaim(now=NOW), two.reclaim(now=NOW)) == [0, 0]
        await asyncio.gather(one.store.settled(), two.store.settled())
        assert await _outbox(one) == 0
        assert len(await _notices(two)) == 1
        (stats,) = await one.stats(now=NOW, queue="q")
        assert stats.counts[JobState.DEAD] == 1


async def test_a_crash_after_delivery_and_before_it_is_struck_off_makes_no_second_one() -> None:
    blobs = HeldBlobs()
    async with driver_on(blobs) as driver:
        held = await _a_held_job(driver)
        await driver.settle([Fail(held.id, held.token or "", 1, BOOM)], now=NOW)
        (notice,) = await _notices(driver)
        # As if the last write had not happened.
        await driver.store.shards_of("q")[0].state.change(
            lambda image: image.change(lambda transaction: _put_in_outbox(transaction, notice))
        )
        await driver.store.settled()
        assert await _outbox(driver) == 0
        assert [job.id for job in await _notices(driver)] == [notice.id]


async def test_a_handle_whose_delivery_failed_tries_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "_DELIVER_AGAIN", 0.0)
    deliver = Store.deliver

    tries = 0
    was_delivered = asyncio.Event()

    async def only_the_second_time(self: Store, notices: list[JobRecord]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise BackendUnavailable("no answer")
        await deliver(self, notices)
        was_delivered.set()

    monkeypatch.setattr(Store, "deliver", only_the_second_time)
    async with driver_on(HeldBlobs()) as driver:
        held = await _a_held_job(driver)
        with pytest.raises(BackendUnavailable):
            await driver.settle([Fail(held.id, held.token or "", 1, BOOM)], now=NOW)
        # The caller repeats a call whose answer is unclear, and the job is dead already.
        assert await driver.settle([Fail(held.id, held.token or "", 1, BOOM)], now=NOW) == [None]
        await was_delivered.wait()
        await driver.store.settled()
        assert len(await _notices(driver)) == 1


async def test_a_claim_is_answered_where_the_failure_queue_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The jobs are leased by then: nobody would run them, and each claim that failed would let more of them die."""

    async with driver_on(HeldBlobs()) as driver:
        await driver.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
        await driver.enqueue([a_job(max_attempts=1), a_job(max_attempts=1)], now=NOW)
        await driver.reserve("q", limit=1, lease_for=SECOND, now=NOW, worker="w")
        with monkeypatch.context() as patch:
            _never_delivers(patch)
            claimed = await driver.reserve("q", limit=9, lease_for=SECOND, now=NOW + SECOND, worker="w")
            assert [job.state for job in claimed] == [JobState.INFLIGHT]
        assert await _outbox(driver) == 1
