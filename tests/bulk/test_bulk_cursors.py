"""The attempt log as a stream: every row once whatever the steps, none skipped, and a loud word where rows are gone."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest

from bulk.stores import EVERYTHING, LOG_KINDS, add, every_seq, finish, rows, selected, seqs, within
from drivers.postgres.harness import Raw, log_row
from taskharbor.bulk.cursors import HistoryGone, StoreReplaced
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.drivers.contract import DAY, Driver, QueueSettings
from taskharbor.drivers.postgres import bulk as reading
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.errors import InvalidRequest

by_queue = pytest.mark.parametrize("kind", ["redis", "files", "files, small segments"], indirect=True)
"""Stores with a log of its own for each queue."""
and_as_brokers_read = pytest.mark.parametrize("kind", [*LOG_KINDS, "postgres by the contract"], indirect=True)


@pytest.fixture(params=LOG_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def remove(driver: Driver, *, least: int, **days: int) -> None:
    """Nine days pass; the queues keep their attempts for so many of them."""
    now = await driver.time()
    for queue, kept in days.items():
        await driver.configure(queue, QueueSettings(keep_attempts_us=kept * DAY), now=now)
    assert await driver.prune(now=now + 9 * DAY) >= least


def test_random_steps_see_every_row_once(store: BulkStore, url: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    seen: list[int] = []
    cursor = store.start()
    for _ in range(4):
        add(url, dice.randrange(1, 90))
        end = store.latest()
        while cursor != end:
            step = dice.choice([None, 1, 7, 50])
            until = store.limited(cursor, end, rows=step)
            found = seqs(store, cursor, until)
            assert 0 < len(found) <= (step or len(found))
            seen += found
            cursor = until
    assert sorted(seen) == every_seq(url)


@and_as_brokers_read
def test_a_cursor_survives_the_store_that_gave_it(store: BulkStore, url: str) -> None:
    within(url, lambda driver: driver.time())
    assert seqs(store, store.start(), store.latest()) == []
    add(url, 3)
    latest = store.latest()
    assert store.latest() == store.limited(latest, latest, rows=5) == latest
    assert store.between(latest, latest, parallelism=3) == []
    add(url, 4)
    store.close()
    with type(store)(url) as another:
        assert len(seqs(another, latest, another.latest())) == 4


def test_a_large_range_is_shared_out_evenly(
    store: BulkStore, url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_ROWS_PER_PART", 25)
    monkeypatch.setattr("taskharbor.bulk.store.ROWS_PER_PART", 25)

    async def lots(driver: Driver) -> None:
        for _ in range(40):
            await finish(driver, 5)

    within(url, lots)
    parts = store.between(store.start(), store.latest(), parallelism=4)
    found = [[row["seq"] for row in rows(store, [part])] for part in parts]
    assert sorted(seq for part in found for seq in part) == every_seq(url)
    assert (sum(map(len, found)), len(parts)) == (200, 4)
    # Merged segments say how many rows they have, not where: the shares of small ones are guesses.
    assert "small" in kind or all(30 <= len(part) <= 70 for part in found), list(map(len, found))


@and_as_brokers_read
def test_history_that_was_removed_unread_is_a_loud_error(store: BulkStore, url: str) -> None:
    """But rows that were read are nobody's loss. A queue may be kept shorter than others."""
    add(url, 5)
    cursor = store.latest()
    within(url, partial(remove, least=5, q=1))
    # The end of the log is gone, so what is left ends before the cursor; the reader must not go back.
    assert store.limited(cursor, store.latest(), rows=None) == cursor
    assert store.limited(cursor, store.latest(), rows=3) == cursor
    add(url, 2, later=9 * DAY)
    assert len(seqs(store, cursor, store.latest())) == 2

    add(url, 5, queue="short")
    cursor = store.latest()
    add(url, 5, queue="short")
    add(url, 5)
    within(url, partial(remove, least=10, short=1, q=99))
    with pytest.raises(HistoryGone, match=r"removed by retention.*checkpoint"):
        store.between(cursor, store.latest(), parallelism=2)
    assert len(seqs(store, store.start(), store.latest())) == 7


@by_queue
def test_history_of_a_queue_that_the_reader_never_saw_is_missed(store: BulkStore, url: str) -> None:
    add(url, 3)
    cursor = store.latest()
    add(url, 9, queue="new")
    within(url, partial(remove, least=9, new=1))
    add(url, 1, queue="new", later=9 * DAY)
    with pytest.raises(HistoryGone, match="queue 'new' after 0 were removed by retention"):
        store.between(cursor, store.latest(), parallelism=2)
    # A reader that begins anew takes what there is.
    assert len(seqs(store, store.start(), store.latest())) == 4


