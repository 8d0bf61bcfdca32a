"""Segments: ended jobs leave the image for them, beside the calls, and no caller notices. Retention, and damaged objects. The
conformance kit, on tiny segments, shows the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.objectstore.fake_blobs import HeldBlobs
from drivers.objectstore.harness import claim, counts, driver_on, finish, jobs_of
from records import NOW, make_record
from taskharbor.clock import FakeClock
from taskharbor.drivers.contract import Ack, JobFilter, QueueSettings
from taskharbor.drivers.engine import enqueue, inspect, reserve, settle
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.objectstore import ObjectStoreDriver, archive, compaction, image
from taskharbor.drivers.objectstore.archive import JOBS, ROWS, Segment
from taskharbor.drivers.objectstore.blobs import Blob, Data, Version
from taskharbor.drivers.objectstore.catalog import log_folder, state_name
from taskharbor.drivers.objectstore.image import Entry, Image, entries, put_entry
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND, JobState

FEW: dict[str, Any] = {"segment_rows": 10, "merge": 3}
DONE, READY = JobState.DONE, JobState.READY


@pytest.fixture
def blobs() -> HeldBlobs:
    return HeldBlobs()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A wall clock that is moved by hand."""
    clock = FakeClock()
    for module in (image, compaction):
        monkeypatch.setattr(module, "wall_clock", clock.now)
    return clock


async def rows_in(driver: ObjectStoreDriver, *tables: str) -> list[int]:
    """The number of rows in tables of the image."""

    def count(transaction: Transaction) -> list[int]:
        select = "SELECT count(*) FROM {}"
        return [transaction.connection.execute(select.format(table)).fetchone()[0] for table in tables]

    return await driver.store.shards_of("q")[0].look(count)


async def archived(driver: ObjectStoreDriver, count: int = 10) -> list[str]:
    """The ids of so many jobs that have ended and left the image."""
    done = await finish(driver, count)
    await driver.store.settled()
    return done


async def found(driver: ObjectStoreDriver) -> tuple[int, int]:
    """The numbers of jobs and of rows of the log, wherever they are."""
    page = await driver.list_jobs(JobFilter(), now=NOW, limit=100)
    return len(page.jobs), len((await driver.read_attempts()).attempts)


async def entries_of(driver: ObjectStoreDriver) -> list[image.Entry]:
    return await driver.store.shards_of("q")[0].look(entries)


def segments_there(blobs: HeldBlobs) -> list[str]:
    return [name for name in blobs.objects if name.startswith(log_folder("q", 0))]


async def test_ended_jobs_go_to_segments_which_are_merged(blobs: HeldBlobs, clock: FakeClock) -> None:
    async with driver_on(blobs, **FEW) as driver:
        ids = await archived(driver)
        assert await rows_in(driver, "jobs", "attempts", "payloads", "results") == [0, 0, 0, 0]
        (again,) = await driver.enqueue([make_record(ids[3])], now=NOW, new_ids=True)
        assert again.existed, "a repeated enqueue of a job that has ended made a second one"
        for _ in range(2):
            await archived(driver)
        assert [entry.level for entry in await entries_of(driver)] == [1]
        assert len(segments_there(blobs)) == 4, "somebody may still be reading the three that were merged"
        clock.advance(3600)
        await driver.enqueue([make_record()], now=NOW)
        await driver.store.settled()
        assert len(segments_there(blobs)) == 1
        assert await rows_in(driver, "loose_segments") == [0]
        assert await found(driver) == (31, 30)


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


