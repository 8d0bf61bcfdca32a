"""The queues of a store: batches, shards, states that grow too large, deaths and their notices, and a broker that leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drivers.objectstore.fake_blobs import FaultyBlobs, HeldBlobs, Weather
from drivers.objectstore.harness import ack, claim, counts, driver_on, jobs_of
from drivers.objectstore.marks import FixedTerm
from needing import Entered
from records import NOW, make_record, present
from taskharbor.drivers.contract import FAILURE_TYPE, Fail, JobFilter, QueueSettings
from taskharbor.drivers.engine import inspect
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.objectstore import ObjectStoreDriver, queue
from taskharbor.drivers.objectstore.catalog import state_name
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.drivers.objectstore.queue import Store
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobNotFound
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState
from taskharbor_testkit.waits import waits_of

DONE, READY, DEAD, INFLIGHT = JobState.DONE, JobState.READY, JobState.DEAD, JobState.INFLIGHT
BOOM = Failure("ValueError", "boom")


@pytest.fixture
def blobs() -> HeldBlobs:
    return HeldBlobs()


@pytest.fixture
def weather() -> Weather:
    return Weather()


@pytest.fixture
def driver(blobs: HeldBlobs, weather: Weather) -> Entered:
    return Entered(driver_on(FaultyBlobs(blobs, weather)))


@pytest.fixture
def sharded(blobs: HeldBlobs) -> Entered:
    return Entered(driver_on(blobs, shards=3, segment_rows=10, merge=2))


# -- batches ----------------------------------------------------------------------------------------------


async def test_a_settle_of_own_and_of_strange_jobs_is_one_write(
    driver: ObjectStoreDriver, weather: Weather
) -> None:
    """If it were split in two, others could act in between, and see half of it."""
    async with driver.clone() as second:
        await driver.enqueue([*jobs_of(2), make_record(queue="other")], now=NOW)
        held = await claim(driver) + await claim(second)
        before = weather.writes
        await ack(second, held)
        assert weather.writes - before == 1


async def test_an_id_that_was_removed_in_one_queue_and_accepted_by_another_is_found_there(
    driver: ObjectStoreDriver,
) -> None:
    async with driver.clone() as second:
        await driver.enqueue([make_record("a")], now=NOW)
        await ack(driver, await claim(driver))
        await second.purge(JobFilter())
        await second.enqueue([make_record("a", queue="other")], now=NOW)
        found = present((await driver.get(["a"], now=NOW))[0])
        assert (found.queue, found.state) == ("other", READY)
        (unknown,) = await driver.cancel(["nobody"], now=NOW)
        assert isinstance(unknown, JobNotFound)


async def test_a_waiting_handle_sees_the_jobs_of_another_process(tmp_path: Path) -> None:
    """Another process does not notify, so only a look at the object shows its jobs."""

    class Elsewhere(LocalFiles):
        def __init__(self) -> None:
            super().__init__(tmp_path / "store")
            self.place += " of another process"

    async with (
        connect(f"file://{tmp_path}/store?poll=0.02") as driver,
        ObjectStoreDriver(Elsewhere) as other,
    ):
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        assert not await waits_of(driver)(["q"], now=NOW, timeout=0)
        waiter = asyncio.create_task(waits_of(driver)(["q"], now=NOW, timeout=60))
        (made,) = await other.enqueue([make_record()], now=NOW)
        assert await waiter
        assert [job.id for job in await claim(driver, 5)] == [made.id]


# -- shards -----------------------------------------------------------------------------------------------


async def test_jobs_are_spread_over_all_shards_and_counted_and_paged_as_one_queue(
    sharded: ObjectStoreDriver, blobs: HeldBlobs
) -> None:
    jobs = jobs_of(45)
    ids = [job.id for job in jobs]
    await sharded.enqueue(jobs, now=NOW, new_ids=True)
    assert all(state_name("q", shard) in blobs.objects for shard in range(3))
    (stats,) = await sharded.stats(now=NOW)
    assert (stats.counts[READY], stats.head_run_at_us) == (45, NOW)
    assert [job and job.id for job in await sharded.get(ids, now=NOW)] == ids
    await ack(sharded, await claim(sharded, 100))
    await sharded.store.settled()
    listed: list[str] = []
    cursor: str | None = None
    while cursor or not listed:
        page = await sharded.list_jobs(JobFilter(), now=NOW, limit=7, cursor=cursor)
        listed += [job.id for job in page.jobs]
        cursor = page.cursor
    assert listed == ids[::-1], "newest accepted first"
    rows: list[str] = []
    after: str | None = None
    while (log := await sharded.read_attempts(after=after, limit=7)).attempts:
        rows += [row.job_id for row in log.attempts]
        after = log.cursor
    assert sorted(rows) == sorted(ids)


async def test_one_reserve_goes_round_the_shards_until_it_has_enough(sharded: ObjectStoreDriver) -> None:
    await sharded.enqueue([make_record(priority=n % 3) for n in range(30)], now=NOW)
    first, rest = await claim(sharded, 20), await claim(sharded, 20)
    assert (len(first), len(rest)) == (20, 10)
    assert len({job.id for job in first + rest}) == 30
    assert [job.priority for job in first] == sorted((job.priority for job in first), reverse=True)


async def test_w_is_divided_and_never_exceeded_by_the_queue(sharded: ObjectStoreDriver) -> None:
    with pytest.raises(InvalidRequest, match="3 shards"):
        await sharded.configure("q", QueueSettings(max_inflight=2), now=NOW)
    assert await sharded.stats(now=NOW) == []
    await sharded.configure("q", QueueSettings(max_inflight=5), now=NOW)
    await sharded.enqueue(jobs_of(60), now=NOW)
    async with sharded.clone() as two, sharded.clone() as three:
        parts = await asyncio.gather(*(claim(handle, 5) for handle in (sharded, two, three)))
    assert sum(map(len, parts)) == 5


async def test_jobs_of_a_key_meet_and_an_id_is_known_in_whatever_shard_it_is(
    sharded: ObjectStoreDriver,
) -> None:
    for name in ("a", "b", "c", "d", "e"):
        for field in ("key", "idempotency_key"):
            first, second = await sharded.enqueue(jobs_of(2, **{field: name}), now=NOW)
            assert (second.id, second.existed) == (first.id, True)
    assert len(await claim(sharded, 100)) == 10
    # The same id with another key leads elsewhere, and must not make a second job.
    for key in ("v", "w", "x", "y", None):
        (again,) = await sharded.enqueue([make_record(first.id, key=key)], now=NOW)
        assert (again.id, again.existed) == (first.id, True)


async def test_deaths_are_told_of_and_retention_and_purge_reach_every_shard(
    sharded: ObjectStoreDriver,
) -> None:
    await sharded.configure("q", QueueSettings(failure_queue="failed", keep_dead_us=0), now=NOW)
    await sharded.enqueue(jobs_of(12), now=NOW)
    held = await claim(sharded, 12)
    await sharded.settle([Fail(job.id, job.token or "", 1, BOOM) for job in held], now=NOW)
    assert await counts(sharded, READY, queue="failed") == [12]
    assert await sharded.purge(JobFilter(queue="q"), limit=5) == 5
    assert await sharded.prune(now=NOW + SECOND, limit=100) == 7


async def test_a_waiter_hears_of_any_shard(sharded: ObjectStoreDriver) -> None:
    async with sharded.clone() as other:
        wait = waits_of(other)
        for _ in range(6):
            while await wait(["q"], now=NOW, timeout=0):
                pass
            waiter = asyncio.create_task(wait(["q"], now=NOW, timeout=30))
            await asyncio.sleep(0)
            await sharded.enqueue([make_record()], now=NOW)
            assert await waiter


async def test_a_damaged_shard_keeps_nobody_from_the_jobs_of_the_others(
    sharded: ObjectStoreDriver, blobs: HeldBlobs
) -> None:
    """Jobs that a claim leased before it failed were handed to nobody, until they were dead."""
    await sharded.enqueue(jobs_of(60), now=NOW, new_ids=True)
    await sharded.store.settled()
    blobs.keep(state_name("q", 1), b"not what was written")
    async with sharded.clone() as other:
        assert await claim(other, 60)
        for shard in (0, 2):
            look = other.store.shards_of("q")[shard].look
            (stats,) = await look(lambda transaction: inspect.stats(transaction, NOW, "q"))
            assert stats.counts[READY] == 0


# -- a state that grows too large -------------------------------------------------------------------------


async def test_beyond_the_limit_nothing_is_accepted_and_everything_else_works(
    driver: ObjectStoreDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every handle, and by the size that the object has now."""
    monkeypatch.setattr(queue, "MAX_BYTES", 100_000)
    large: dict[str, Any] = {"payload": b"x" * 20_000}
    async with driver_on(driver.store.blobs, segment_rows=2) as second:
        jobs = jobs_of(3, **large)
        await driver.enqueue(jobs, now=NOW)
        for handle in (driver, second):
            with pytest.raises(InvalidRequest, match="is full"):
                await handle.enqueue([make_record(queue="other"), make_record(**large)], now=NOW)
        assert len(await driver.stats(now=NOW)) == 1, "a part of a refused batch was stored"
        assert [one.existed for one in await second.enqueue(jobs, now=NOW)] == [True] * 3, "a repeated try"
        await ack(second, await claim(second, 2))
        await second.store.settled()
        await driver.enqueue([make_record(**large)], now=NOW)
        assert await counts(driver, DONE, READY) == [2, 2]


