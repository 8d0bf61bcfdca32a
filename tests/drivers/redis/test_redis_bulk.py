"""Redis by the million: history that was trimmed, readers that come back, writers that die, and tasks that come late."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import pytest
from redis import Redis

from taskharbor.bulk import publish, read, stage
from taskharbor.bulk.cursors import HistoryGone
from taskharbor.bulk.stage import StagingLost, new_write, numbered_write
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.bulk.tables import Selection
from taskharbor.drivers.contract import Ack, Driver, Fail, QueueSettings, Retry, Settlement
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError
from taskharbor.jobs import SECOND, Failure, JobRecord, JobState, Micros
from taskharbor.requests import new_id, new_ids
from taskharbor_testkit.servers import RedisServer, shared_redis_cluster, with_fresh_prefix

T = TypeVar("T")
DAY = 86_400 * SECOND
EVERYTHING = Selection()


def within(url: str, use: Callable[[Driver], Awaitable[T]]) -> T:
    async def run() -> T:
        async with connect(url) as driver:
            return await use(driver)

    return asyncio.run(run())


def records(count: int, now: Micros, *, queue: str = "q", **fields: Any) -> list[JobRecord]:
    return [
        JobRecord(id=job_id, type="t", queue=queue, run_at_us=now, created_at_us=now, **fields)
        for job_id in new_ids(count)
    ]


async def finish(driver: Driver, count: int, *, queue: str = "q", later: Micros = 0) -> None:
    """So many jobs, done at once: as many rows of the log."""
    now = await driver.time() + later
    await driver.enqueue(records(count, now, queue=queue), now=now, new_ids=True)
    held = await driver.reserve(queue, limit=count, lease_for=60 * SECOND, now=now, worker="w")
    assert await driver.settle([Ack(job.id, job.token or "") for job in held], now=now) == [None] * count


def add(url: str, count: int, *, queue: str = "q", later: Micros = 0) -> None:
    within(url, lambda driver: finish(driver, count, queue=queue, later=later))


def forget_history(url: str, queue: str = "q") -> None:
    async def remove(driver: Driver) -> None:
        now = await driver.time()
        await driver.configure(queue, QueueSettings(keep_attempts_us=DAY), now=now)
        await driver.prune(now=now + 2 * DAY)

    within(url, remove)


def seqs(store: BulkStore, after: str, until: str, parallelism: int = 3) -> list[int]:
    parts = store.between(after, until, parallelism=parallelism)
    return [seq for part in parts for batch in store.read(part) for seq in batch.column("seq").to_pylist()]


def every_seq(url: str) -> list[int]:
    return [one.seq for one in within(url, lambda driver: driver.read_attempts(limit=1_000_000)).attempts]


def client_and_prefix(url: str) -> tuple[Redis, str]:
    return Redis.from_url(url.partition("?")[0]), dict(parse_qsl(urlsplit(url).query)).get("prefix", "")


def keys(url: str) -> dict[str, int]:
    """Every key of the store, and for how long it stays: -1 for ever."""
    client, prefix = client_and_prefix(url)
    with client:
        found = [key.decode() for key in client.scan_iter(match=f"{prefix}*", count=1000)]
        return {key.removeprefix(prefix): client.ttl(key) for key in found}


def waiting(url: str, *queues: str) -> dict[str, int]:
    async def count(driver: Driver) -> dict[str, int]:
        now = await driver.time()
        return {
            queue: (await driver.stats(now=now, queue=queue))[0].counts[JobState.READY] for queue in queues
        }

    return within(url, count)


@pytest.fixture
def store(redis_url: str) -> Iterator[BulkStore]:
    with open_store(redis_url) as opened:
        yield opened


# -- history that is gone ---------------------------------------------------------------------------------------------


def test_history_of_one_queue_that_was_removed_unread_is_named(store: BulkStore, redis_url: str) -> None:
    add(redis_url, 3, queue="kept")
    add(redis_url, 3, queue="short")
    cursor = store.latest()
    add(redis_url, 2, queue="kept")
    add(redis_url, 2, queue="short")
    forget_history(redis_url, "short")
    with pytest.raises(HistoryGone, match=r"queue 'short' after \d+ were removed by retention"):
        store.between(cursor, store.latest(), parallelism=2)


def test_history_of_a_queue_that_the_reader_never_saw_is_missed_too(store: BulkStore, redis_url: str) -> None:
    add(redis_url, 3)
    cursor = store.latest()
    add(redis_url, 3, queue="new")
    forget_history(redis_url, "new")
    add(redis_url, 1, queue="new", later=2 * DAY)
    with pytest.raises(HistoryGone, match="queue 'new' after 0"):
        store.between(cursor, store.latest(), parallelism=2)
    # Who begins anew takes what there is.
    assert len(seqs(store, store.start(), store.latest())) == 4


def test_a_stream_that_somebody_trimmed_by_hand_is_a_loud_error(store: BulkStore, redis_url: str) -> None:
    add(redis_url, 5)
    cursor = store.latest()
    add(redis_url, 5)
    client, prefix = client_and_prefix(redis_url)
    with client:
        client.xtrim(f"{prefix}{{q}}:attempts", maxlen=1, approximate=False)
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
    monkeypatch.setattr(read, "ROWS_PER_PART", 10)
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
    async def remove(driver: Driver, rows: int) -> None:
        now = await driver.time()
        await driver.configure("q", QueueSettings(keep_attempts_us=DAY), now=now)
        assert await driver.prune(now=now + 2 * DAY, limit=rows) == rows

    for count in (6, 4, 5):
        add(redis_url, count)
    expected = every_seq(redis_url)
    cursor = store.limited(store.start(), store.latest(), rows=6)
    within(redis_url, lambda driver: remove(driver, 6))
    assert sorted(seqs(store, cursor, store.latest())) == expected[6:]
    cursor = store.limited(cursor, store.latest(), rows=2)
    within(redis_url, lambda driver: remove(driver, 2))
    assert every_seq(redis_url) == expected[8:]
    assert sorted(seqs(store, cursor, store.latest())) == expected[8:]
    within(redis_url, lambda driver: remove(driver, 1))
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


def test_a_server_that_came_back_without_its_data_is_another_store() -> None:
    with RedisServer.start() as server:
        add(server.url, 5)
        with open_store(server.url) as store:
            cursor = store.latest()
            server.flush()
            add(server.url, 5)
            with pytest.raises(InvalidRequest, match=r"lost all its data.*fresh checkpoint"):
                store.limited(cursor, store.latest(), rows=None)


# -- reading while jobs flow -------------------------------------------------------------------------------------------


async def _commit(url: str, number: int, dice: random.Random, jobs: int, stop: threading.Event) -> None:
    queues = ("one", "two", "three")
    async with connect(url) as driver:
        for _ in range(jobs // 20):
            queue = dice.choice(queues)
            now = await driver.time()
            await driver.enqueue(records(20, now, queue=queue), now=now, new_ids=True)
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
    stop.set()


@pytest.mark.parametrize("kind", ["one server", "cluster"])
def test_a_reader_that_is_stopped_at_random_sees_every_row_once_while_others_work(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(read, "ROWS_PER_PART", 100)
    if kind == "cluster":
        url = with_fresh_prefix(shared_redis_cluster().url)
    else:
        url = request.getfixturevalue("redis_url")
    stops = [threading.Event() for _ in range(4)]
    committers = [
        threading.Thread(
            target=lambda n=n, stop=stop: asyncio.run(_commit(url, n, random.Random(seed + n), 1000, stop))
        )
        for n, stop in enumerate(stops)
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
    assert all(stop.is_set() for stop in stops)
    assert Counter(seen) == Counter(every_seq(url))
    assert len(seen) > 1000


def test_every_job_is_read_once_while_workers_move_them(store: BulkStore, redis_url: str) -> None:
    async def fill(driver: Driver) -> None:
        now = await driver.time()
        await driver.enqueue(records(3000, now), now=now, new_ids=True)

    async def move(driver: Driver) -> None:
        now = await driver.time()
        while held := await driver.reserve("q", limit=50, lease_for=600 * SECOND, now=now, worker="w"):
            back: list[Settlement] = [
                Retry(job.id, job.token or "", now, 1, Failure("OSError", "again"))
                if job.fence == 1
                else Ack(job.id, job.token or "")
                for job in held
            ]
            await driver.settle(back, now=now)

    within(redis_url, fill)
    parts = store.parts("jobs", EVERYTHING, parallelism=2)
    worker = threading.Thread(target=lambda: within(redis_url, move))
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
            assert len(found) == 3000
            assert set(found.values()) == {1}
    finally:
        worker.join()


def test_jobs_that_ended_in_one_microsecond_are_all_read_and_each_once(
    store: BulkStore, redis_url: str
) -> None:
    async def fill(driver: Driver) -> list[str]:
        now = await driver.time()
        await driver.enqueue(records(500, now), now=now, new_ids=True)
        held = await driver.reserve("q", limit=500, lease_for=60 * SECOND, now=now, worker="w")
        error = Failure("ValueError", "no")
        ends: list[Settlement] = [
            Fail(job.id, job.token or "", 1, error) if n % 3 else Ack(job.id, job.token or "")
            for n, job in enumerate(held)
        ]
        await driver.settle(ends, now=now)
        return [job.id for n, job in enumerate(held) if n % 3]

    dead = within(redis_url, fill)
    parts = store.parts("jobs", Selection(state=JobState.DEAD), parallelism=2)
    found = [one for part in parts for batch in store.read(part) for one in batch.column("id").to_pylist()]
    assert sorted(found) == sorted(dead)


# -- writing ---------------------------------------------------------------------------------------------------------


def lasting(url: str) -> set[str]:
    return {key for key, left in keys(url).items() if left == -1}


def test_an_aborted_write_leaves_nothing_that_stays(store: BulkStore, redis_url: str) -> None:
    write = new_write()
    store.stage(write, "0.1", [records(1500, 1), records(10, 1, queue="other")])
    # Were the writer to die now, all of it would go by itself.
    assert lasting(redis_url) == set()
    store.abandon(write)
    assert set(keys(redis_url)) == {"{writes}:blob"}


def test_a_published_write_leaves_its_jobs_the_record_and_a_note(store: BulkStore, redis_url: str) -> None:
    write = numbered_write("stream", 7)
    store.stage(write, "0.1", [records(10, 1)])
    assert store.publish(write, ["0.1"], now=2) == 10
    found = keys(redis_url)
    assert {key for key, left in found.items() if left != -1} == {"{q}:published:stream"}
    assert [key for key in found if "blob" in key] == ["{writes}:blob"]


def test_a_task_that_is_still_at_it_when_the_write_is_published_leaves_nothing(
    store: BulkStore, redis_url: str
) -> None:
    """A speculative copy of a task: the other one won."""
    write = new_write()
    goes_on, is_begun = threading.Event(), threading.Event()

    def batches() -> Iterator[Sequence[JobRecord]]:
        yield records(1500, 1)
        is_begun.set()
        assert goes_on.wait(60)
        yield records(1500, 1, queue="other")

    staged: list[int] = []

    def stage_slowly() -> None:
        with open_store(redis_url) as own:
            staged.append(own.stage(write, "0.2", batches()))

    slow = threading.Thread(target=stage_slowly)
    slow.start()
    try:
        assert is_begun.wait(60)
        store.stage(write, "0.1", [records(5, 1)])
        assert store.publish(write, ["0.1"], now=2) == 5
    finally:
        goes_on.set()
        slow.join()
    assert staged == [0]
    assert [key for key in keys(redis_url) if "blob" in key] == ["{writes}:blob"]
    assert waiting(redis_url, "q", "other") == {"q": 5, "other": 0}


def test_what_is_staged_while_the_server_loses_its_data_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage, "BLOB_JOBS", 10)
    with RedisServer.start() as server, open_store(server.url) as store:
        write = new_write()

        def batches() -> Iterator[Sequence[JobRecord]]:
            yield records(10, 1)
            # One chunk is on its way while the next is made; by the third the first is there.
            yield records(10, 1)
            server.flush()
            yield records(10, 1)

        store.stage(write, "0.1", batches())
        with pytest.raises(StagingLost, match="nothing was published"):
            store.publish(write, ["0.1"], now=2)


def test_every_step_of_a_write_may_be_carried_out_twice(
    store: BulkStore, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an answer was lost and the call is sent again."""
    run = Store.run

    async def twice(connections: Store, make: Any) -> list[Any]:
        await run(connections, make)
        return await run(connections, lambda _: make(1))

    monkeypatch.setattr(Store, "run", twice)
    monkeypatch.setattr(publish, "BLOB_JOBS", 700)
    monkeypatch.setattr(stage, "BLOB_JOBS", 700)
    write = new_write()
    jobs = [*records(1500, 1), *records(20, 1, queue="keyed")]
    for n, job in enumerate(jobs[-20:]):
        job.key = f"k{n % 10}"
    assert store.stage(write, "0.1", [jobs]) == 1520
    assert store.publish(write, ["0.1"], now=2) == 1510
    assert waiting(redis_url, "q", "keyed") == {"q": 1500, "keyed": 10}
    assert store.publish(write, ["0.1"], now=2) == 1510