@by_queue
def test_history_that_goes_while_it_is_read_is_a_loud_error(store: BulkStore, url: str) -> None:
    add(url, 5)
    cursor = store.latest()
    add(url, 5)
    (part,) = store.between(cursor, store.latest(), parallelism=1)
    within(url, partial(remove, least=10, q=1))
    with pytest.raises(HistoryGone, match="retention"):
        list(store.read(part))


@by_queue
def test_the_rest_of_a_first_pass_survives_retention(store: BulkStore, url: str) -> None:
    """A reader from the start has no claim on what went before it got there, but on all that comes after what it has read."""
    add(url, 5, queue="a")
    add(url, 5, queue="b")
    cursor = store.limited(store.start(), store.latest(), rows=1)
    within(url, partial(remove, least=5, b=1))
    add(url, 2, queue="b", later=9 * DAY)
    until = store.latest()
    assert len(seqs(store, cursor, until)) == 6
    within(url, partial(remove, least=5, a=1))
    add(url, 2, queue="a", later=9 * DAY)
    assert len(seqs(store, until, store.latest())) == 2


def test_a_cursor_of_another_store_is_refused(store: BulkStore, url: str, kind: str) -> None:
    add(url, 5)
    strange = "1.4000000000.4000000" if kind == "postgres" else '["strange",false,{"q":4000000}]'
    with pytest.raises(StoreReplaced, match="another"):
        store.between(strange, strange.replace("4000000", "4000001"), parallelism=2)
    with pytest.raises(InvalidRequest, match="not a cursor"):
        store.limited("nonsense", store.latest(), rows=1)


@and_as_brokers_read
def test_a_log_that_ends_before_its_reader_was_put_back(store: BulkStore, url: str, kind: str) -> None:
    """On Redis places are instants, so nobody is given one of those that were lost, and the reader goes on."""
    add(url, 5)
    end = store.latest()
    if kind == "postgres":
        with Raw(parse_url(url)) as raw:
            raw("DELETE FROM attempts WHERE seq > 3")
            raw("SELECT setval('attempt_seq', 3)")
        ahead, end = end, store.latest()
    else:
        store_id, is_open, places = json.loads(end)
        ahead = json.dumps([store_id, is_open, {name: place + 2**40 for name, place in places.items()}])
    if kind == "redis":
        assert store.limited(ahead, end, rows=None) == end
        assert store.between(ahead, end, parallelism=2) == []
        return
    with pytest.raises(StoreReplaced, match=r"put back to an earlier time.*a new lake"):
        store.limited(ahead, end, rows=None)
    with pytest.raises(StoreReplaced, match="put back"):
        store.between(ahead, end, parallelism=2)
    # On PostgreSQL new rows are behind the cursor: transactions go on.
    add(url, 1)
    with pytest.raises(StoreReplaced, match="put back"):
        store.between(ahead, store.latest(), parallelism=2)


# -- PostgreSQL: transactions commit in another order than they began ------------------------------------------------


def test_a_row_that_commits_late_is_not_skipped(postgres_url: str) -> None:
    add(postgres_url, 1)
    with open_store(postgres_url) as store, Raw(parse_url(postgres_url)) as slow:
        before = store.latest()
        slow("BEGIN")
        late = log_row(slow)
        add(postgres_url, 3)
        assert store.latest() == before
        # A batch read needs no order, so it shows what is committed when it is planned.
        planned = store.parts("attempts", EVERYTHING, parallelism=2)
        assert len(rows(store, planned)) == 4
        slow("COMMIT")
        assert len(rows(store, planned)) == 4
        found = seqs(store, before, store.latest())
        assert len(found) == 4
        assert late in found


def test_rows_of_an_earlier_cluster_come_first_and_once(postgres_url: str) -> None:
    add(postgres_url, 10)
    with Raw(parse_url(postgres_url)) as raw:
        # As after dump and restore into a cluster whose transactions have lower numbers.
        raw("UPDATE attempts SET xid = (1::bigint << 48) + 1000000000 + seq")
        raw("UPDATE epochs SET system_id = 1")
    add(postgres_url, 5)
    with open_store(postgres_url) as store:
        cursor, end = store.start(), store.latest()
        assert end.startswith("2.")
        seen = []
        while cursor != end:
            until = store.limited(cursor, end, rows=4)
            seen.append(seqs(store, cursor, until))
            cursor = until
        assert [len(found) for found in seen] == [4, 4, 4, 3]
        assert [seq for found in seen for seq in sorted(found)] == list(range(1, 16))
        assert len(seqs(store, store.start(), end)) == 15
        assert len(selected(store, "attempts")) == 15
