"""A handle on a store: its URL and options, batches, shards, states that grow too large, deaths and their notices, and a broker
that leads."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

from drivers.objectstore.fake_blobs import FaultyBlobs, HeldBlobs, Weather
from drivers.objectstore.harness import ack, claim, counts, driver_on, finish, jobs_of
from drivers.objectstore.marks import FixedTerm
from needing import Entered
from records import NOW, make_record, present
from taskharbor.drivers.contract import FAILURE_TYPE, Fail, JobFilter, QueueSettings
from taskharbor.drivers.engine import inspect
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.objectstore import ObjectStoreDriver, queue
from taskharbor.drivers.objectstore.catalog import state_name
from taskharbor.drivers.objectstore.options import parse_url
from taskharbor.drivers.objectstore.queue import Store
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest
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


# -- queues that are not there --------------------------------------------------------------------------


async def test_queues_that_are_only_asked_for_take_no_memory(sharded: ObjectStoreDriver) -> None:
    """Whoever may claim can name any number of queues."""
    await sharded.enqueue(jobs_of(100), now=NOW)
    waiting = asyncio.ensure_future(sharded.wait(["early"], now=NOW, timeout=30))
    for number in range(200):
        assert await claim(sharded, queue=f"q{number}") == []
        assert not (await sharded.settings(f"s{number}")).paused
    held = [shard for shard in sharded.store._shards.values() if shard.state._held is not None]
    assert len(held) <= 2 * 64
    assert {shard for shard in held if shard.queue == "q"} == {*sharded.store.shards_of("q")}
    await sharded.enqueue(jobs_of(1, queue="early"), now=NOW)
    assert (await waiting).woken
    assert len(await claim(sharded, queue="early")) == 1
    assert len(await claim(sharded, 100)) == 100


# -- batches ----------------------------------------------------------------------------------------------


async def test_a_settle_or_an_enqueue_is_one_write(driver: ObjectStoreDriver, weather: Weather) -> None:
    """If a settle were split in two, others could act in between, and see half of it."""
    async with driver.clone() as second:
        await driver.enqueue([*jobs_of(2), make_record(queue="other")], now=NOW)
        held = await claim(driver) + await claim(second)
        before = weather.writes
        await ack(second, held)
        assert weather.writes - before == 1
        before, reads = weather.writes, weather.reads
        await second.enqueue(jobs_of(2), now=NOW, new_ids=True)
        assert (weather.writes - before, weather.reads - reads) == (1, 0), "the queue is known"


async def test_an_id_removed_here_and_accepted_there_is_found(driver: ObjectStoreDriver) -> None:
    async with driver.clone() as second:
        await driver.enqueue([make_record("a")], now=NOW)
        await ack(driver, await claim(driver))
        await second.purge(JobFilter())
        await second.enqueue([make_record("a", queue="other")], now=NOW)
        found = present((await driver.get(["a"], now=NOW))[0])
        assert (found.queue, found.state) == ("other", READY)


async def test_a_waiting_handle_sees_the_jobs_of_another_process(blobs: HeldBlobs, weather: Weather) -> None:
    """Another process does not notify, so only a look at the object shows its jobs."""
    elsewhere = FaultyBlobs(blobs, weather)
    elsewhere.place += " of another process"
    async with driver_on(blobs, poll=0.02) as driver, driver_on(elsewhere) as other:
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        assert not await waits_of(driver)(["q"], now=NOW, timeout=0)
        waiter = asyncio.create_task(waits_of(driver)(["q"], now=NOW, timeout=60))
        (made,) = await other.enqueue([make_record()], now=NOW)
        assert await waiter
        assert [job.id for job in await claim(driver, 5)] == [made.id]


# -- shards -----------------------------------------------------------------------------------------------


async def test_shards_are_one_queue_to_its_callers(sharded: ObjectStoreDriver, blobs: HeldBlobs) -> None:
    """The conformance kit shows the rest: `test_objectstore_sharded`."""
    jobs = [make_record(priority=n % 3) for n in range(45)]
    ids = [job.id for job in jobs]
    await sharded.enqueue(jobs, now=NOW, new_ids=True)
    assert all(state_name("q", shard) in blobs.objects for shard in range(3))
    (stats,) = await sharded.stats(now=NOW)
    assert (stats.counts[READY], stats.head_run_at_us) == (45, NOW)
    assert [job and job.id for job in await sharded.get(ids, now=NOW)] == ids
    first, rest = await claim(sharded, 30), await claim(sharded, 30)
    assert (len(first), len(rest)) == (30, 15), "a claim goes round the shards until it has enough"
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


async def test_jobs_of_a_key_meet_and_an_id_is_known_in_every_shard(sharded: ObjectStoreDriver) -> None:
    for name in "abcde":
        for field in ("key", "idempotency_key"):
            first, second = await sharded.enqueue(jobs_of(2, **{field: name}), now=NOW)
            assert (second.id, second.existed) == (first.id, True)
        # The same id with another key leads elsewhere, and must not make a second job.
        (again,) = await sharded.enqueue([make_record(first.id, key=f"{name}2")], now=NOW)
        assert (again.id, again.existed) == (first.id, True)
    assert len(await claim(sharded, 100)) == 10


async def test_a_damaged_shard_keeps_nobody_from_others(sharded: ObjectStoreDriver, blobs: HeldBlobs) -> None:
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


async def test_a_full_queue_accepts_none(driver: ObjectStoreDriver, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors of the next deliveries."""
    planned: list[str] = []
    deliver = Store.deliver

    async def deliver_if_planned(self: Store, notices: list[JobRecord]) -> None:
        if planned:
            raise BackendUnavailable(planned.pop())
        await deliver(self, notices)

    monkeypatch.setattr(Store, "deliver", deliver_if_planned)
    return planned


