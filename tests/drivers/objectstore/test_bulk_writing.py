"""Object stores by the million, written: staged, published once whatever happens, and nothing left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivers.objectstore.bulk_stage import DAY, objects, records, waiting, within
from drivers.objectstore.faulty_blobs import Faults, FaultyBlobs, Weather
from taskharbor.bulk import publish, stage
from taskharbor.bulk.stage import StagingLost, new_write, numbered_write
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.drivers.contract import Ack, Driver
from taskharbor.drivers.objectstore.driver import ObjectStoreDriver
from taskharbor.drivers.objectstore.options import StoreURL
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor.requests import AlikeJobs, new_id
from taskharbor_testkit.servers.s3 import fresh_s3_url
from taskharbor_testkit.waits import waits_of

QUEUES = ("alpha", "beta", "gamma")
TASKS = ["0.1", "1.1", "2.1"]


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


def staged(folder: Path) -> list[str]:
    return [name for name in objects(folder) if name.startswith("staging/")]


def blobs_of(folder: Path, write: str, task: str) -> list[str]:
    own = f"{stage.folder_of(write)}/{stage._digest(task)}/"
    return [name for name in staged(folder) if name.startswith(own)]


# -- the plain way -----------------------------------------------------------------------------------------------------


def test_staged_jobs_are_seen_when_they_are_published_and_not_before(
    store: BulkStore, url: str, folder: Path
) -> None:
    write = new_write()
    assert store.stage(write, "0.1", [records(1500, 1), records(10, 1, queue="other")]) == 1510
    assert store.stage(write, "1.1", [records(40, 1)]) == 40
    assert waiting(url, "q", "other") == {"q": 0, "other": 0}
    assert store.publish(write, ["0.1", "1.1"], now=2) == 1550
    assert waiting(url, "q", "other") == {"q": 1540, "other": 10}
    assert staged(folder) == []


def test_jobs_that_differ_only_in_their_payloads_are_jobs_like_any_other(store: BulkStore, url: str) -> None:
    template = JobRecord(id="", type="t", queue="q", run_at_us=1, created_at_us=1, headers={"a": "b"})
    write = new_write()
    store.stage(write, "0.1", [AlikeJobs(template, [b"%d" % n for n in range(2500)])])
    assert store.publish(write, ["0.1"], now=2) == 2500

    async def drain(driver: Driver) -> list[int]:
        done: list[int] = []
        for _ in range(100):
            held = await driver.reserve("q", limit=1000, lease_for=60 * SECOND, now=3, worker="w")
            assert {job.headers["a"] for job in held} <= {"b"}
            ends = await driver.settle([Ack(job.id, job.token or "") for job in held], now=3)
            assert ends == [None] * len(held)
            done += [int(job.payload) for job in held]
            if len(done) == 2500:
                break
        return done

    found = within(url, drain)
    assert sorted(found) == list(range(2500))
    if "shards" not in url:
        assert found == list(range(2500))


def test_only_the_named_tasks_are_published_and_the_others_forgotten(
    store: BulkStore, url: str, folder: Path
) -> None:
    write = new_write()
    store.stage(write, "0.1", [records(5, 1)])
    store.stage(write, "0.2", [records(7, 1)])
    assert store.publish(write, ["0.2"], now=2) == 7
    assert waiting(url, "q") == {"q": 7}
    assert staged(folder) == []


def test_a_published_write_is_left_as_it_is_and_its_number_given_again(store: BulkStore, url: str) -> None:
    for write in (new_write(), numbered_write("stream", 7)):
        store.stage(write, "0.1", [records(10, 1)])
        assert store.publish(write, ["0.1"], now=2) == 10
        assert store.publish(write, ["0.1"], now=2) == 10
        # As when a batch of a stream is computed again.
        assert store.stage(write, "0.9", [records(10, 1)]) == 0
        assert store.publish(write, ["0.9"], now=2) == 10
    assert waiting(url, "q") == {"q": 20}
    # Of a series only the latest is remembered.
    earlier = numbered_write("stream", 6)
    assert store.stage(earlier, "0.1", [records(10, 1)]) == 0
    assert store.publish(earlier, ["0.1"], now=2) == 0
    later = numbered_write("stream", 8)
    store.stage(later, "0.1", [records(3, 1)])
    assert store.publish(later, ["0.1"], now=2) == 3
    assert waiting(url, "q") == {"q": 23}


def test_a_write_without_jobs_is_published_too(store: BulkStore, url: str, folder: Path) -> None:
    write = new_write()
    assert store.stage(write, "0.1", []) == 0
    assert store.publish(write, ["0.1"], now=2) == store.publish(write, ["0.1"], now=2) == 0
    assert store.publish(new_write(), [], now=2) == 0
    assert staged(folder) == []


def test_an_aborted_write_leaves_nothing(store: BulkStore, url: str, folder: Path) -> None:
    write = new_write()
    store.stage(write, "0.1", [records(1500, 1), records(10, 1, queue="other")])
    store.abandon(write)
    assert staged(folder) == []
    # A task that comes late, too.
    assert store.stage(write, "0.2", [records(10, 1)]) == 0
    assert staged(folder) == []
    assert waiting(url, "q", "other") == {"q": 0, "other": 0}


def test_a_batch_of_a_stream_that_was_aborted_may_be_tried_again(store: BulkStore, url: str) -> None:
    write = numbered_write("stream", 7)
    store.stage(write, "0.1", [records(10, 1)])
    store.abandon(write)
    store.stage(write, "0.2", [records(10, 1)])
    assert store.publish(write, ["0.2"], now=2) == 10


def test_a_task_that_is_still_at_it_when_the_write_is_published_leaves_nothing(
    store: BulkStore, url: str, folder: Path
) -> None:
    """A speculative copy of a task: the other one won."""
    write = new_write()
    goes_on, is_begun = threading.Event(), threading.Event()

    def batches() -> Iterator[Sequence[JobRecord]]:
        yield records(1500, 1)
        is_begun.set()
        assert goes_on.wait(60)
        yield records(1500, 1, queue="other")

    counts: list[int] = []

    def stage_slowly() -> None:
        with open_store(url) as own:
            counts.append(own.stage(write, "0.2", batches()))

    slow = threading.Thread(target=stage_slowly)
    slow.start()
    try:
        assert is_begun.wait(60)
        store.stage(write, "0.1", [records(5, 1)])
        assert store.publish(write, ["0.1"], now=2) == 5
    finally:
        goes_on.set()
        slow.join()
    assert counts == [0]
    assert staged(folder) == []
    assert waiting(url, "q", "other") == {"q": 5, "other": 0}


def test_what_nobody_ever_published_goes_by_itself(
    store: BulkStore, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.stage("forgotten", "0.1", [records(5, 1)])
    clock = stage.wall_clock
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(publish, "wall_clock", lambda: clock() + 8 * DAY)
        write = new_write()
        store.stage(write, "0.1", [records(1, 1)])
        store.publish(write, ["0.1"], now=2)
        assert bool(staged(folder)) == kept


def test_jobs_that_never_arrived_are_missed_and_nothing_is_published(
    store: BulkStore, url: str, folder: Path
) -> None:
    write = new_write()
    store.stage(write, "0.1", [records(5, 1)])
    with pytest.raises(StagingLost, match=r"tasks 1\.1 of .* nothing was published, write it again"):
        store.publish(write, ["0.1", "1.1"], now=2)
    store.stage(write, "1.1", [records(5, 1)])
    lost = next(name for name in blobs_of(folder, write, "1.1") if not name.endswith("-end"))
    (folder / lost).unlink()
    with pytest.raises(StagingLost, match=r"1\.1"):
        store.publish(write, ["0.1", "1.1"], now=2)
    assert waiting(url, "q") == {"q": 0}


def test_a_write_for_which_a_queue_has_no_room_is_refused_as_a_whole(
    store: BulkStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskharbor.drivers.objectstore.queue.MAX_BYTES", 20_000)
    write = new_write()
    store.stage(write, "0.1", [[*records(5, 1, queue="other"), *records(100, 1, payload=b"x" * 1000)]])
    with pytest.raises(InvalidRequest, match="queue 'q' is full"):
        store.publish(write, ["0.1"], now=2)
    assert waiting(url, "q", "other") == {"q": 0, "other": 0}
    store.abandon(write)


def test_a_portion_for_which_a_queue_has_no_room_is_refused_until_there_is_some(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever publishes blobs need not have asked for the room."""
    name = "staging/w/t/0-000000"

    async def publish_it(driver: Driver) -> int:
        return sum((await driver.publish_blobs([name], series="s", number=0, portion=1, now=2)).values())

    async def main(driver: Driver) -> None:
        await driver.put_blob(name, stage.pack(records(100, 1, payload=b"x" * 1000)))
        with monkeypatch.context() as small:
            small.setattr("taskharbor.drivers.objectstore.queue.MAX_BYTES", 20_000)
            with pytest.raises(InvalidRequest, match="queue 'q' is full"):
                await publish_it(driver)
            (stats,) = await driver.stats(now=2, queue="q")
            assert stats.counts[JobState.READY] == 0
        assert await publish_it(driver) == 100
        monkeypatch.setattr("taskharbor.drivers.objectstore.queue.MAX_BYTES", 20_000)
        assert await publish_it(driver) == 100

    within(url, main)