# -- a death and its notice are in different objects ------------------------------------------------------


async def held_job(driver: ObjectStoreDriver) -> JobRecord:
    await driver.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
    await driver.enqueue([make_record(payload=b"precious")], now=NOW)
    (held,) = await claim(driver)
    return held


async def fail(driver: ObjectStoreDriver, held: JobRecord) -> None:
    assert await driver.settle([Fail(held.id, held.token or "", 1, BOOM)], now=NOW) == [None]


async def notices(driver: ObjectStoreDriver) -> list[str]:
    page = await driver.list_jobs(JobFilter(queue="failed"), now=NOW)
    assert all(job.type == FAILURE_TYPE for job in page.jobs)
    return [job.id for job in page.jobs]


async def outbox(driver: ObjectStoreDriver) -> int:
    return await driver.store.shards_of("q")[0].state.look(lambda image: len(image.outbox()))


def never_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deliver(self: Store, notices: list[JobRecord]) -> None:
        raise BackendUnavailable("the process dies here")

    monkeypatch.setattr(Store, "deliver", deliver)


async def test_a_death_is_answered_when_its_notice_is_in_the_failure_queue_and_it_is_told_once(
    driver: ObjectStoreDriver,
) -> None:
    """Also after a crash between the delivery and its removal from the outbox."""
    await fail(driver, await held_job(driver))
    async with driver.clone() as other:
        (told,) = await notices(other)
        assert await outbox(other) == 0
        (notice,) = await other.get([told], now=NOW)

    def put_back(transaction: Transaction) -> None:
        present(transaction.outbox).append(present(notice))

    await driver.store.shards_of("q")[0].state.change(lambda image: image.change(put_back))
    await driver.store.settled()
    assert await outbox(driver) == 0
    assert await notices(driver) == [told]