async def test_a_crash_loses_nothing(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """Before a segment is in place. The orphan is removed."""
    blobs, dying = HeldBlobs(), DiesBeforeItIsInPlace()
    async with driver_on(dying, **FEW) as driver:
        ids = await archived(driver)
        assert "could not be compacted" in caplog.text
        (orphan,) = segments_there(dying)
    blobs.objects = dying.objects
    clock.advance(3600)
    async with driver_on(blobs, **FEW) as driver:
        await driver.enqueue([make_record()], now=NOW)
        await driver.store.settled()
        assert orphan not in segments_there(blobs)
        assert len(segments_there(blobs)) == 1
        assert [job and job.state for job in await driver.get(ids, now=NOW)] == [DONE] * 10
        assert len((await driver.read_attempts()).attempts) == 10


async def test_two_handles_that_compact_at_once_keep_one_segment(blobs: HeldBlobs) -> None:
    # The first one is told to leave it be until both are due.
    async with driver_on(blobs, segment_rows=1000) as producer:
        await finish(producer, 20)
    async with driver_on(blobs, **FEW) as one, driver_on(blobs, **FEW) as two:
        await asyncio.gather(one.stats(now=NOW), two.stats(now=NOW))
        await asyncio.gather(one.store.settled(), two.store.settled())
        for driver in (one, two):
            assert await found(driver) == (20, 20)
        assert len(segments_there(blobs)) == 1


async def test_a_segment_whose_jobs_are_gone_is_rewritten_without_them(blobs: HeldBlobs) -> None:
    async with driver_on(blobs, **FEW) as driver:
        await driver.configure("q", QueueSettings(keep_done_us=SECOND, keep_attempts_us=None), now=NOW)
        await archived(driver)
        assert await driver.prune(now=NOW + 2 * SECOND, limit=4) == 4
        assert await driver.prune(now=NOW + 2 * SECOND) == 6
        await driver.store.settled()
        left = [entry.last_job for entry in await entries_of(driver)]
        assert left == [0], "payloads of jobs that are gone are still stored beside the rows"


class Merging(HeldBlobs):
    """Gives compaction time between the steps of a call."""

    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        for _ in range(0 if unless is None else 20):
            await asyncio.sleep(0)
        return await super().read(name, unless, size)


async def test_a_purge_takes_every_job_that_matches_while_segments_are_merged() -> None:
    """Segments that are merged while the purge is under way have another name by then."""
    async with driver_on(Merging(), segment_rows=3, merge=2, grace=0.0) as driver:
        for _ in range(8):
            for _ in range(3):
                await finish(driver, 4)
            assert [await driver.purge(JobFilter(), limit=1000)] == [12]


async def test_a_job_that_is_removed_twice_in_a_call_takes_no_other_with_it(blobs: HeldBlobs) -> None:
    """The other one was hidden, and its id was accepted anew."""
    async with driver_on(blobs, **FEW) as driver:
        first, *others = await archived(driver)
        assert await driver.remove([first, first]) == [DONE, DONE]
        left = await driver.get([first, *others], now=NOW)
        assert [job is not None for job in left] == [False, *[True] * 9]
        assert await counts(driver, DONE) == [9]


async def test_a_segment_that_somebody_removed_is_named_in_the_error(blobs: HeldBlobs) -> None:
    async with driver_on(blobs, **FEW) as driver:
        await archived(driver)
    (name,) = segments_there(blobs)
    del blobs.objects[name]
    async with driver_on(blobs, **FEW) as driver:
        with pytest.raises(BackendUnavailable, match="restore"):
            await driver.list_jobs(JobFilter(), now=NOW)
        assert len(await driver.stats(now=NOW)) == 1, "what is in the state does not depend on it"


@pytest.mark.parametrize("how", ["cut short", "the catalog", "not ours", "the state of another queue"])
async def test_a_damaged_queue_keeps_nobody_from_the_others(blobs: HeldBlobs, how: str) -> None:
    async with driver_on(blobs, **FEW) as driver:
        for queue in ("a", "b"):
            await driver.configure(queue, QueueSettings(keep_done_us=0, keep_attempts_us=0), now=NOW)
            await finish(driver, 3, queue=queue)
            await driver.enqueue([make_record(f"{queue}1", queue=queue)], now=NOW)
            await claim(driver, queue=queue)
    name = state_name("a", 0)
    state, other, catalog = (blobs.objects[one].data for one in (name, state_name("b", 0), "catalog"))
    damaged = {"cut short": state[:1000], "not ours": b"pictures", "the catalog": catalog}.get(how, other)
    blobs.keep(name, damaged)
    later = NOW + 5 * SECOND
    async with driver_on(blobs, **FEW) as driver:
        for sweep in (driver.prune(now=later), driver.reclaim(now=later)):
            with pytest.raises(BackendUnavailable, match=name):
                await sweep
        assert await counts(driver, DONE, READY, queue="b", now=later) == [0, 1]
        assert await driver.cancel(["b1"], now=later) == [JobState.CANCELLED]
        (made,) = await driver.enqueue(jobs_of(1, queue="b"), now=later)
        assert not made.existed
        page = await driver.read_attempts()
        assert {row.queue for row in page.attempts} == {"b"}
        for call in (driver.get(["a1"], now=NOW), driver.read_attempts(after=page.cursor)):
            with pytest.raises(BackendUnavailable, match=name):
                await call
        with pytest.raises(BackendUnavailable, match=name):
            await driver.purge(JobFilter())
        assert await counts(driver, JobState.CANCELLED, queue="b", now=later) == [0]
    assert blobs.objects[name].data == damaged, "nobody wrote over it"


# -- single segments ------------------------------------------------------------------------------------------


def built(ends: Sequence[int]) -> tuple[Image, Entry, bytes]:
    """An image of jobs that were done at these times, each with its row of the log, and the segment `a` of them."""
    image = Image(b"", "here", "q")

    def work(transaction: Transaction) -> None:
        enqueue.enqueue(transaction, [make_record(run_at_us=0) for _ in ends], NOW)
        held = reserve.reserve(transaction, "q", len(ends), 10**16, 0, "w", None)
        for job, end in zip(held, ends, strict=True):
            assert settle.settle(transaction, [Ack(job.id, job.token or "", b"r")], end) == [None]

    image.change(work)
    rows, jobs = (archive.copied(image.connection, statements) for statements in (ROWS, JOBS))
    return image, *archive.pack("a", 0, rows, jobs)


def test_an_object_that_is_no_segment_is_refused() -> None:
    _, entry, data = built([NOW])
    for read in (Segment.rows, Segment.jobs):
        with pytest.raises(BackendUnavailable, match="here holds queue 'q' and belongs to 'r'"):
            read(Segment(data, "here", "r"), entry)
    for damaged in (b"something else", data[:7], data[:-20]):
        with pytest.raises(BackendUnavailable, match="here is damaged, or not a segment"):
            Segment(damaged, "here", "q").jobs(entry)


@settings(max_examples=30, deadline=None)
@given(
    ends=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    takes=st.lists(st.tuples(st.integers(0, 35), st.integers(1, 12)), max_size=8),
)
def test_retention_takes_what_is_due_oldest_first(ends: list[int], takes: list[tuple[int, int]]) -> None:
    """Compared with a plain sorted list, over a row of calls with other thresholds and limits."""
    image, made, data = built([end * SECOND for end in ends])
    segment = Segment(data, "here", "q")

    def move(transaction: Transaction) -> None:
        transaction.connection.execute("DELETE FROM jobs")
        transaction.connection.execute("DELETE FROM attempts")
        transaction.connection.execute("UPDATE queues SET keep_done_us = 0, keep_attempts_us = 0")
        put_entry(transaction, made)

    def rows_of(entry: Entry) -> list[tuple[int, int]]:
        rows = inspect.attempts_between(segment.rows(entry), 0, inspect.FOREVER, 1000)
        return sorted((row.ended_at_us, row.seq) for row in rows)

    image.change(move)
    left = rows_of(made)
    for by, limit in takes:

        def prune(transaction: Transaction, now: int = by * SECOND, most: int = limit) -> tuple[int, int]:
            due = [(entry, segment) for entry in archive.due(transaction, now)]
            return archive.prune(transaction, due, now, most, most)

        wanted = [one for one in left if one[0] <= by * SECOND][:limit]
        assert image.change(prune)[0] == (len(wanted), len(wanted))
        left = left[len(wanted) :]
        if not left:
            assert image.look(entries) == []
            break
        (entry,) = image.look(entries)
        assert rows_of(entry) == left
        assert (
            entry.jobs == entry.rows == len(left) == len(archive.find_jobs(entry, segment, JobFilter(), 99))
        )
        # Never too late, and after all that was due has gone it leads nobody to look in vain.
        assert entry.oldest_row == entry.oldest_job == left[0][0]
        (stats,) = image.look(lambda transaction: inspect.stats(transaction, NOW, "q"))
        assert sum(stats.counts.values()) == len(left)
