"""Bulk reading from object stores: segments that come and go under a reader, logs in shards, history that is gone. `tests/bulk`
has the rest, on a folder with small segments too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bulk.stores import within
from drivers.objectstore.harness import ack, add, claim, jobs_of, objects
from taskharbor.bulk import read_tables
from taskharbor.bulk.cursors import HistoryGone
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.bulk.tables import Selection, Table
from taskharbor.drivers.contract import DAY, Driver, QueueSettings
from taskharbor.drivers.objectstore import archive
from taskharbor.drivers.objectstore.blobs import Blob
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.errors import BackendUnavailable

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
        cursor = store.limited(store.start(), store.latest(), rows=30)
        first, rest = seqs(store, store.start(), cursor), seqs(store, cursor, store.latest())
        assert 0 < len(first) <= 30
        assert Counter(first + rest) == every_seq(url)
        assert len(store.between(store.start(), store.latest(), parallelism=4)) == 4
        (part,) = store.parts("queues", EVERYTHING, parallelism=1)
        ((queue,),) = [batch.to_pylist() for batch in store.read(part)]
        assert (queue["queue"], queue["done"], queue["done_total"]) == ("q", 100, 100)
        assert len(set(read_all(store, "jobs"))) == 100


def test_only_the_rows_of_a_large_segment_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{folder}?sync=off&segment_rows=5&merge=2"
    for _ in range(4):
        add(url, 6, payload=random.randbytes(20_000))
    starts: list[int] = []
    read_file = LocalFiles.read

    async def noting(
        blobs: LocalFiles, name: str, unless: Any = None, size: int | None = None
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


async def commit(driver: Driver, dice: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        now = await driver.time()
        await driver.enqueue(jobs_of(20, now=now, queue=dice.choice(QUEUES)), now=now, new_ids=True)
        await ack(driver, await claim(driver, dice.randrange(1, 50), queue=dice.choice(QUEUES), now=now), now)


@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_a_reader_stopped_at_random_misses_none(
    url: str, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(read_tables, "ROWS_PER_PART", 20)
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
    assert Counter(seen) == every_seq(url)
    assert len(seen) > 10 * rounds


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


def test_a_secret_is_in_no_message() -> None:
    options = "region=x&endpoint=http://127.0.0.1:1&allow_http=on&access_key_id=me&secret_access_key=hidden"
    with open_store(f"s3://bucket/prefix?{options}") as store:
        for use in (store.latest, lambda: store.stage("w", "0.1", [jobs_of(1)])):
            with pytest.raises(BackendUnavailable) as error:
                use()
            assert "hidden" not in str(error.value)
