"""Object stores by the million, read: segments that come and go under a reader, logs in shards, history that is gone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.objectstore.bulk_stage import (
    DAY,
    add,
    every_seq,
    finish,
    fold,
    forget_history,
    objects,
    records,
    seqs,
    within,
)
from taskharbor.bulk import read
from taskharbor.bulk.cursors import HistoryGone
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.bulk.tables import Selection, Table
from taskharbor.drivers.contract import Ack, Driver, Retry, Settlement
from taskharbor.drivers.objectstore import archive
from taskharbor.drivers.objectstore.blobs import Blob, Version
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import SECOND, Failure, JobState
from taskharbor_testkit.servers.s3 import fresh_s3_url

EVERYTHING = Selection()
TABLES: tuple[Table, ...] = ("attempts", "jobs", "queues")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def url(folder: Path) -> str:
    return f"file://{folder}?sync=off&segment_rows=5&merge=3"


@pytest.fixture
def store(url: str) -> Iterator[BulkStore]:
    with open_store(url) as opened:
        yield opened


def read_all(store: BulkStore, table: Table, *, parallelism: int = 3) -> list[str | int]:
    name = {"attempts": "seq", "jobs": "id", "queues": "queue"}[table]
    parts = store.parts(table, EVERYTHING, parallelism=parallelism)
    return [value for part in parts for batch in store.read(part) for value in batch.column(name).to_pylist()]


# -- where rows are ----------------------------------------------------------------------------------------------------


def test_rows_of_all_segments_and_of_the_tail_are_read_once(store: BulkStore, url: str, folder: Path) -> None:
    for count in (7, 30, 1, 12, 2):
        add(url, count)
    assert len([name for name in objects(folder) if "/log/" in name]) > 3
    assert Counter(read_all(store, "attempts")) == Counter(every_seq(url))
    assert len(read_all(store, "jobs")) == len(read_all(store, "jobs", parallelism=1)) == 52


def test_a_reader_writes_nothing(store: BulkStore, url: str, folder: Path) -> None:
    add(url, 40)
    before = objects(folder)
    for table in TABLES:
        assert read_all(store, table)
    cursor = store.limited(store.start(), store.latest(), rows=7)
    assert len(seqs(store, cursor, store.latest())) == 33
    assert objects(folder) == before


def test_shards_of_a_queue_are_one_log_to_the_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "ROWS_PER_PART", 20)
    url = f"file://{folder}?sync=off&segment_rows=5&shards=3"
    add(url, 100)
    with open_store(url) as store:
        seen: list[int] = []
        cursor, end = store.start(), store.latest()
        while cursor != end:
            until = store.limited(cursor, end, rows=30)
            found = seqs(store, cursor, until)
            assert 0 < len(found) <= 30
            seen += found
            cursor = until
        assert Counter(seen) == Counter(every_seq(url))
        assert len(store.between(store.start(), end, parallelism=4)) == 4
        (queue,) = [
            row
            for part in store.parts("queues", EVERYTHING, parallelism=1)
            for batch in store.read(part)
            for row in batch.to_pylist()
        ]
        assert (queue["queue"], queue["done"], queue["done_total"]) == ("q", 100, 100)
        assert len(read_all(store, "jobs")) == 100


def test_a_url_with_another_number_of_shards_is_refused(url: str) -> None:
    add(url, 1)
    with open_store(f"{url}&shards=4") as store, pytest.raises(InvalidRequest, match="shards=1"):
        store.latest()


@pytest.mark.parametrize("queue", ['we"ird }{ % ☂\\', "UPPER/lower", "x" * 190])
def test_a_queue_may_have_any_name(store: BulkStore, url: str, queue: str) -> None:
    add(url, 12, queue=queue)
    cursor = store.limited(store.start(), store.latest(), rows=2)
    assert len(seqs(store, cursor, store.latest())) == 10
    for table, count in zip(TABLES, (12, 12, 1), strict=True):
        parts = store.parts(table, Selection(queue=queue), parallelism=2)
        batches = [batch for part in parts for batch in store.read(part)]
        assert sum(batch.num_rows for batch in batches) == count
        assert {name for batch in batches for name in batch.column("queue").to_pylist()} == {queue}


def test_blocks_outside_the_chosen_time_are_left_out_and_none_within(store: BulkStore, url: str) -> None:
    early = within(url, lambda driver: driver.time())
    add(url, 20)
    add(url, 20, later=3600 * SECOND)
    for since, until, count in (
        (early + 1800 * SECOND, None, 20),
        (None, early + 1800 * SECOND, 20),
        (early, early + 7200 * SECOND, 40),
        (early + 7200 * SECOND, None, 0),
    ):
        chosen = Selection(since_us=since, until_us=until)
        parts = store.parts("attempts", chosen, parallelism=2)
        assert sum(batch.num_rows for part in parts for batch in store.read(part)) == count


def test_a_large_segment_is_shared_by_several_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "ROWS_PER_PART", 20)
    monkeypatch.setattr(read, "JOBS_PER_PART", 20)
    url = f"file://{folder}?sync=off&segment_rows=5&merge=2"
    for _ in range(16):
        add(url, 6)
    with open_store(url) as store:
        for table in ("attempts", "jobs"):
            parts = store.parts(table, EVERYTHING, parallelism=4)
            found = [
                [value for batch in store.read(part) for value in batch.column(0).to_pylist()]
                for part in parts
            ]
            assert len(found) == 4
            assert max(map(len, found)) < 60
            assert len({value for part in found for value in part}) == sum(map(len, found)) == 96


def test_of_a_large_segment_only_the_rows_are_read_for_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{folder}?sync=off&segment_rows=5&merge=2"
    for _ in range(4):
        add(url, 6, payload=random.randbytes(20_000))
    starts: list[int] = []
    read = LocalFiles.read

    async def noting(
        blobs: LocalFiles, name: str, unless: Version | None = None, size: int | None = None
    ) -> Blob | None:
        blob = await read(blobs, name, unless, size)
        if size is not None:
            starts.append(len(blob.data if blob else b""))
        return blob

    monkeypatch.setattr(LocalFiles, "read", noting)
    # Whatever of the header the first request brings, the rest is asked for.
    for beginning in (10, 100, 3000):
        monkeypatch.setattr(archive, "LARGE", 0)
        monkeypatch.setattr(archive, "BEGINNING", beginning)
        with open_store(url) as store:
            assert Counter(read_all(store, "attempts")) == Counter(every_seq(url))
            assert 0 < sum(starts) < 20_000
            starts.clear()
            assert len(read_all(store, "jobs")) == 24


# -- segments that come and go -----------------------------------------------------------------------------------------


def test_a_plan_that_was_made_before_a_merge_is_still_read(store: BulkStore, url: str, folder: Path) -> None:
    add(url, 6)
    add(url, 6)
    add(url, 3)
    cursor = store.latest()
    planned = store.parts("attempts", EVERYTHING, parallelism=2)
    streamed = store.between(store.start(), cursor, parallelism=2)
    jobs = store.parts("jobs", EVERYTHING, parallelism=1)
    names = {name for name in objects(folder) if "/log/" in name}
    for _ in range(4):
        add(url, 6)
    assert names < {name for name in objects(folder) if "/log/" in name}
    for parts in (planned, streamed):
        assert sum(batch.num_rows for part in parts for batch in store.read(part)) == 15
    # Those are read as they are now.
    assert sum(batch.num_rows for part in jobs for batch in store.read(part)) == 39


async def _commit(url: str, number: int, dice: random.Random, rounds: int) -> None:
    queues = ("one", "two", "three")
    async with connect(url) as driver:
        for _ in range(rounds):
            now = await driver.time()
            await driver.enqueue(records(20, now, queue=dice.choice(queues)), now=now, new_ids=True)
            held = await driver.reserve(
                dice.choice(queues),
                limit=dice.randrange(1, 50),
                lease_for=600 * SECOND,
                now=now,
                worker=f"w{number}",
            )
            now = await driver.time()
            ends: list[Settlement] = [
                Retry(job.id, job.token or "", now, 1, Failure("OSError", "again"))
                if job.fence == 1 and dice.random() < 0.2
                else Ack(job.id, job.token or "")
                for job in held
            ]
            assert await driver.settle(ends, now=now) == [None] * len(ends)


def test_a_reader_that_is_stopped_at_random_sees_every_row_once_while_others_work(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(read, "ROWS_PER_PART", 20)
    within(url, lambda driver: driver.time())
    committers = [
        threading.Thread(target=lambda n=n: asyncio.run(_commit(url, n, random.Random(seed + n), 20)))
        for n in range(3)
    ]
    for thread in committers:
        thread.start()
    seen: list[int] = []
    try:
        with open_store(url) as first:
            cursor = first.start()
        is_over = False
        while not is_over:
            is_over = all(not thread.is_alive() for thread in committers)
            with open_store(url) as store:
                for _ in range(dice.randrange(1, 4)):
                    most = dice.choice([None, 1, 70, 400])
                    until = store.limited(cursor, store.latest(), rows=most)
                    found = seqs(store, cursor, until, parallelism=dice.randrange(1, 5))
                    assert found or not seen or until == cursor
                    assert most is None or len(found) <= most
                    if dice.random() < 0.3:
                        # Stopped before it could say that it is done: the same range is read again.
                        assert sorted(seqs(store, cursor, until)) == sorted(found)
                    seen += found
                    cursor = until
        with open_store(url) as store:
            seen += seqs(store, cursor, store.latest())
    finally:
        for thread in committers:
            thread.join()
    assert Counter(seen) == Counter(every_seq(url))
    assert len(seen) > 300


def test_every_job_is_read_once_while_workers_move_them(store: BulkStore, url: str) -> None:
    async def fill(driver: Driver) -> None:
        now = await driver.time()
        await driver.enqueue(records(300, now), now=now, new_ids=True)

    async def move(driver: Driver) -> None:
        now = await driver.time()
        while held := await driver.reserve("q", limit=20, lease_for=600 * SECOND, now=now, worker="w"):
            await driver.settle([Ack(job.id, job.token or "") for job in held], now=now)

    within(url, fill)
    parts = store.parts("jobs", EVERYTHING, parallelism=1)
    worker = threading.Thread(target=lambda: within(url, move))
    worker.start()
    try:
        looks = 0
        while worker.is_alive() or not looks:
            looks += 1
            found = Counter(
                job_id
                for part in parts
                for batch in store.read(part)
                for job_id in batch.column("id").to_pylist()
            )
            assert len(found) == 300
            assert set(found.values()) == {1}
    finally:
        worker.join()


# -- history that is gone ----------------------------------------------------------------------------------------------


def test_history_of_one_queue_that_was_removed_unread_is_named(store: BulkStore, url: str) -> None:
    add(url, 8, queue="kept")
    add(url, 8, queue="short")
    cursor = store.latest()
    add(url, 2, queue="kept")
    add(url, 9, queue="short")
    forget_history(url, "short")
    with pytest.raises(HistoryGone, match=r"queue 'short' after \d+ were removed by retention"):
        store.between(cursor, store.latest(), parallelism=2)


def test_history_of_a_queue_that_the_reader_never_saw_is_missed_too(store: BulkStore, url: str) -> None:
    add(url, 3)
    cursor = store.latest()
    add(url, 9, queue="new")
    forget_history(url, "new")
    add(url, 1, queue="new", later=2 * DAY)
    with pytest.raises(HistoryGone, match="queue 'new' after 0"):
        store.between(cursor, store.latest(), parallelism=2)
    # Who begins anew takes what there is.
    assert len(seqs(store, store.start(), store.latest())) == 4


def test_history_that_goes_while_it_is_read_is_a_loud_error(folder: Path) -> None:
    url = f"file://{folder}?sync=off&segment_rows=1000"
    add(url, 5)
    with open_store(url) as store:
        cursor = store.latest()
        add(url, 5)
        (part,) = store.between(cursor, store.latest(), parallelism=1)
        forget_history(url)
        with pytest.raises(HistoryGone, match="retention"):
            list(store.read(part))


def test_the_rest_of_a_first_pass_survives_retention(store: BulkStore, url: str) -> None:
    """Who reads from the start has no claim on what went before it got there, but on all that comes after what it has read."""
    add(url, 5, queue="a")
    add(url, 5, queue="b")
    cursor = store.limited(store.start(), store.latest(), rows=1)
    forget_history(url, "b")
    add(url, 2, queue="b", later=2 * DAY)
    until = store.latest()
    assert len(seqs(store, cursor, until)) == 6
    forget_history(url, "a")
    add(url, 2, queue="a", later=2 * DAY)
    assert len(seqs(store, until, store.latest())) == 2


def test_rows_that_retention_took_from_a_segment_are_not_read(store: BulkStore, url: str) -> None:
    add(url, 7)
    add(url, 13, later=2 * DAY)
    forget_history(url)
    left = every_seq(url)
    assert len(left) == 13
    assert Counter(read_all(store, "attempts")) == Counter(left)
    cursor, end = store.start(), store.latest()
    counts = []
    while cursor != end:
        until = store.limited(cursor, end, rows=5)
        counts.append(len(seqs(store, cursor, until)))
        cursor = until
    assert counts == [5, 5, 3]


def test_a_store_that_was_made_anew_at_the_same_place_is_another(url: str, folder: Path) -> None:
    add(url, 5)
    with open_store(url) as store:
        cursor = store.latest()
    for name in objects(folder):
        (folder / name).unlink()
    add(url, 5)
    with open_store(url) as store, pytest.raises(InvalidRequest, match="fresh checkpoint"):
        store.limited(cursor, store.latest(), rows=None)


# -- removing ----------------------------------------------------------------------------------------------------------


def test_ended_jobs_are_removed_by_id_wherever_they_are(store: BulkStore, url: str) -> None:
    archived = add(url, 10)
    ended = add(url, 2)

    async def leave_one(driver: Driver) -> str:
        now = await driver.time()
        (job,) = records(1, now)
        await driver.enqueue([job], now=now)
        return job.id

    ready = within(url, leave_one)
    answers = within(url, lambda driver: driver.remove([archived[3], ended[0], ready, "nobody", archived[4]]))
    assert answers[0] is answers[1] is answers[4] is JobState.DONE
    assert [type(one).__name__ for one in answers[2:4]] == ["JobError", "JobNotFound"]
    assert "cancel it first" in str(answers[2])
    left = {*archived, *ended, ready} - {archived[3], archived[4], ended[0]}
    assert set(read_all(store, "jobs")) == left
    assert set(read_all(store, "jobs", parallelism=1)) == left
    again = within(url, lambda driver: driver.remove([archived[3]]))
    assert type(again[0]).__name__ == "JobNotFound"

    async def stats(driver: Driver) -> tuple[int, int]:
        (found,) = await driver.stats(now=await driver.time())
        return found.counts[JobState.DONE], found.done_total

    assert within(url, stats) == (9, 12)


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def test_a_store_behind_http_is_read_and_streamed() -> None:
    url = f"{fresh_s3_url()}&segment_rows=5"

    async def work(driver: Driver) -> None:
        for _ in range(4):
            await finish(driver, 6)
            await fold(driver)

    within(url, work)
    with open_store(url) as store:
        assert len(read_all(store, "attempts")) == len(read_all(store, "jobs")) == 24
        cursor = store.limited(store.start(), store.latest(), rows=10)
        assert len(seqs(store, store.start(), cursor)) == 10
        assert len(seqs(store, cursor, store.latest())) == 14


def test_a_secret_is_in_no_message() -> None:
    url = "s3://bucket/prefix?region=x&endpoint=http://127.0.0.1:1&allow_http=on&access_key_id=me&secret_access_key=hidden"
    with open_store(url) as store:
        for use in (store.latest, lambda: store.stage("w", "0.1", [records(1, 1)])):
            with pytest.raises(BackendUnavailable) as error:
                use()
            assert "hidden" not in str(error.value)