async def test_a_crash_before_the_notice_is_delivered_loses_none_and_makes_no_second_one(
    blobs: HeldBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next handle on the queue finds it and brings it, once."""
    with monkeypatch.context() as patch:
        never_deliver(patch)
        async with driver_on(blobs) as driver:
            held = await held_job(driver)
            with pytest.raises(BackendUnavailable):
                await fail(driver, held)
            assert await notices(driver) == []
    async with driver_on(blobs) as one, driver_on(blobs) as two:
        assert list(await asyncio.gather(one.reclaim(now=NOW), two.reclaim(now=NOW))) == [0, 0]
        await asyncio.gather(one.store.settled(), two.store.settled())
        assert await outbox(one) == 0
        assert len(await notices(two)) == 1
        assert await counts(one, DEAD) == [1]


async def test_a_handle_whose_delivery_failed_tries_again_by_itself(
    driver: ObjectStoreDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_DELIVER_AGAIN", 0.0)
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
    held = await held_job(driver)
    with pytest.raises(BackendUnavailable):
        await fail(driver, held)
    # The caller repeats a call whose answer is unclear, and the job is dead already.
    await fail(driver, held)
    await was_delivered.wait()
    await driver.store.settled()
    assert len(await notices(driver)) == 1


async def test_a_claim_is_answered_where_the_failure_queue_cannot_be_told(
    driver: ObjectStoreDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs are leased by then: nobody would run them, and each claim that failed would let more of them die."""
    await driver.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
    await driver.enqueue(jobs_of(2, max_attempts=1), now=NOW)
    await claim(driver)
    with monkeypatch.context() as patch:
        never_deliver(patch)
        assert [job.state for job in await claim(driver, 9, now=NOW + SECOND)] == [INFLIGHT]
    assert await outbox(driver) == 1


# -- a broker that leads ----------------------------------------------------------------------------------


@asynccontextmanager
async def term_that_nobody_contests(blobs: FaultyBlobs) -> AsyncIterator[ObjectStoreDriver]:
    async with driver_on(blobs) as driver:
        driver.store.lead(FixedTerm(1))
        yield driver


@pytest.fixture
def leading(blobs: HeldBlobs, weather: Weather) -> Entered:
    return Entered(term_that_nobody_contests(FaultyBlobs(blobs, weather)))


async def test_a_leader_answers_from_memory(leading: ObjectStoreDriver, weather: Weather) -> None:
    await leading.enqueue([make_record("a")], now=NOW)
    reads, writes = weather.reads, weather.writes
    assert len(await leading.stats(now=NOW)) == 1
    assert (await leading.get(["a", "unknown"], now=NOW))[1] is None
    assert len((await leading.list_jobs(JobFilter(), now=NOW)).jobs) == 1
    other = leading.reserve("q", limit=5, lease_for=SECOND, now=NOW, worker="w", types=["other"])
    assert await other == []
    assert await leading.reclaim(now=NOW) == 0
    assert (await leading.read_attempts()).attempts == []
    assert (weather.reads, weather.writes) == (reads, writes)


async def test_calls_of_many_clients_share_few_writes(leading: ObjectStoreDriver, weather: Weather) -> None:
    await leading.enqueue([make_record()], now=NOW)
    before = weather.writes
    await asyncio.gather(*(leading.enqueue(jobs_of(5), now=NOW) for _ in range(40)))
    # The first to come goes at once, all others while that is under way.
    assert weather.writes - before <= 2
    assert await counts(leading, READY) == [201]

    async def client() -> None:
        for _ in range(4):
            await leading.enqueue(jobs_of(5), now=NOW, new_ids=True)
            await ack(leading, await claim(leading, 5))

    before = weather.writes
    await asyncio.gather(*(client() for _ in range(20)))
    (stats,) = await leading.stats(now=NOW)
    assert stats.done_total == 400
    assert (weather.writes - before) / 400 < 0.1


async def test_leases_that_are_over_end_with_any_write_and_their_deaths_are_told_of(
    leading: ObjectStoreDriver,
) -> None:
    """Nobody reserves or sweeps: an enqueue alone brings it about."""
    time = [NOW]
    leading.expire_in_every_pass(lambda: time[0])
    await leading.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
    await leading.enqueue([make_record(max_attempts=1), make_record()], now=NOW)
    await claim(leading, 2)
    time[0] += SECOND
    await leading.enqueue([make_record()], now=time[0])
    await leading.store.settled()
    assert await counts(leading, DEAD, READY, INFLIGHT, now=time[0]) == [1, 2, 0]
    (notice,) = await claim(leading, 5, queue="failed", now=time[0])
    assert notice.type == FAILURE_TYPE
