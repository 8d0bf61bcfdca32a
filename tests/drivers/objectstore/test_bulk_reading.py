"""Bulk reading from object stores: segments that come and go under a reader, logs in shards, history that is gone. `tests/bulk`
has the rest, on a folder with small segments too."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bulk.stores import within
from drivers.objectstore.harness import ack, add, claim, jobs_of, objects
from taskharbor.bulk import read_tables
from taskharbor.bulk.cursors import HistoryGone
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.bulk.tables import Selection, Table
from taskharbor.drivers.contract import DAY, Ack, Driver, QueueSettings, RetryAt, Settlement
from taskharbor.drivers.objectstore import archive
from taskharbor.drivers.objectstore.blobs import Blob, Version
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import SECOND, Failure

EVERYTHING = Selection()
QUEUES = ("one", "two", "three")


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


def read_all(store: BulkStore, table: Table) -> list[str | int]:
    name = {"attempts": "seq", "jobs": "id", "queues": "queue"}[table]
    parts = store.parts(table, EVERYTHING, parallelism=3)
    return [value for part in parts for batch in store.read(part) for value in batch.column(name).to_pylist()]


def seqs(store: BulkStore, after: str, until: str, parallelism: int = 3) -> list[int]:
    parts = store.between(after, until, parallelism=parallelism)
    return [seq for part in parts for batch in store.read(part) for seq in batch.column("seq").to_pylist()]


def streamed(store: BulkStore, rows: int) -> list[list[int]]:
    """The log, in steps of at most so many rows."""
    cursor, end = store.start(), store.latest()
    steps: list[list[int]] = []
    while cursor != end:
        until = store.limited(cursor, end, rows=rows)
        steps.append(seqs(store, cursor, until))
        assert 0 < len(steps[-1]) <= rows
        cursor = until
    return steps


def every_seq(url: str) -> Counter[int]:
    page = within(url, lambda driver: driver.read_attempts(limit=1_000_000))
    return Counter(one.seq for one in page.attempts)


def forget_history(url: str, queue: str = "q") -> None:
    async def remove(driver: Driver) -> None:
        now = await driver.time()
        await driver.configure(queue, QueueSettings(keep_attempts_us=DAY), now=now)
        await driver.prune(now=now + 2 * DAY)

    within(url, remove)


# -- where rows are ---------------------------------------------------------------------------------------


def test_a_reader_writes_nothing(store: BulkStore, url: str, folder: Path) -> None:
    add(url, 40)
    before = objects(folder)
    for table in ("attempts", "jobs", "queues"):
        assert read_all(store, table)
    cursor = store.limited(store.start(), store.latest(), rows=7)
    assert len(seqs(store, cursor, store.latest())) == 33
    assert objects(folder) == before


def test_shards_of_a_queue_are_one_log_to_the_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_tables, "ROWS_PER_PART", 20)
    url = f"file://{folder}?sync=off&segment_rows=5&shards=3"
    add(url, 100)
    with open_store(url) as store:
        assert Counter(seq for step in streamed(store, 30) for seq in step) == every_seq(url)
        assert len(store.between(store.start(), store.latest(), parallelism=4)) == 4
        (part,) = store.parts("queues", EVERYTHING, parallelism=1)
        ((queue,),) = [batch.to_pylist() for batch in store.read(part)]
        assert (queue["queue"], queue["done"], queue["done_total"]) == ("q", 100, 100)
        assert len(set(read_all(store, "jobs"))) == 100


def test_of_a_large_segment_only_the_rows_are_read_for_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{folder}?sync=off&segment_rows=5&merge=2"
    for _ in range(4):
        add(url, 6, payload=random.randbytes(20_000))
    starts: list[int] = []
    read_file = LocalFiles.read

    async def noting(
        blobs: LocalFiles, name: str, unless: Version | None = None, size: int | None = None
    ) -> Blob | None:
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
            assert Counter(read_all(store, "attempts")) == every_seq(url)
            assert 0 < sum(starts) < 20_000
            starts.clear()
            assert len(read_all(store, "jobs")) == 24


# -- segments that come and go ----------------------------------------------------------------------------


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
    for parts, rows in ((planned, 15), (between, 15), (jobs, 39)):
        assert sum(batch.num_rows for part in parts for batch in store.read(part)) == rows


async def commit(url: str, dice: random.Random, rounds: int) -> None:
    async with connect(url) as driver:
        for _ in range(rounds):
            now = await driver.time()
            await driver.enqueue(jobs_of(20, now=now, queue=dice.choice(QUEUES)), now=now, new_ids=True)
            held = await driver.reserve(
                dice.choice(QUEUES), limit=dice.randrange(1, 50), lease_for=600 * SECOND, now=now, worker="w"
            )
            ends: list[Settlement] = [
                RetryAt(job.id, job.token or "", now, 1, Failure("OSError", "again"))
                if job.fence == 1 and dice.random() < 0.2
                else Ack(job.id, job.token or "")
                for job in held
            ]
            assert await driver.settle(ends, now=await driver.time()) == [None] * len(ends)


@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_a_reader_that_is_stopped_at_random_sees_every_row_once_while_others_work(
    url: str, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(read_tables, "ROWS_PER_PART", 20)
    within(url, lambda driver: driver.time())
    committers = [
        threading.Thread(target=lambda n=n: asyncio.run(commit(url, random.Random(seed + n), rounds)))
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
    assert Counter(seen) == every_seq(url)
    assert len(seen) > 10 * rounds


def test_every_job_is_read_once_while_workers_move_them(store: BulkStore, url: str) -> None:
    async def move(driver: Driver) -> None:
        while held := await claim(driver, 20):
            await ack(driver, held)

    within(url, lambda driver: driver.enqueue(jobs_of(150), now=1, new_ids=True))
    parts = store.parts("jobs", EVERYTHING, parallelism=1)
    worker = threading.Thread(target=lambda: within(url, move))
    worker.start()
    try:
        looks = 0
        while worker.is_alive() or not looks:
            looks += 1
            batches = [batch for part in parts for batch in store.read(part)]
            found = [job_id for batch in batches for job_id in batch.column("id").to_pylist()]
            assert len(found) == len(set(found)) == 150
    finally:
        worker.join()


# -- history that is gone ---------------------------------------------------------------------------------


def test_history_of_a_queue_that_the_reader_never_saw_is_missed_too(store: BulkStore, url: str) -> None:
    add(url, 3)
    cursor = store.latest()
    add(url, 9, queue="new")
    forget_history(url, "new")
    add(url, 1, queue="new", later=2 * DAY)
    with pytest.raises(HistoryGone, match="queue 'new' after 0 were removed by retention"):
        store.between(cursor, store.latest(), parallelism=2)
    # A reader that begins anew takes what there is.
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
    """A reader from the start has no claim on what went before it got there, but on all that comes after what it has read."""
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
    steps = streamed(store, 5)
    assert [len(step) for step in steps] == [5, 5, 3]
    assert (
        Counter(read_all(store, "attempts"))
        == every_seq(url)
        == Counter(seq for step in steps for seq in step)
    )


def test_a_store_that_was_made_anew_at_the_same_place_is_another(url: str, folder: Path) -> None:
    add(url, 5)
    with open_store(url) as store:
        cursor = store.latest()
    for name in objects(folder):
        (folder / name).unlink()
    add(url, 5)
    with open_store(url) as store, pytest.raises(InvalidRequest, match="fresh checkpoint"):
        store.limited(cursor, store.latest(), rows=None)


def test_a_secret_is_in_no_message() -> None:
    options = "region=x&endpoint=http://127.0.0.1:1&allow_http=on&access_key_id=me&secret_access_key=hidden"
    with open_store(f"s3://bucket/prefix?{options}") as store:
        for use in (store.latest, lambda: store.stage("w", "0.1", [jobs_of(1)])):
            with pytest.raises(BackendUnavailable) as error:
                use()
            assert "hidden" not in str(error.value)