# -- by the rules of enqueue -------------------------------------------------------------------------------------------


def test_keys_and_idempotency_keys_are_looked_up_as_in_an_enqueue(store: BulkStore, url: str) -> None:
    jobs = [*records(20, 1), *records(20, 1, queue="keyed")]
    for n, job in enumerate(jobs):
        if n < 20:
            job.idempotency_key = f"i{n % 5}"
        else:
            job.key = f"k{n % 10}"
    write = new_write()
    assert store.stage(write, "0.1", [jobs]) == 40
    assert store.publish(write, ["0.1"], now=2) == 15
    assert waiting(url, "q", "keyed") == {"q": 5, "keyed": 10}
    assert store.publish(write, ["0.1"], now=2) == 15


def test_an_id_that_the_queue_knows_is_not_stored_again(folder: Path) -> None:
    url = f"file://{folder}?sync=off"
    (known,) = records(1, 1)
    within(url, lambda driver: driver.enqueue([known], now=2))
    jobs = records(3, 1)
    jobs[0].id = known.id
    jobs[1].id = jobs[2].id = new_id()
    with open_store(url) as store:
        write = new_write()
        store.stage(write, "0.1", [jobs])
        assert store.publish(write, ["0.1"], now=2) == 1
    assert waiting(url, "q") == {"q": 2}


