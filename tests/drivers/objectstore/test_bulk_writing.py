"""Bulk writing to object stores: shards, queues without room, publishers that die, and bad weather. `tests/bulk` has the
rest, on a folder too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bulk.stores import within
from drivers.objectstore.fake_blobs import LOST_ANSWERS, FaultyBlobs, Weather
from drivers.objectstore.harness import ack, claim, counts, jobs_of, objects, waiting
from taskharbor.bulk import publish_staged, stage
from taskharbor.bulk.stage import new_write, numbered_write
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.bulk.tables import Selection
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.objectstore.driver import ObjectStoreDriver
from taskharbor.drivers.objectstore.options import StoreURL
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor_testkit.servers.s3 import fresh_s3_url

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
    return f"file://{folder}?sync=off{request.param}"


@pytest.fixture
def store(url: str) -> Iterator[BulkStore]:
    with open_store(url) as opened:
        yield opened


def keyed(count: int, keys: int, **fields: Any) -> list[JobRecord]:
    """Jobs of which the first 20 share so many keys."""
    jobs = jobs_of(count, now=1, **fields)
    for n, job in enumerate(jobs[:20]):
        job.key = f"k{n % keys}"
    return jobs


def test_staged_jobs_are_seen_once_they_are_published(store: BulkStore, url: str, folder: Path) -> None:
    """Whatever the queues and the series are called."""
    queues = ['we"ird }{ % ☂\\', "UPPER/lower", "x" * 190]
    write = numbered_write(f'odd: {{series}} / "☂" {"y" * 150}', 3)
    assert store.stage(write, "0.1", [jobs_of(100, queue=queue) for queue in queues]) == 300
    assert waiting(url, *queues) == dict.fromkeys(queues, 0)
    for _ in range(2):
        assert store.publish(write, ["0.1"], now=2) == 300
        assert waiting(url, *queues) == dict.fromkeys(queues, 100)
    assert objects(folder, "staging/") == {}


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
        store.stage(write, task, [keyed(50, 10, queue=queue)])
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
        assert store.stage(write, name, [keyed(50, 10, queue=QUEUES[task % 3], type=f"t{task}")]) == 50
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


def test_a_store_behind_http_is_written_and_read() -> None:
    url = fresh_s3_url()
    with open_store(url) as store:
        write = new_write()
        store.stage(write, "0.1", [jobs_of(24, payload=b'{"n":1}')])
        assert store.publish(write, ["0.1"], now=2) == store.publish(write, ["0.1"], now=2) == 24

    async def work(driver: Driver) -> None:
        while held := await claim(driver, 6):
            await ack(driver, held)

    within(f"{url}&segment_rows=5", work)
    with open_store(url) as store:
        cursor = store.limited(store.start(), store.latest(), rows=10)
        parts = [
            store.parts("jobs", Selection(), parallelism=2),
            store.between(store.start(), cursor, parallelism=2),
            store.between(cursor, store.latest(), parallelism=2),
        ]
        rows = [sum(batch.num_rows for part in some for batch in store.read(part)) for some in parts]
        assert rows == [24, 10, 14]