class Dying:
    """A publisher that loses its server after so many steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self._left = steps
        self._run = Store.run
        self._patch = monkeypatch
        dying = self

        async def run(connections: Store, make: Any) -> list[Any]:
            if any(call.function == "publish" for call in make(0)):
                if not dying._left:
                    raise BackendUnavailable("the publisher died")
                dying._left -= 1
            return await dying._run(connections, make)

        monkeypatch.setattr(Store, "run", run)

    def live(self) -> None:
        self._patch.setattr(Store, "run", self._run)


@pytest.fixture(params=["one server", "cluster"])
def several(request: pytest.FixtureRequest) -> str:
    if request.param == "cluster":
        return with_fresh_prefix(shared_redis_cluster().url)
    url: str = request.getfixturevalue("redis_url")
    return url


QUEUES = ("alpha", "beta", "gamma")


def half_published(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A write of which something can be seen, and something not yet."""
    write = new_write()
    with open_store(url) as store:
        for task, queue in enumerate(QUEUES):
            store.stage(write, f"{task}.1", [records(50, 1, queue=queue)])
        monkeypatch.setattr(publish, "BLOB_JOBS", 70)
        dying = Dying(monkeypatch, 1)
        with pytest.raises(BackendUnavailable, match="died"):
            store.publish(write, ["0.1", "1.1", "2.1"], now=2)
        dying.live()
    assert 0 < sum(waiting(url, *QUEUES).values()) < 150
    return write


