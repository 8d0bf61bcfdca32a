"""Bulk reading and writing on Redis: history that was trimmed, readers that come back, and writers that die.

`tests/bulk` shows on Redis what all stores do alike.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from bulk.stores import within
from records import make_record
from taskharbor.bulk import publish_staged, stage
from taskharbor.bulk import store as bulk_store
from taskharbor.bulk.cursors import HistoryGone, StoreReplaced
from taskharbor.bulk.stage import StagingLost, new_write, numbered_write
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.bulk.tables import Selection, Table
from taskharbor.drivers.contract import Ack, Driver, QueueSettings
from taskharbor.drivers.redis.library import RedisCall
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros
from taskharbor_testkit.servers import RedisAt, RedisServer, shared_redis_cluster, with_fresh_prefix

DAY = 86_400 * SECOND
Run = Callable[..., Awaitable[Any]]

and_in_a_cluster = pytest.mark.parametrize(
    "several", ["one server", pytest.param("cluster", marks=pytest.mark.slow)], indirect=True
)


def records(count: int, now: Micros = 1, *, queue: str = "q") -> list[JobRecord]:
    return [make_record(queue=queue, now=now) for _ in range(count)]


def add(url: str, count: int, *, queue: str = "q", later: Micros = 0) -> None:
    """So many jobs, done at once: as many rows of the log."""

    async def finish(driver: Driver) -> None:
        now = await driver.time() + later
        await driver.enqueue(records(count, now, queue=queue), now=now, new_ids=True)
        held = await driver.reserve(queue, limit=count, lease_for=60 * SECOND, now=now, worker="w")
        assert set(await driver.settle([Ack(job.id, job.token or "") for job in held], now=now)) <= {None}

    within(url, finish)


def forget_history(url: str, queue: str = "q", *, rows: int = 1000) -> None:
    """Retention takes so many rows at most."""

    async def remove(driver: Driver) -> None:
        now = await driver.time()
        await driver.configure(queue, QueueSettings(keep_attempts_us=DAY), now=now)
        await driver.prune(now=now + 2 * DAY, limit=rows)

    within(url, remove)


def seqs(store: BulkStore, after: str, until: str, parallelism: int = 3) -> list[int]:
    parts = store.between(after, until, parallelism=parallelism)
    return [seq for part in parts for batch in store.read(part) for seq in batch.column("seq").to_pylist()]


def every_seq(url: str) -> list[int]:
    return [one.seq for one in within(url, lambda driver: driver.read_attempts(limit=1_000_000)).attempts]


def waiting(url: str, *queues: str) -> dict[str, int]:
    async def count(driver: Driver) -> dict[str, int]:
        now = await driver.time()
        stats = [(await driver.stats(now=now, queue=queue))[0] for queue in queues]
        return {one.queue: one.counts[JobState.READY] for one in stats}

    return within(url, count)


@pytest.fixture
def store(redis_url: str) -> Iterator[BulkStore]:
    with open_store(redis_url) as opened:
        yield opened


@pytest.fixture
def several(request: pytest.FixtureRequest) -> str:
    if request.param == "cluster":
        return with_fresh_prefix(shared_redis_cluster().url)
    url: str = request.getfixturevalue("redis_url")
    return url


# -- history that is gone ---------------------------------------------------------------------------------------------


def test_history_of_a_queue_that_the_reader_never_saw_is_missed(store: BulkStore, redis_url: str) -> None:
    add(redis_url, 3)
    cursor = store.latest()
    add(redis_url, 3, queue="new")
    forget_history(redis_url, "new")
    add(redis_url, 1, queue="new", later=2 * DAY)
    with pytest.raises(HistoryGone, match=r"queue 'new' after 0 were removed by retention"):
        store.between(cursor, store.latest(), parallelism=2)
    # Who begins anew takes what there is.
    assert len(seqs(store, store.start(), store.latest())) == 4


def test_a_stream_trimmed_by_hand_is_noticed(store: BulkStore, redis_server: RedisAt, redis_url: str) -> None:
    add(redis_url, 5)
    cursor = store.latest()
    add(redis_url, 5)
    redis_server.execute("XTRIM", f"{parse_url(redis_url).prefix}{{q}}:attempts", "MAXLEN", 1)
    with pytest.raises(HistoryGone, match="by hand"):
        store.between(cursor, store.latest(), parallelism=2)


def test_history_that_goes_while_it_is_read_is_a_loud_error(store: BulkStore, redis_url: str) -> None:
    add(redis_url, 5)
    cursor = store.latest()
    add(redis_url, 5)
    (part,) = store.between(cursor, store.latest(), parallelism=1)
    forget_history(redis_url)
    with pytest.raises(HistoryGone, match="retention"):
        list(store.read(part))


def test_the_rest_of_a_first_pass_survives_retention(store: BulkStore, redis_url: str) -> None:
    """Who reads from the start has no claim on what went before it got there, but on all that comes after what it has read."""
    add(redis_url, 5, queue="a")
    add(redis_url, 5, queue="b")
    cursor = store.limited(store.start(), store.latest(), rows=1)
    forget_history(redis_url, "b")
    add(redis_url, 2, queue="b", later=2 * DAY)
    until = store.latest()
    assert len(seqs(store, cursor, until)) == 6
    forget_history(redis_url, "a")
    add(redis_url, 2, queue="a", later=2 * DAY)
    assert len(seqs(store, until, store.latest())) == 2


def test_rows_that_share_an_entry_are_read_once_wherever_it_is_cut(
    store: BulkStore, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_store, "ROWS_PER_PART", 10)
    for count in (250, 1, 30, 100):
        add(redis_url, count)
    expected = every_seq(redis_url)
    assert len(expected) == 381
    cursor, until = store.start(), store.latest()
    assert len(store.between(cursor, until, parallelism=6)) > 1
    assert sorted(seqs(store, cursor, until, parallelism=6)) == expected
    for rows in (1, 60, 100, 7, 213):
        following = store.limited(cursor, until, rows=rows)
        assert sorted(seqs(store, cursor, following, parallelism=4)) == expected[:rows]
        expected = expected[rows:]
        cursor = following
    assert store.limited(cursor, until, rows=5) == until


def test_a_reader_that_has_seen_all_that_went_misses_nothing(store: BulkStore, redis_url: str) -> None:
    for count in (6, 4, 5):
        add(redis_url, count)
    expected, cursor = every_seq(redis_url), store.start()
    for rows in (6, 2):
        cursor = store.limited(cursor, store.latest(), rows=rows)
        forget_history(redis_url, rows=rows)
        expected = expected[rows:]
        assert every_seq(redis_url) == sorted(seqs(store, cursor, store.latest())) == expected
    forget_history(redis_url, rows=1)
    with pytest.raises(HistoryGone, match="retention"):
        seqs(store, cursor, store.latest())


# -- a server that is not what it was -----------------------------------------------------------------------------------


def test_a_promoted_replica_that_lacks_rows_is_read_on_from_where_it_is() -> None:
    with RedisServer.start() as server:
        add(server.url, 5)
        with open_store(server.url) as store:
            common = store.latest()
        with server.replica() as replica:
            replica.catch_up(server)
            replica.promote()
            add(server.url, 5)
            with open_store(server.url) as store:
                cursor = store.latest()
            # The old server's clock was ahead, so that its numbers are higher than any that the new one gives for a while.
            epoch, is_open, places = json.loads(cursor)
            ahead = json.dumps([epoch, is_open, {"q": places["q"] + 3600 * SECOND}])
            with open_store(replica.url) as store:
                stepped_back = store.limited(ahead, store.latest(), rows=None)
                assert json.loads(stepped_back) == json.loads(common)
                add(replica.url, 3)
                assert len(seqs(store, stepped_back, store.latest())) == 3


def test_a_server_that_came_back_without_its_data_is_another_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "BLOB_JOBS", 10)
    with RedisServer.start() as server, open_store(server.url) as store:
        add(server.url, 5)
        cursor = store.latest()

        def batches() -> Iterator[Sequence[JobRecord]]:
            yield records(10)
            # One chunk is on its way while the next is made; by the third the first is there.
            yield records(10)
            server.flush()
            yield records(10)

        write = new_write()
        store.stage(write, "0.1", batches())
        with pytest.raises(StagingLost, match="nothing was published"):
            store.publish(write, ["0.1"], now=2)
        add(server.url, 5)
        with pytest.raises(StoreReplaced, match=r"lost all its data.*fresh checkpoint"):
            store.limited(cursor, store.latest(), rows=None)


# -- reading while jobs flow -------------------------------------------------------------------------------------------


@and_in_a_cluster
def test_a_reader_stopped_at_random_sees_each_row_once(several: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While others work."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(bulk_store, "ROWS_PER_PART", 100)

    def work() -> None:
        for _ in range(20):
            add(several, dice.randrange(1, 40), queue=dice.choice(("one", "two", "three")))

    committers = [threading.Thread(target=work) for _ in range(3)]
    for thread in committers:
        thread.start()
    seen: list[int] = []
    is_over = False
    with open_store(several) as first:
        cursor = first.start()
    while not is_over:
        is_over = all(not thread.is_alive() for thread in committers)
        with open_store(several) as store:
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
    with open_store(several) as store:
        seen += seqs(store, cursor, store.latest())
    assert Counter(seen) == Counter(every_seq(several))
    assert len(seen) > 300


# -- writing ---------------------------------------------------------------------------------------------------------


def keys(server: RedisAt, url: str) -> dict[str, int]:
    """Every key of the store, and for how long it stays: -1 for ever."""
    prefix = parse_url(url).prefix
    found = [key.decode() for key in server.execute("KEYS", f"{prefix}*")]
    return {key.removeprefix(prefix): server.execute("TTL", key) for key in found}


def test_what_a_write_leaves_goes_by_itself(store: BulkStore, redis_server: RedisAt, redis_url: str) -> None:
    write = new_write()
    store.stage(write, "0.1", [records(1500), records(10, queue="other")])
    # Were the writer to die now, all of it would go.
    assert -1 not in keys(redis_server, redis_url).values()
    store.abandon(write)
    assert set(keys(redis_server, redis_url)) == {"{writes}:blob"}
    write = numbered_write("stream", 7)
    store.stage(write, "0.1", [records(10)])
    assert store.publish(write, ["0.1"], now=2) == 10
    found = keys(redis_server, redis_url)
    assert {key for key, left in found.items() if left != -1} == {"{q}:published:stream"}
    assert [key for key in found if "blob" in key] == ["{writes}:blob"]


def on_run(monkeypatch: pytest.MonkeyPatch, run: Callable[[Run, Sequence[RedisCall]], Any]) -> None:
    """Let something else stand between the driver and its store."""
    plain = RedisStore.run

    def runs(connections: RedisStore, calls: Sequence[RedisCall], **options: bool) -> Any:
        return run(lambda **more: plain(connections, calls, **options | more), calls)

    monkeypatch.setattr(RedisStore, "run", runs)


def test_every_step_of_a_write_may_be_carried_out_twice(
    store: BulkStore, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an answer was lost and the call is sent again."""

    async def twice(run: Run, calls: Sequence[RedisCall]) -> Any:
        await run()
        return await run(is_again=True)

    on_run(monkeypatch, twice)
    monkeypatch.setattr(publish_staged, "BLOB_JOBS", 70)
    monkeypatch.setattr(stage, "BLOB_JOBS", 70)
    write = new_write()
    jobs = [*records(150), *(make_record(queue="keyed", key=f"k{n % 10}") for n in range(20))]
    assert store.stage(write, "0.1", [jobs]) == 170
    for _ in range(2):
        assert store.publish(write, ["0.1"], now=2) == 160
        assert waiting(redis_url, "q", "keyed") == {"q": 150, "keyed": 10}