@pytest.mark.parametrize("queue", ['we"ird }{ % ☂\\', "UPPER/lower", "x" * 190])
def test_queue_and_series_may_have_any_name(store: BulkStore, url: str, queue: str) -> None:
    write = numbered_write(f'odd: {{series}} / "☂" {"y" * 150}', 3)
    store.stage(write, "0.1", [records(30, 1, queue=queue)])
    assert store.publish(write, ["0.1"], now=2) == 30
    assert waiting(url, queue) == {queue: 30}


# -- publishers that die -----------------------------------------------------------------------------------------------


class Dying:
    """A publisher that loses its store after so many portions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, portions: int, *, before: bool) -> None:
        self._patch = monkeypatch
        self._publish = publish_blobs = ObjectStoreDriver.publish_blobs
        left = portions

        async def dying(driver: ObjectStoreDriver, *arguments: Any, **options: Any) -> Any:
            nonlocal left
            if before and not left:
                raise BackendUnavailable("the publisher died")
            found = await publish_blobs(driver, *arguments, **options)
            if not before and not left:
                raise BackendUnavailable("the publisher died")
            left -= 1
            return found

        monkeypatch.setattr(ObjectStoreDriver, "publish_blobs", dying)

    def live(self) -> None:
        self._patch.setattr(ObjectStoreDriver, "publish_blobs", self._publish)


def half_published(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A write of which something can be seen, and something not yet. Half of its jobs have keys that others have too."""
    write = new_write()
    with open_store(url) as store:
        for task, queue in zip(TASKS, QUEUES, strict=True):
            jobs = records(50, 1, queue=queue)
            for n, job in enumerate(jobs[:20]):
                job.key = f"k{n % 10}"
            store.stage(write, task, [jobs])
        monkeypatch.setattr(publish, "BLOB_JOBS", 70)
        dying = Dying(monkeypatch, 1, before=False)
        with pytest.raises(BackendUnavailable, match="died"):
            store.publish(write, TASKS, now=2)
        dying.live()
    assert sum(waiting(url, *QUEUES).values()) == 80
    return write


