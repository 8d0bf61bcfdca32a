"""Compaction: what ended leaves the image for segments, beside the calls and without a trace for those who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pytest

from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.jobs_here import NOW, a_job, run_through
from taskharbor.drivers.contract import Ack, Extension, JobFilter, QueueSettings
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.objectstore import ObjectStoreDriver, compaction, image
from taskharbor.drivers.objectstore.blobs import Blob, Data, Version
from taskharbor.drivers.objectstore.catalog import log_folder, state_name
from taskharbor.drivers.objectstore.image import entries
from taskharbor.drivers.objectstore.options import Options
from taskharbor.errors import BackendUnavailable, JobFinished, JobNotInflight
from taskharbor.jobs import SECOND, JobState

R = TypeVar("R")

FEW = Options(poll=None, segment_rows=10, merge=3, grace=3600.0)


def driver_on(blobs: HeldBlobs, options: Options = FEW) -> ObjectStoreDriver:
    return ObjectStoreDriver(lambda: blobs, options)


async def state_of(driver: ObjectStoreDriver, read: Callable[[Transaction], R]) -> R:
    return await driver.store.shards_of("q")[0].look(read)


def rows_in(*tables: str) -> Callable[[Transaction], tuple[int, ...]]:
    """How many rows the tables of an image have."""
    return lambda transaction: tuple(
        transaction.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # noqa: S608
        for table in tables
    )


def segments_there(blobs: HeldBlobs) -> list[str]:
    return [name for name in blobs.objects if name.startswith(log_folder("q", 0))]


def run(test: Callable[[HeldBlobs], Awaitable[None]]) -> None:
    async def with_blobs() -> None:
        await test(HeldBlobs())

    asyncio.run(with_blobs())


def test_ended_jobs_and_rows_leave_the_state_for_a_segment() -> None:
    async def test(blobs: HeldBlobs) -> None:
        async with driver_on(blobs) as driver:
            ids = await run_through(driver, 12)
            await driver.enqueue([a_job()], now=NOW)
            await driver.store.settled()
            assert await state_of(driver, rows_in("jobs", "attempts", "payloads", "results")) == (1, 0, 0, 0)
            assert len(segments_there(blobs)) == 1
            (stats,) = await driver.stats(now=NOW)
            assert (stats.counts[JobState.DONE], stats.counts[JobState.READY], stats.done_total) == (
                12,
                1,
                12,
            )
            found = await driver.get(ids, now=NOW)
            assert [job and job.state for job in found] == [JobState.DONE] * 12

    run(test)


def test_an_archived_job_answers_like_any_ended_one() -> None:
    async def test(blobs: HeldBlobs) -> None:
        async with driver_on(blobs) as driver:
            ids = await run_through(driver, 12)
            await driver.store.settled()
            other = driver.clone()
            async with other:
                assert await other.settle([Ack(ids[0], "any")], now=NOW) == [None]
                (error,) = await other.cancel([ids[1]], now=NOW)
                assert isinstance(error, JobFinished)
                (refused,) = await other.extend_lease([Extension(ids[2], "any")], lease_for=SECOND, now=NOW)
                assert isinstance(refused, JobNotInflight)
                again = await other.enqueue([a_job(id=ids[3])], now=NOW, new_ids=True)
                assert again[0].existed, "a repeated enqueue of a job that has ended made a second one"

    run(test)


def test_small_segments_become_larger_ones_and_those_that_were_replaced_go_an_hour_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = [2_000_000_000 * SECOND]
    for module in (image, compaction):
        monkeypatch.setattr(module, "wall_clock", lambda: time[0])

    async def test(blobs: HeldBlobs) -> None:
        async with driver_on(blobs) as driver:
            for _ in range(3):
                await run_through(driver, 10)
                await driver.store.settled()
            assert await state_of(driver, lambda image: [entry.level for entry in entries(image)]) == [1]
            assert len(segments_there(blobs)) == 4, "somebody may still be reading the three that were merged"
            time[0] += 3600 * SECOND
            await driver.enqueue([a_job()], now=NOW)
            await driver.store.settled()
            assert len(segments_there(blobs)) == 1
            assert await state_of(driver, rows_in("loose_segments")) == (0,)
            assert len((await driver.list_jobs(JobFilter(), now=NOW, limit=100)).jobs) == 31
            assert len((await driver.read_attempts()).attempts) == 30

    run(test)


class DiesBeforeItIsInPlace(HeldBlobs):
    """Ends the process, so to speak, once a segment is written: nothing after that arrives."""

    is_dead = False

    async def put(self, name: str, data: bytes) -> None:
        await super().put(name, data)
        self.is_dead = True

    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        if self.is_dead:
            raise BackendUnavailable("gone")
        return await super().write(name, data, known)

    async def delete(self, names: Sequence[str]) -> None:
        if not self.is_dead:
            await super().delete(names)


async def test_a_crash_between_writing_a_segment_and_putting_it_in_place_loses_nothing_and_the_orphan_is_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    time = [2_000_000_000 * SECOND]
    for module in (image, compaction):
        monkeypatch.setattr(module, "wall_clock", lambda: time[0])

    blobs = DiesBeforeItIsInPlace()
    async with driver_on(blobs) as driver:
        ids = await run_through(driver, 10)
        await driver.store.settled()
        assert "could not be compacted" in caplog.text
        (orphan,) = segments_there(blobs)
    blobs.is_dead = False
    survivor = HeldBlobs()
    survivor.objects = blobs.objects
    time[0] += 3600 * SECOND
    async with driver_on(survivor) as driver:
        await driver.enqueue([a_job()], now=NOW)
        await driver.store.settled()
        assert orphan not in segments_there(survivor)
        assert len(segments_there(survivor)) == 1
        found = await driver.get(ids, now=NOW)
        assert [job and job.state for job in found] == [JobState.DONE] * 10
        assert len((await driver.read_attempts()).attempts) == 10


def test_two_handles_that_compact_at_once_keep_one_segment() -> None:
    async def test(blobs: HeldBlobs) -> None:
        # The first one is told to leave it be until both are due.
        async with driver_on(blobs, Options(poll=None, segment_rows=1000)) as producer:
            await run_through(producer, 20)
        async with driver_on(blobs) as one, driver_on(blobs) as two:
            await asyncio.gather(one.stats(now=NOW), two.stats(now=NOW))
            await asyncio.gather(one.store.settled(), two.store.settled())
            for driver in (one, two):
                assert len((await driver.list_jobs(JobFilter(), now=NOW, limit=100)).jobs) == 20
                assert len((await driver.read_attempts()).attempts) == 20
            assert len(segments_there(blobs)) == 1

    run(test)


def test_retention_reaches_into_segments_and_drops_empty_ones() -> None:
    async def test(blobs: HeldBlobs) -> None:
        async with driver_on(blobs) as driver:
            await driver.configure(
                "q", QueueSettings(keep_done_us=SECOND, keep_attempts_us=5 * SECOND), now=NOW
            )
            await run_through(driver, 10)
            await driver.store.settled()
            assert await driver.prune(now=NOW + 2 * SECOND, limit=4) == 4
            assert await driver.prune(now=NOW + 2 * SECOND) == 6
            await driver.store.settled()
            assert await state_of(driver, lambda image: [entry.last_job for entry in entries(image)]) == [
                0
            ], "payloads of jobs that are gone are still stored beside the rows"
            assert await driver.prune(now=NOW + 6 * SECOND) == 10
            assert await state_of(driver, entries) == []
            (stats,) = await driver.stats(now=NOW)
            assert (stats.counts[JobState.DONE], stats.done_total) == (0, 10)

    run(test)


def test_a_purge_takes_archived_jobs_by_any_filter_and_frees_their_idempotency_keys() -> None:
    async def test(blobs: HeldBlobs) -> None:
        async with driver_on(blobs) as driver:
            jobs = [a_job(idempotency_key=f"i{n}", type="odd" if n % 2 else "even") for n in range(10)]
            await driver.enqueue(jobs, now=NOW)
            held = await driver.reserve("q", limit=10, lease_for=SECOND, now=NOW, worker="w")
            await driver.settle([Ack(job.id, job.token or "") for job in held], now=NOW)
            await driver.store.settled()
            assert await driver.purge(JobFilter(types=frozenset({"odd"}))) == 5
            left = (await driver.list_jobs(JobFilter(), now=NOW)).jobs
            assert {job.type for job in left} == {"even"}
            again = await driver.enqueue([a_job(idempotency_key="i1"), a_job(idempotency_key="i2")], now=NOW)
            assert [one.existed for one in again] == [False, True]

    run(test)


def test_a_segment_that_somebody_removed_is_named_in_the_error() -> None:
    async def test(blobs: HeldBlobs) -> None:
        async with driver_on(blobs) as driver:
            await run_through(driver, 10)
            await driver.store.settled()
        (name,) = segments_there(blobs)
        del blobs.objects[name]
        async with driver_on(blobs) as driver:
            with pytest.raises(BackendUnavailable, match="restore"):
                await driver.list_jobs(JobFilter(), now=NOW)
            assert len(await driver.stats(now=NOW)) == 1, "what is in the state does not depend on it"
            assert state_name("q", 0) in blobs.objects

    run(test)


async def test_a_purge_takes_every_job_that_matches_while_segments_are_merged() -> None:
    """What is merged while the purge is under way has another name by then."""

    class Merging(HeldBlobs):
        """Gives compaction time between the steps of a call."""

        async def read(
            self, name: str, unless: Version | None = None, size: int | None = None
        ) -> Blob | None:
            for _ in range(0 if unless is None else 20):
                await asyncio.sleep(0)
            return await super().read(name, unless, size)

    async with driver_on(Merging(), Options(poll=None, segment_rows=3, merge=2, grace=0.0)) as driver:
        for _ in range(20):
            for _ in range(3):
                await run_through(driver, 4)
            (stats,) = await driver.stats(now=NOW)
            assert await driver.purge(JobFilter(), limit=1000) == stats.counts[JobState.DONE]


@pytest.mark.parametrize("how", ["cut short", "another object of the store"])
def test_a_damaged_queue_keeps_nobody_from_the_others(how: str) -> None:
    async def test(blobs: HeldBlobs) -> None:
        kept = QueueSettings(keep_done_us=0, keep_attempts_us=0)
        async with driver_on(blobs) as driver:
            for queue in ("a", "b"):
                await driver.configure(queue, kept, now=NOW)
                await run_through(driver, 3, queue)
                await driver.enqueue([a_job(id=f"{queue}1", queue=queue)], now=NOW)
                await driver.reserve(queue, limit=1, lease_for=SECOND, now=NOW, worker="w")
        there = blobs.objects[state_name("a", 0)]
        data = there.data[:1000] if how == "cut short" else blobs.objects["catalog"].data
        blobs.objects[state_name("a", 0)] = Blob(data, there.version)
        later = NOW + 5 * SECOND
        async with driver_on(blobs) as driver:
            for sweep in (driver.prune(now=later), driver.reclaim(now=later)):
                with pytest.raises(BackendUnavailable, match="queues/a/0/state"):
                    await sweep
            (stats,) = await driver.stats(now=later, queue="b")
            assert (stats.counts[JobState.DONE], stats.counts[JobState.READY]) == (0, 1)
            assert (await driver.get(["b1"], now=NOW))[0] is not None
            assert await driver.cancel(["b1"], now=later) == [JobState.CANCELLED]
            with pytest.raises(BackendUnavailable, match="queues/a/0/state"):
                await driver.get(["a1"], now=NOW)
            (made,) = await driver.enqueue([a_job(queue="b")], now=later)
            assert not made.existed
            page = await driver.read_attempts()
            assert {row.queue for row in page.attempts} == {"b"}
            with pytest.raises(BackendUnavailable, match="queues/a/0/state"):
                await driver.read_attempts(after=page.cursor)
            with pytest.raises(BackendUnavailable, match="queues/a/0/state"):
                await driver.purge(JobFilter())
            (stats,) = await driver.stats(now=later, queue="b")
            assert stats.counts[JobState.CANCELLED] == 0

    run(test)


def test_a_job_that_is_removed_twice_in_a_call_takes_no_other_with_it() -> None:
    """The other one was hidden, and its id was accepted anew."""

    async def test(blobs: HeldBlobs) -> None:
        async with driver_on(blobs) as driver:
            first, *others = await run_through(driver, 10)
            await driver.store.settled()
            assert await driver.remove([first, first]) == [JobState.DONE, JobState.DONE]
            assert [job is not None for job in await driver.get([first, *others], now=NOW)] == [False] + [
                True
            ] * 9
            (stats,) = await driver.stats(now=NOW, queue="q")
            assert stats.counts[JobState.DONE] == 9

    run(test)