async def test_a_death_is_answered_when_its_notice_is_there_and_told_once(driver: ObjectStoreDriver) -> None:
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


async def test_a_crash_before_a_notice_is_delivered_loses_none(blobs: HeldBlobs, failing: list[str]) -> None:
    """The next handle on the queue finds it and brings it, once."""
    failing += ["the process dies here"] * 99
    async with driver_on(blobs) as driver:
        held = await held_job(driver)
        with pytest.raises(BackendUnavailable):
            await fail(driver, held)
        assert await notices(driver) == []
    failing.clear()
    async with driver_on(blobs) as one, driver_on(blobs) as two:
        assert list(await asyncio.gather(one.reclaim(now=NOW), two.reclaim(now=NOW))) == [0, 0]
        await asyncio.gather(one.store.settled(), two.store.settled())
        assert await outbox(one) == 0
        assert len(await notices(two)) == 1
        assert await counts(one, DEAD) == [1]


async def test_a_failed_delivery_is_tried_again(
    driver: ObjectStoreDriver, failing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_DELIVER_AGAIN", 0.0)
    held = await held_job(driver)
    failing += ["no answer"]
    with pytest.raises(BackendUnavailable):
        await fail(driver, held)
    # The caller repeats a call whose answer is unclear, and the job is dead already.
    await fail(driver, held)
    while await outbox(driver):
        pass
    assert len(await notices(driver)) == 1


async def test_a_claim_whose_notice_fails_is_answered(driver: ObjectStoreDriver, failing: list[str]) -> None:
    """The jobs are leased by then: nobody would run them, and each claim that failed would let more of them die."""
    await driver.configure("q", QueueSettings(failure_queue="failed"), now=NOW)
    await driver.enqueue(jobs_of(2, max_attempts=1), now=NOW)
    await claim(driver)
    failing += ["no answer"]
    assert [job.state for job in await claim(driver, 9, now=NOW + SECOND)] == [INFLIGHT]
    assert await outbox(driver) == 1


# -- a broker that leads ----------------------------------------------------------------------------------


async def test_a_leader_answers_from_memory(driver: ObjectStoreDriver, weather: Weather) -> None:
    driver.store.lead(FixedTerm(1))
    await driver.enqueue([make_record("a")], now=NOW)
    reads, writes = weather.reads, weather.writes
    assert len(await driver.stats(now=NOW)) == 1
    assert (await driver.get(["a", "unknown"], now=NOW))[1] is None
    assert len((await driver.list_jobs(JobFilter(), now=NOW)).jobs) == 1
    other = driver.reserve("q", limit=5, lease_for=SECOND, now=NOW, worker="w", types=["other"])
    assert await other == []
    assert await driver.reclaim(now=NOW) == 0
    assert (await driver.read_attempts()).attempts == []
    assert (weather.reads, weather.writes) == (reads, writes)


# -- URLs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket/some/prefix?region=eu-central-1", "s3://bucket/some/prefix"),
        ("s3://bucket", "s3://bucket"),
        ("s3://b/p/?endpoint=http://me:hidden@127.0.0.1:9000", "s3://b/p at 127.0.0.1:9000"),
        ("gs://bucket/p", "gs://bucket/p"),
        ("az://container/p?account_name=a&account_key=aGlkZGVu", "az://container/p"),
        ("file:///var/lib/x%20y", "file:///var/lib/x y"),
        ("mem://name", "mem://name"),
        ("mem://", "mem://"),
    ],
)
def test_a_store_is_named_without_its_secrets_and_lasts_unless_in_memory(url: str, place: str) -> None:
    driver = connect(url)
    assert isinstance(driver, ObjectStoreDriver)
    assert driver.capabilities.durable is driver.capabilities.multi_process is not url.startswith("mem")
    assert str(parse_url(url)) == place
    # A private store in memory has a number besides, which tells it from others.
    assert parse_url(url).open().place.partition("#")[0] == place


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://x", "not an object-store URL"),
        ("s3:///prefix", "write it like s3://bucket"),
        ("s3://b/a/../b", "write it like s3://bucket"),
        ("s3://key:hidden@bucket", "no user and password"),
        ("s3://b?allow_http=yes", "choose on or off"),
        ("s3://b?timeout=never", "seconds between"),
        ("file://relative/path", "write it like file:///"),
        ("mem://a/b", "write it like mem://name"),
        ("s3://b/p#x", "no part after #"),
        ("s3://b/p?colour=red", r"'colour'.*region"),
        ("file:///p?region=r", "'region'"),
        *(
            (f"mem://name?{said}", said.partition("=")[0])
            for said in ("shards=0", "poll=-1", "segment_rows=0", "merge=1")
        ),
    ],
)
def test_a_wrong_url_is_refused_with_the_right_one(url: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refusal:
        parse_url(url)
    assert "hidden" not in str(refusal.value)


async def test_memory_is_shared_by_name_and_otherwise_private() -> None:
    name = f"mem://{secrets.token_hex(6)}"
    async with connect(name) as one, connect(name) as other, connect("mem://") as alone:
        await one.enqueue([make_record()], now=NOW)
        assert len(await other.stats(now=NOW)) == 1
        await alone.enqueue([make_record()], now=NOW)
        async with alone.clone() as its_clone, connect("mem://") as another:
            assert len(await its_clone.stats(now=NOW)) == 1
            assert await another.stats(now=NOW) == []
    with pytest.raises(BackendUnavailable, match=r"open\(\)"):
        await alone.stats(now=NOW)
    assert parse_url(name).open().place == parse_url(name).open().place


async def test_a_cursor_of_another_store_is_refused() -> None:
    async with connect("mem://") as one, connect("mem://") as other:
        await finish(one, 3)
        after = (await one.read_attempts(limit=2)).cursor
        cursor = (await one.list_jobs(JobFilter(), now=NOW, limit=2)).cursor
        assert cursor is not None
        assert len((await one.list_jobs(JobFilter(), now=NOW, cursor=cursor)).jobs) == 1
        for store, row, job, says in [
            (other, after, cursor, "another store"),
            *((one, broken, broken, "not a cursor") for broken in ("", "x", "!!", "gA==")),
        ]:
            for call in (
                store.read_attempts(after=row),
                store.list_jobs(JobFilter(), now=NOW, cursor=job),
                store.list_jobs(JobFilter(until=job), now=NOW),
            ):
                with pytest.raises(InvalidRequest, match=says):
                    await call