ALL = dict.fromkeys(QUEUES, 40)


def test_a_publisher_that_tries_again_finishes_what_it_began(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = half_published(url, monkeypatch)
    with open_store(url) as store:
        assert store.publish(write, TASKS, now=3) == 120
    assert waiting(url, *QUEUES) == ALL


def test_jobs_with_keys_that_ended_meanwhile_are_not_published_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ids are nobody's, since they were merged into others: only the note beside them tells."""
    write = half_published(url, monkeypatch)

    async def drain(driver: Driver) -> None:
        for _ in range(3):
            for queue in QUEUES:
                held = await driver.reserve(queue, limit=100, lease_for=60 * SECOND, now=3, worker="w")
                await driver.settle([Ack(job.id, job.token or "") for job in held], now=3)

    within(url, drain)
    with open_store(url) as store:
        assert store.publish(write, TASKS, now=3) == 120
    assert waiting(url, *QUEUES) == {"alpha": 0, "beta": 0, "gamma": 40}


def test_what_a_dead_publisher_began_is_finished_by_the_next_write(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_published(url, monkeypatch)
    with open_store(url) as store:
        for seconds, left_behind in ((60 * SECOND, False), (0, True)):
            monkeypatch.setattr(publish, "LEFT_BEHIND", seconds)
            write = new_write()
            store.stage(write, "0.1", [records(1, 1)])
            assert store.publish(write, ["0.1"], now=3) == 1
            assert (waiting(url, *QUEUES) == ALL) == left_behind
    assert staged(folder) == []


def test_what_a_dead_publisher_began_is_finished_by_upkeep(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    half_published(url, monkeypatch)
    for seconds, is_finished in ((60 * SECOND, False), (0, True)):
        monkeypatch.setattr(publish, "LEFT_BEHIND", seconds)
        within(url, lambda driver: driver.prune(now=3))
        assert (waiting(url, *QUEUES) == ALL) == is_finished


def test_a_write_that_was_begun_cannot_be_abandoned_any_more(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = half_published(url, monkeypatch)
    with open_store(url) as store:
        store.abandon(write)
    assert waiting(url, *QUEUES) == ALL


def test_jobs_that_somebody_removed_while_they_were_published_are_reported(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = half_published(url, monkeypatch)
    lost = next(name for name in blobs_of(folder, write, "2.1") if not name.endswith("-end"))
    (folder / lost).unlink()
    with open_store(url) as store:
        with pytest.raises(TaskHarborError, match=r"50 jobs of .* were lost .* the other 80 are jobs now"):
            store.publish(write, TASKS, now=3)
        assert store.publish(write, TASKS, now=3) == 80


def test_several_who_publish_the_same_write_at_once_publish_it_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BLOB_JOBS", 60)
    write = new_write()
    with open_store(url) as store:
        for n in range(6):
            jobs = records(50, 1)
            for job in jobs[:20]:
                job.key = f"{n} {job.id[-1]}"
            store.stage(write, f"{n}.1", [jobs])
    answers: list[int] = []
    start = threading.Barrier(3)

    def publish_it() -> None:
        with open_store(url) as own:
            start.wait()
            answers.append(own.publish(write, [f"{n}.1" for n in range(6)], now=2))

    publishers = [threading.Thread(target=publish_it) for _ in range(3)]
    for thread in publishers:
        thread.start()
    for thread in publishers:
        thread.join()
    assert len(set(answers)) == 1
    assert waiting(url, "q") == {"q": answers[0]}


# -- bad weather -------------------------------------------------------------------------------------------------------


def in_weather(monkeypatch: pytest.MonkeyPatch, weather: Weather) -> Callable[[], None]:
    """Every handle from now on lives in it; until the given function is called."""
    open_blobs = StoreURL.open
    monkeypatch.setattr(StoreURL, "open", lambda parsed: FaultyBlobs(open_blobs(parsed), weather))
    return lambda: monkeypatch.setattr(StoreURL, "open", open_blobs)


def test_in_bad_weather_a_write_is_published_once_by_whoever_keeps_trying(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    within(url, lambda driver: driver.time())
    faults = Faults(
        lost_after=0.1,
        lost_before=0.1,
        late=0.05,
        conflict_409=0.1,
        refused_after=0.1,
        error_500_after=0.1,
        unreadable=0.05,
    )
    monkeypatch.setattr(publish, "BLOB_JOBS", 60)
    fine = in_weather(monkeypatch, Weather(random.Random(seed), faults))
    write = new_write()

    def keep_trying(use: Callable[[BulkStore], Any]) -> Any:
        for _ in range(200):
            try:
                with open_store(url) as store:
                    return use(store)
            except BackendUnavailable:
                continue
        raise AssertionError("200 tries were not enough")

    winners: list[str] = []
    for task in range(4):
        for attempt in range(200):
            name = f"{task}.{attempt}"
            jobs = records(50, 1, queue=QUEUES[task % 3])
            for n, job in enumerate(jobs[:20]):
                job.key = f"{task} {n % 10}"
            try:
                with open_store(url) as store:
                    assert store.stage(write, name, [jobs]) == 50
            except BackendUnavailable:
                continue
            winners.append(name)
            break
    assert keep_trying(lambda store: store.publish(write, winners, now=2)) == 160
    fine()
    assert sum(waiting(url, *QUEUES).values()) == 160
    with open_store(url) as store:
        assert store.publish(write, winners, now=2) == 160
    assert staged(folder) == []


def test_a_store_behind_http_is_written() -> None:
    url = fresh_s3_url()
    with open_store(url) as store:
        write = new_write()
        store.stage(write, "0.1", [records(300, 1, payload=b'{"n":1}')])
        assert store.publish(write, ["0.1"], now=2) == 300
        assert store.publish(write, ["0.1"], now=2) == 300

    async def count(driver: Driver) -> int:
        (found,) = await driver.stats(now=3)
        return found.counts[JobState.READY]

    assert within(url, count) == 300


def test_published_jobs_wake_a_waiting_worker(url: str) -> None:
    async def wait(driver: Driver) -> bool:
        now = await driver.time()
        # The first wait tells that there was something new, if there was.
        await waits_of(driver)(["q"], now=now, timeout=0)
        ready.set()
        return await waits_of(driver)(["q"], now=now, timeout=30)

    ready = threading.Event()
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(within(url, wait)))
    waiter.start()
    try:
        with open_store(url) as store:
            write = new_write()
            store.stage(write, "0.1", [records(3, 1)])
            assert ready.wait(30)
            store.publish(write, ["0.1"], now=2)
    finally:
        waiter.join()
    assert woken == [True]


def test_the_store_is_made_by_the_first_write(folder: Path) -> None:
    url = f"file://{folder}?sync=off&shards=2"
    with open_store(url) as store:
        write = new_write()
        store.stage(write, "0.1", [records(3, 1)])
        store.publish(write, ["0.1"], now=2)
    assert connect(url).capabilities.multi_process
    assert waiting(f"file://{folder}?sync=off", "q") == {"q": 3}
