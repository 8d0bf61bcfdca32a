"""Bulk reading and writing on object stores, with one object per queue and with shards: segments that come and go under a
reader, queues without room, publishers that die, and bad weather. `tests/bulk` has the rest, on a folder and on S3 too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bulk.stores import EVERYTHING, add, every_seq, rows, selected, seqs, within
from drivers.objectstore.fake_blobs import LOST_ANSWERS, FaultyBlobs, Weather
from drivers.objectstore.harness import ack, claim, counts, jobs_of, objects, waiting
from taskharbor.bulk import publish_staged, stage
from taskharbor.bulk import store as bulk_store
from taskharbor.bulk.stage import new_write
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.objectstore import archive
from taskharbor.drivers.objectstore.blobs import Blob
from taskharbor.drivers.objectstore.driver import ObjectStoreDriver
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.drivers.objectstore.options import StoreURL
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError
from taskharbor.jobs import SECOND, JobRecord, JobState

QUEUES = ("alpha", "beta", "gamma")
TASKS = ["0.1", "1.1", "2.1"]
ALL = dict.fromkeys(QUEUES, 40)
# No shard gets so few of a hundred jobs with 1,000 bytes each.
NO_ROOM = ("taskharbor.drivers.objectstore.queue.MAX_BYTES", 10_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(params=["", "&shards=3"], ids=["one object per queue", "shards"])
def url(folder: Path, request: pytest.FixtureRequest) -> str:
    return f"file://{folder}?sync=off&segment_rows=5&merge=3{request.param}"


@pytest.fixture
def store(url: str) -> Iterator[BulkStore]:
    with open_store(url) as opened:
        yield opened


# -- reading ----------------------------------------------------------------------------------------------


def test_a_reader_finds_everything_and_writes_nothing(
    store: BulkStore, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of a queue are one log."""
    monkeypatch.setattr(bulk_store, "ROWS_PER_PART", 20)
    add(url, 100)
    before = objects(folder)
    cursor = store.limited(store.start(), store.latest(), rows=30)
    first, rest = seqs(store, store.start(), cursor), seqs(store, cursor, store.latest())
    assert len(store.between(store.start(), store.latest(), parallelism=4)) == 4
    (queue,) = selected(store, "queues")
    assert (queue["queue"], queue["done"], queue["done_total"]) == ("q", 100, 100)
    jobs = selected(store, "jobs")
    assert len({job["id"] for job in jobs}) == len(jobs) == 100
    assert objects(folder) == before
    assert 0 < len(first) <= 30
    assert sorted(first + rest) == every_seq(url)


def test_only_the_rows_of_a_large_segment_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{folder}?sync=off&segment_rows=5&merge=2"
    for _ in range(4):
        add(url, 6, payload=random.randbytes(20_000))
    starts: list[int] = []
    read_file = LocalFiles.read

    async def noting(blobs: LocalFiles, name: str, unless: Any = None, size: Any = None) -> Blob | None:
        blob = await read_file(blobs, name, unless, size)
        if size is not None:
            starts.append(len(blob.data if blob else b""))
        return blob

    monkeypatch.setattr(LocalFiles, "read", noting)
    monkeypatch.setattr(archive, "LARGE", 0)
    # Whatever of the header the first request brings, the rest is asked for.
    for beginning in (10, 100, 3000):
        monkeypatch.setattr(archive, "BEGINNING", beginning)
        with open_store(url) as store:
            assert sorted(row["seq"] for row in selected(store, "attempts")) == every_seq(url)
            assert 0 < sum(starts) < 20_000
            starts.clear()
            assert len(selected(store, "jobs")) == 24


def test_a_plan_that_was_made_before_a_merge_is_still_read(store: BulkStore, url: str, folder: Path) -> None:
    for count in (6, 6, 3):
        add(url, count)
    planned = store.parts("attempts", EVERYTHING, parallelism=2)
    between = store.between(store.start(), store.latest(), parallelism=2)
    jobs = store.parts("jobs", EVERYTHING, parallelism=1)
    names = set(objects(folder, "/log/"))
    for _ in range(4):
        add(url, 6)
    assert names < set(objects(folder, "/log/"))
    # Jobs are read as they are now.
    for parts, count in ((planned, 15), (between, 15), (jobs, 39)):
        assert len(rows(store, parts)) == count