def test_a_publisher_that_tries_again_finishes_what_it_began(
    several: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = half_published(several, monkeypatch)
    with open_store(several) as store:
        assert store.publish(write, ["0.1", "1.1", "2.1"], now=3) == 150
    assert waiting(several, *QUEUES) == dict.fromkeys(QUEUES, 50)


def test_what_a_dead_publisher_began_is_finished_by_the_next_write(
    several: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_published(several, monkeypatch)
    monkeypatch.setattr(publish, "LEFT_BEHIND", 0)
    with open_store(several) as store:
        other = new_write()
        store.stage(other, "0.1", [records(1, 1, queue="delta")])
        assert store.publish(other, ["0.1"], now=3) == 1
    assert waiting(several, *QUEUES, "delta") == dict.fromkeys(QUEUES, 50) | {"delta": 1}


def test_what_a_dead_publisher_began_is_finished_by_the_upkeep_of_any_worker(
    several: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = half_published(several, monkeypatch)

    async def keep_up(driver: Driver) -> None:
        await driver.prune(now=await driver.time())

    within(several, keep_up)
    assert sum(waiting(several, *QUEUES).values()) < 150, "it may be about to finish it itself"
    monkeypatch.setattr(publish, "LEFT_BEHIND", 0)
    within(several, keep_up)
    assert waiting(several, *QUEUES) == dict.fromkeys(QUEUES, 50)
    with open_store(several) as store:
        assert store.publish(write, ["0.1", "1.1", "2.1"], now=3) == 150


def test_what_was_begun_cannot_be_abandoned_any_more(several: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = half_published(several, monkeypatch)
    with open_store(several) as store:
        store.abandon(write)
    assert waiting(several, *QUEUES) == dict.fromkeys(QUEUES, 50)


def test_jobs_that_a_node_lost_while_they_were_published_are_reported(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = half_published(redis_url, monkeypatch)
    # The last of the write's blobs, with the jobs of `gamma`.
    names = within(redis_url, lambda driver: driver.list_blobs(stage.folder_of(write)))
    blobs = [name for name in names if not name.endswith("-end")]
    within(
        redis_url, lambda driver: driver.drop_blobs([max(blobs, key=lambda name: name.rpartition("/")[2])])
    )
    with open_store(redis_url) as store:
        with pytest.raises(TaskHarborError, match=r"50 jobs of .* were lost .* the other 100 are jobs now"):
            store.publish(write, ["0.1", "1.1", "2.1"], now=3)
        assert store.publish(write, ["0.1", "1.1", "2.1"], now=3) == 100
    assert waiting(redis_url, *QUEUES) == {"alpha": 50, "beta": 50, "gamma": 0}


def test_a_small_write_appears_in_all_its_queues_at_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one server: nobody can look in between."""
    steps: list[int] = []
    run = Store.run

    async def counted(connections: Store, make: Any) -> list[Any]:
        steps.append(sum(call.function == "publish" for call in make(0)))
        return await run(connections, make)

    monkeypatch.setattr(Store, "run", counted)
    with open_store(redis_url) as store:
        write = new_write()
        store.stage(write, "0.1", [[*records(50, 1, queue="a"), *records(50, 1, queue="b")]])
        assert store.publish(write, ["0.1"], now=2) == 100
    assert [step for step in steps if step] == [2]


def test_an_id_that_is_known_is_not_stored_again(store: BulkStore, redis_url: str) -> None:
    (known,) = records(1, 1)
    within(redis_url, lambda driver: driver.enqueue([known], now=2))
    write = new_write()
    fresh = new_id()
    jobs = records(3, 1)
    jobs[0].id, jobs[1].id, jobs[2].id = known.id, fresh, fresh
    store.stage(write, "0.1", [jobs])
    assert store.publish(write, ["0.1"], now=2) == 1
    assert waiting(redis_url, "q") == {"q": 2}


def test_published_jobs_are_worked_off(store: BulkStore, redis_url: str) -> None:
    """What publishing stores is what an enqueue stores."""
    write = new_write()
    store.stage(write, "0.1", [records(300, 1, payload=b'{"n":1}', headers={"a": "b"})])
    store.publish(write, ["0.1"], now=2)

    async def drain(driver: Driver) -> int:
        done = 0
        while held := await driver.reserve("q", limit=100, lease_for=60 * SECOND, now=3, worker="w"):
            assert {(job.payload, job.headers["a"]) for job in held} == {(b'{"n":1}', "b")}
            assert await driver.settle([Ack(job.id, job.token or "") for job in held], now=3) == [None] * len(
                held
            )
            done += len(held)
        return done

    assert within(redis_url, drain) == 300
    assert len(every_seq(redis_url)) == 300


@pytest.mark.parametrize("queue", ['we"ird }{ % ☂\\', "taskharbor", "staged:x:y"])
def test_a_queue_may_have_any_name(store: BulkStore, redis_url: str, queue: str) -> None:
    write = numbered_write('odd: {series} / "☂"', 3)
    store.stage(write, "0.1", [records(30, 1, queue=queue)])
    assert store.publish(write, ["0.1"], now=2) == 30
    add(redis_url, 5, queue=queue)
    cursor = store.limited(store.start(), store.latest(), rows=2)
    assert len(seqs(store, cursor, store.latest())) == 3
    for table, count in (("attempts", 5), ("jobs", 35), ("queues", 1)):
        parts = store.parts(table, Selection(queue=queue), parallelism=2)
        batches = [batch for part in parts for batch in store.read(part)]
        assert sum(batch.num_rows for batch in batches) == count
        assert {name for batch in batches for name in batch.column("queue").to_pylist()} == {queue}


def test_a_password_is_in_no_message() -> None:
    with open_store("redis://me:secret@127.0.0.1:1/0") as store:
        for use in (store.latest, lambda: store.stage("w", "0.1", [records(1, 1)])):
            with pytest.raises(BackendUnavailable) as error:
                use()
            assert "secret" not in str(error.value)