def test_a_small_write_is_in_all_queues_at_once(store: BulkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one server: nobody can look in between."""
    steps: list[int] = []

    def counted(run: Run, calls: Sequence[RedisCall]) -> Any:
        steps.append(sum(call.function == "publish" for call in calls))
        return run()

    on_run(monkeypatch, counted)
    write = new_write()
    store.stage(write, "0.1", [[*records(50, queue="a"), *records(50, queue="b")]])
    assert store.publish(write, ["0.1"], now=2) == 100
    assert [step for step in steps if step] == [2]


QUEUES = ("alpha", "beta", "gamma")
TASKS = ["0.1", "1.1", "2.1"]
ALL = dict.fromkeys(QUEUES, 50)


def half_published(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A write of which something can be seen, and something not yet: its publisher lost the server after one step."""
    write = new_write()
    left = 1

    async def dying(run: Run, calls: Sequence[RedisCall]) -> Any:
        nonlocal left
        left -= any(call.function == "publish" for call in calls)
        if left < 0:
            raise BackendUnavailable("the publisher died")
        return await run()

    monkeypatch.setattr(publish_staged, "BLOB_JOBS", 70)
    with open_store(url) as store:
        for task, queue in zip(TASKS, QUEUES, strict=True):
            store.stage(write, task, [records(50, queue=queue)])
        with monkeypatch.context() as patch:
            on_run(patch, dying)
            with pytest.raises(BackendUnavailable, match="died"):
                store.publish(write, TASKS, now=2)
    assert 0 < sum(waiting(url, *QUEUES).values()) < 150
    return write


@pytest.mark.parametrize("by", ["its publisher", "another write", "abandoning it", "a worker's upkeep"])
@and_in_a_cluster
def test_what_a_publisher_began_is_finished(several: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def keep_up(driver: Driver) -> None:
        await driver.prune(now=await driver.time())

    write = half_published(several, monkeypatch)
    within(several, keep_up)
    assert sum(waiting(several, *QUEUES).values()) < 150, "the publisher may be about to finish it itself"
    monkeypatch.setattr(publish_staged, "LEFT_BEHIND", 0)
    with open_store(several) as store:
        if by == "another write":
            other = new_write()
            store.stage(other, "0.1", [records(1, queue="delta")])
            assert store.publish(other, ["0.1"], now=3) == 1
        elif by == "abandoning it":
            store.abandon(write)
        elif by == "a worker's upkeep":
            within(several, keep_up)
        if by != "its publisher":
            assert waiting(several, *QUEUES) == ALL
        assert store.publish(write, TASKS, now=3) == 150
    assert waiting(several, *QUEUES) == ALL


def test_jobs_that_a_node_lost_while_they_were_published_are_reported(
    store: BulkStore, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = half_published(redis_url, monkeypatch)
    # The last of the write's blobs, with the jobs of `gamma`.
    names = within(redis_url, lambda driver: driver.list_blobs(stage.folder_of(write)))
    last = max((one for one in names if not one.endswith("-end")), key=lambda one: one.rpartition("/")[2])
    within(redis_url, lambda driver: driver.drop_blobs([last]))
    with pytest.raises(TaskHarborError, match=r"50 jobs of .* were lost .* the other 100 are jobs now"):
        store.publish(write, TASKS, now=3)
    assert store.publish(write, TASKS, now=3) == 100
    assert waiting(redis_url, *QUEUES) == {"alpha": 50, "beta": 50, "gamma": 0}


@pytest.mark.parametrize("queue", ['we"ird }{ % ☂\\', "taskharbor", "staged:x:y"])
def test_a_queue_may_have_any_name(store: BulkStore, redis_url: str, queue: str) -> None:
    write = numbered_write('odd: {series} / "☂"', 3)
    store.stage(write, "0.1", [records(30, queue=queue)])
    assert store.publish(write, ["0.1"], now=2) == 30
    add(redis_url, 5, queue=queue)
    cursor = store.limited(store.start(), store.latest(), rows=2)
    assert len(seqs(store, cursor, store.latest())) == 3
    tables: dict[Table, int] = {"attempts": 5, "jobs": 35, "queues": 1}
    for table, count in tables.items():
        parts = store.parts(table, Selection(queue=queue), parallelism=2)
        found = [
            name for part in parts for batch in store.read(part) for name in batch.column("queue").to_pylist()
        ]
        assert found == [queue] * count


def test_a_password_is_in_no_message() -> None:
    with open_store("redis://me:secret@127.0.0.1:1/0") as store:
        for use in (store.latest, lambda: store.stage("w", "0.1", [records(1)])):
            with pytest.raises(BackendUnavailable) as error:
                use()
            assert "secret" not in str(error.value)