async def commit(driver: Driver, dice: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        now = await driver.time()
        await driver.enqueue(jobs_of(20, now=now, queue=dice.choice(QUEUES)), now=now, new_ids=True)
        await ack(driver, await claim(driver, dice.randrange(1, 50), queue=dice.choice(QUEUES), now=now), now)


@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_a_reader_that_stops_misses_none(url: str, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Wherever it is stopped."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(bulk_store, "ROWS_PER_PART", 20)
    within(url, lambda driver: driver.time())
    seen: list[int] = []
    with open_store(url) as first:
        cursor = first.start()
    with ThreadPoolExecutor(3) as threads:
        committers = [
            threads.submit(within, url, lambda driver, n=n: commit(driver, random.Random(seed + n), rounds))
            for n in range(3)
        ]
        is_over = False
        while not is_over:
            is_over = all(one.done() for one in committers)
            with open_store(url) as store:
                for _ in range(dice.randrange(1, 4)):
                    most = dice.choice([None, 1, 70, 400])
                    until = store.limited(cursor, store.latest(), rows=most)
                    found = seqs(store, cursor, until, parallelism=dice.randrange(1, 5))
                    assert most is None or len(found) <= most
                    if dice.random() < 0.3:
                        # Stopped before it could say that it is done: the same range is read again.
                        assert sorted(seqs(store, cursor, until)) == sorted(found)
                    seen += found
                    cursor = until
    with open_store(url) as store:
        seen += seqs(store, cursor, store.latest())
    assert [one.result() for one in committers] == [None] * 3
    assert sorted(seen) == every_seq(url)
    assert len(seen) > 10 * rounds


# -- writing ----------------------------------------------------------------------------------------------


def keyed(**fields: Any) -> list[JobRecord]:
    """Fifty jobs: ten keys, each shared by two of them, and thirty without a key."""
    keys = [*(f"k{n}" for n in range(10)), None, None, None]
    return [job for key in keys for job in jobs_of(10 if key is None else 2, now=1, key=key, **fields)]


def test_a_task_that_outlives_its_write_leaves_nothing(store: BulkStore, url: str, folder: Path) -> None:
    """A speculative copy of a task: the other one won."""
    write = new_write()

    def batches() -> Iterator[Sequence[JobRecord]]:
        yield jobs_of(1500)
        with open_store(url) as other:
            other.stage(write, "0.1", [jobs_of(5)])
            assert other.publish(write, ["0.1"], now=2) == 5
        yield jobs_of(1500, queue="other")

    assert store.stage(write, "0.2", batches()) == 0
    assert objects(folder, "staging/") == {}
    assert waiting(url, "q", "other") == {"q": 5, "other": 0}


def test_a_write_without_room_is_refused(store: BulkStore, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*NO_ROOM)
    write = new_write()
    store.stage(write, "0.1", [[*jobs_of(5, queue="other"), *jobs_of(100, payload=b"x" * 1000)]])
    with pytest.raises(InvalidRequest, match="queue 'q' is full"):
        store.publish(write, ["0.1"], now=2)
    assert waiting(url, "q", "other") == {"q": 0, "other": 0}
    store.abandon(write)


def test_a_portion_without_room_is_refused_until_there_is(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever publishes blobs need not have asked for the room. A portion that was published needs none."""
    name = "staging/w/t/0-000000"

    async def publish_it(driver: Driver) -> int:
        return sum((await driver.publish_blobs([name], series="s", number=0, portion=1, now=2)).values())

    async def main(driver: Driver) -> None:
        await driver.put_blob(name, stage.pack(jobs_of(100, payload=b"x" * 1000)))
        with monkeypatch.context() as small:
            small.setattr(*NO_ROOM)
            with pytest.raises(InvalidRequest, match="queue 'q' is full"):
                await publish_it(driver)
            assert await counts(driver, JobState.READY) == [0]
        assert await publish_it(driver) == 100
        monkeypatch.setattr(*NO_ROOM)
        assert await publish_it(driver) == 100

    within(url, main)


# -- publishers that die ----------------------------------------------------------------------------------


@pytest.fixture
def half_published(store: BulkStore, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A write of which something can be seen, and something not yet. Half of its jobs have keys that others have too."""
    write = new_write()
    for task, queue in zip(TASKS, QUEUES, strict=True):
        store.stage(write, task, [keyed(queue=queue)])
    monkeypatch.setattr(publish_staged, "BLOB_JOBS", 70)
    publish_blobs = ObjectStoreDriver.publish_blobs
    portions = iter(range(3))

    async def dying(driver: ObjectStoreDriver, *arguments: Any, **options: Any) -> Any:
        found = await publish_blobs(driver, *arguments, **options)
        if next(portions) == 1:
            raise BackendUnavailable("the publisher died")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStoreDriver, "publish_blobs", dying)
        with pytest.raises(BackendUnavailable, match="died"):
            store.publish(write, TASKS, now=2)
    assert sum(waiting(url, *QUEUES).values()) == 80
    return write


def test_a_publisher_that_comes_back_finishes_it(store: BulkStore, url: str, half_published: str) -> None:
    store.abandon(half_published)
    assert waiting(url, *QUEUES) == ALL
    assert store.publish(half_published, TASKS, now=3) == 120
    assert waiting(url, *QUEUES) == ALL


def test_jobs_with_keys_that_ended_are_not_published(store: BulkStore, url: str, half_published: str) -> None:
    """Their ids are nobody's, since they were merged into others: only the note beside them tells."""

    async def drain(driver: Driver) -> None:
        for queue in QUEUES * 3:
            await ack(driver, await claim(driver, 100, queue=queue))

    within(url, drain)
    assert store.publish(half_published, TASKS, now=3) == 120
    assert waiting(url, *QUEUES) == {"alpha": 0, "beta": 0, "gamma": 40}


@pytest.mark.parametrize("finisher", ["the next write", "upkeep"])
def test_a_write_that_a_dead_publisher_began_is_finished_by(
    finisher: str, store: BulkStore, url: str, half_published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, is_finished in ((60 * SECOND, False), (0, True)):
        monkeypatch.setattr(publish_staged, "LEFT_BEHIND", seconds)
        if finisher == "upkeep":
            within(url, lambda driver: driver.prune(now=3))
        else:
            write = new_write()
            store.stage(write, "0.1", [jobs_of(1)])
            assert store.publish(write, ["0.1"], now=3) == 1
        assert (waiting(url, *QUEUES) == ALL) == is_finished


def test_jobs_that_somebody_removed_are_reported(store: BulkStore, folder: Path, half_published: str) -> None:
    own = f"{stage.folder_of(half_published)}/{stage._digest('2.1')}/"
    lost = next(name for name in objects(folder, own) if not name.endswith("-end"))
    (folder / lost).unlink()
    with pytest.raises(TaskHarborError, match=r"50 jobs of .* were lost .* the other 80 are jobs now"):
        store.publish(half_published, TASKS, now=3)
    assert store.publish(half_published, TASKS, now=3) == 80


# -- bad weather ------------------------------------------------------------------------------------------


def test_a_write_in_bad_weather_happens_once(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    within(url, lambda driver: driver.time())
    write = new_write()

    def keep_trying(use: Callable[[BulkStore, int], Any]) -> Any:
        for attempt in range(200):
            try:
                with open_store(url) as store:
                    return use(store, attempt)
            except BackendUnavailable:
                continue
        raise AssertionError("200 tries were not enough")

    def stage_task(store: BulkStore, task: int, attempt: int) -> str:
        name = f"{task}.{attempt}"
        assert store.stage(write, name, [keyed(queue=QUEUES[task % 3], type=f"t{task}")]) == 50
        return name

    weather = Weather(random.Random(seed), {**LOST_ANSWERS, "unreadable": 0.05})
    open_blobs = StoreURL.open
    with monkeypatch.context() as bad:
        bad.setattr(publish_staged, "BLOB_JOBS", 60)
        bad.setattr(StoreURL, "open", lambda parsed: FaultyBlobs(open_blobs(parsed), weather))
        winners = [
            keep_trying(lambda store, attempt, task=task: stage_task(store, task, attempt))  # type: ignore[misc]
            for task in range(3)
        ]
        assert keep_trying(lambda store, _: store.publish(write, winners, now=2)) == 120
    assert waiting(url, *QUEUES) == ALL
    with open_store(url) as store:
        assert store.publish(write, winners, now=2) == 120
    assert objects(folder, "staging/") == {}
