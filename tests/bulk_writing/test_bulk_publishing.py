"""Staging and publishing: all of a write at once, once, and nothing of what was not published."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import pytest

from bulk_writing.behind_the_store import Behind, BehindPostgres
from bulk_writing.bulk_harness import NOW, ask, jobs_in, record, stats_of, write_jobs
from taskharbor.bulk.publish import RECORD, Plan, Writes, publish
from taskharbor.bulk.stage import (
    BLOB_BYTES,
    BLOB_JOBS,
    StagedBlob,
    StagingLost,
    TaskStaging,
    chunked,
    folder_of,
    new_write,
    numbered_write,
    pack,
    series_of,
    unpack,
)
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import JobRecord, JobState, UpdateFlags
from taskharbor_testkit.waits import waits_of

T = TypeVar("T")


def test_a_published_job_is_the_job_that_was_staged(store: BulkStore, url: str) -> None:
    records = [
        record(payload=b'{"n":1}'),
        record(type='o\'dd "type" \\', queue="other", priority=-7, run_at_us=NOW + 5_000_000),
        record(headers={"a": '"\\{}', "b": "ü"}, codec="msgpack", payload=bytes(range(256)), timeout_us=9),
        record(max_attempts=2, max_stalls=3, backoff_min_us=5, backoff_max_us=6, priority=12),
        record(payload=b"x" * 70_000, update=None),
        record(key="k", idempotency_key="i", update=UpdateFlags(run_at="later"), payload=b"{}"),
    ]
    write = new_write()
    assert store.stage(write, "0.1", [records[:2], records[2:]]) == 6
    assert jobs_in(url) == {}
    assert store.publish(write, ["0.1"], now=NOW) == 6
    found = jobs_in(url)
    for wanted in records:
        got = found[wanted.id]
        wanted.state = JobState.SCHEDULED if wanted.run_at_us > NOW else JobState.READY
        assert got == wanted
    assert stats_of(url, "q").counts[JobState.READY] == 5
    assert stats_of(url, "other").counts[JobState.SCHEDULED] == 1


def test_jobs_of_tasks_that_were_not_named_are_forgotten(store: BulkStore, url: str, behind: Behind) -> None:
    write = new_write()
    good, lost = record(), record()
    store.stage(write, "0.1", [[lost]])
    store.stage(write, "0.2", [[good]])
    assert store.publish(write, ["0.2"], now=NOW) == 1
    assert list(jobs_in(url)) == [good.id]
    assert behind.staged() == set()


def test_publishing_again_changes_nothing_and_gives_the_first_number(store: BulkStore, url: str) -> None:
    write = new_write()
    store.stage(write, "0.1", [[record(), record()]])
    assert store.publish(write, ["0.1"], now=NOW) == 2
    assert store.publish(write, ["0.1"], now=NOW) == 2
    assert len(jobs_in(url)) == 2


def test_a_batch_of_a_stream_that_is_done_over_is_published_once(
    store: BulkStore, url: str, behind: Behind
) -> None:
    first, second = numbered_write("stream-a", 0), numbered_write("stream-a", 1)
    for write, count in ((first, 3), (second, 2)):
        for attempt in range(2):
            store.stage(write, f"0.{attempt}", [[record() for _ in range(count)]])
            assert store.publish(write, [f"0.{attempt}"], now=NOW) == count
    store.stage(first, "0.9", [[record()]])
    assert store.publish(first, ["0.9"], now=NOW) == 0
    assert len(jobs_in(url)) == 5
    assert behind.staged() == set()
    assert behind.published() == {("stream-a", 1)}


def test_an_abandoned_write_leaves_nothing_and_takes_nothing_more(
    store: BulkStore, url: str, behind: Behind
) -> None:
    write = new_write()
    store.stage(write, "0.1", [[record()]])
    store.abandon(write)
    store.stage(write, "1.2", [[record()]])
    assert behind.staged() == set()
    assert store.publish(write, ["1.2"], now=NOW) == 0
    assert jobs_in(url) == {}


def test_an_abandoned_batch_of_a_stream_may_be_tried_again(store: BulkStore, url: str) -> None:
    write = numbered_write("stream-b", 4)
    store.stage(write, "0.1", [[record()]])
    store.abandon(write)
    store.stage(write, "0.2", [[record()]])
    assert store.publish(write, ["0.2"], now=NOW) == 1
    assert len(jobs_in(url)) == 1


def test_a_task_without_rows_can_be_published(store: BulkStore, url: str) -> None:
    write = new_write()
    assert store.stage(write, "0.1", []) == 0
    assert store.publish(write, ["0.1"], now=NOW) == 0


def test_what_is_not_all_there_is_not_published(store: BulkStore, url: str, behind: Behind) -> None:
    write = new_write()
    store.stage(write, "0.1", [[record() for _ in range(BLOB_JOBS + 1)]])
    behind.lose_some()
    with pytest.raises(StagingLost, match=r"0\.1"):
        store.publish(write, ["0.1"], now=NOW)
    with pytest.raises(StagingLost, match=r"5\.5"):
        store.publish(write, ["5.5"], now=NOW)
    assert jobs_in(url) == {}


def test_a_task_that_fails_midway_has_staged_nothing_complete(store: BulkStore, url: str) -> None:
    def batches() -> Any:
        yield [record()]
        raise ArithmeticError("the input broke off")

    write = new_write()
    with pytest.raises(ArithmeticError):
        store.stage(write, "0.1", batches())
    with pytest.raises(StagingLost):
        store.publish(write, ["0.1"], now=NOW)


def test_keys_and_idempotency_keys_go_by_the_rules(store: BulkStore, url: str) -> None:
    ask(url, lambda driver: driver.enqueue([record(idempotency_key="known"), record(key="waits")], now=NOW))
    jobs = [
        record(idempotency_key="known"),
        record(idempotency_key="new"),
        record(idempotency_key="new"),
        record(key="waits", payload=b'"changed"'),
        record(key="fresh"),
        record(),
    ]
    assert write_jobs(store, jobs) == 3
    found = jobs_in(url)
    assert len(found) == 5
    assert [job.payload for job in found.values() if job.key == "waits"] == [b'"changed"']


def test_an_idempotency_key_is_one_job_whether_its_jobs_have_keys_or_not(store: BulkStore, url: str) -> None:
    jobs = [
        record(idempotency_key="a", run_at_us=NOW + 1),
        record(key="one", idempotency_key="a"),
        record(),
        record(key="two", idempotency_key="b"),
        record(idempotency_key="b", priority=3),
        record(idempotency_key="c"),
        record(key="two", idempotency_key="d"),
        record(idempotency_key="d"),
    ]
    assert write_jobs(store, jobs) == len(jobs_in(url)) == 4
    answers = ask(
        url, lambda driver: driver.enqueue([record(idempotency_key=key) for key in "abcd"], now=NOW)
    )
    assert all(answer.existed for answer in answers)
    # The request with the key d was merged into the job that waits for the key two.
    assert answers[1].id == answers[3].id == jobs[3].id


@pytest.mark.parametrize("url", ["sqlite", "redis", "files", "memory"], indirect=True)
def test_a_job_that_is_staged_twice_or_known_is_one_job(store: BulkStore, url: str) -> None:
    known, twice, keyed = record(), record(), record(key="k")
    ask(url, lambda driver: driver.enqueue([known], now=NOW))
    assert write_jobs(store, [known, twice, keyed, twice, keyed, record()]) == 3
    assert len(jobs_in(url)) == 4


def test_what_dead_writers_left_is_removed_in_time(store: BulkStore, url: str, behind: Behind) -> None:
    old, older = "w-old", "w-older"
    for write in (old, older):
        store.stage(write, "0.1", [[record()]])
    kept = numbered_write("stream", 3)
    for write in (new_write(), kept):
        store.stage(write, "0.1", [[record()]])
        store.publish(write, ["0.1"], now=NOW)
    behind.pass_days(4, write=older)
    behind.pass_days_for_marks(31)
    last = new_write()
    store.stage(last, "0.1", [[record()]])
    store.publish(last, ["0.1"], now=NOW)
    assert behind.staged() == {old}
    assert {series for series, _ in behind.published()} == {last, "stream"}


def plan(write: str, blob: str) -> Plan:
    """A plan whose publisher died long ago."""
    return Plan(write, 0, [[StagedBlob(blob, 5)]])


FORGED = {
    "no such blob": plan("w", "staging/nothing"),
    "no blob of a bulk write": plan("w", "../catalog"),
    "no jobs in it": plan("w", f"{folder_of('w')}/task/0-000000"),
    "a series without a name": plan("", "staging/nothing"),
    "a series with a long name": plan("x" * 300, "staging/nothing"),
    "a number that no store keeps": plan(f"s/{2**64}", "staging/nothing"),
    "a number of many digits": plan(f"s/{'9' * 5000}", "staging/nothing"),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
async def test_a_plan_that_cannot_be_carried_out_stops_no_other_write(forged: Plan) -> None:
    driver = MemoryDriver()
    await driver.put_blob(f"{folder_of('w')}/task/0-000000", b"nonsense")
    for name in (forged.write, "another key"):
        await driver.put_blob(RECORD, msgspec.msgpack.encode(Writes({name: forged})))
        for _ in range(2):
            write = new_write()
            staging = TaskStaging(driver, write, "0.1")
            await staging.put([record()])
            await staging.complete()
            assert await publish(driver, write, ["0.1"], NOW) == 1


async def test_an_outage_while_a_plan_is_carried_out_is_not_taken_for_a_bad_plan() -> None:
    class Away(MemoryDriver):
        async def run(self, call: op.Operation[Any]) -> Any:
            if isinstance(call, op.PublishBlobs):
                raise BackendUnavailable("away")
            return await super().run(call)

    driver = Away()
    await driver.put_blob(RECORD, msgspec.msgpack.encode(Writes({"w": plan("w", "staging/nothing")})))
    with pytest.raises(BackendUnavailable):
        await publish(driver, new_write(), [], NOW)


def test_two_who_publish_the_same_write_at_once_publish_it_once(url: str) -> None:
    write = new_write()
    with open_store(url) as store:
        store.stage(write, "0.1", [[record() for _ in range(3000)]])
    answers: list[int] = []

    def publish() -> None:
        with open_store(url) as own:
            answers.append(own.publish(write, ["0.1"], now=NOW))

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [3000] * 4
    assert stats_of(url, "q").counts[JobState.READY] == 3000


def test_somebody_who_waits_is_woken(store: BulkStore, url: str) -> None:
    write = new_write()
    store.stage(write, "0.1", [[record()]])

    async def wait_and_publish(driver: Driver) -> bool:
        await waits_of(driver)(["q"], now=NOW, timeout=0.01)
        waiting = asyncio.ensure_future(waits_of(driver)(["q"], now=NOW, timeout=30))
        await asyncio.to_thread(store.publish, write, ["0.1"], now=NOW)
        return await waiting

    assert ask(url, wait_and_publish) is True


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_more_keys_than_the_server_has_locks_are_published_beside_others_with_the_same_keys(
    url: str, behind: Behind
) -> None:
    """By one lock for all keys instead of one for each."""
    with open_store(url) as store:
        write = new_write()
        assert isinstance(behind, BehindPostgres)
        ((room,),) = behind.rows(
            "SELECT current_setting('max_locks_per_transaction')::int * current_setting('max_connections')::int / 2"
        )
        keys = [f"k{n}" for n in range(room + 100)]
        store.stage(write, "0.1", [[record(idempotency_key=key, payload=b"") for key in keys]])
        stop = threading.Event()
        enqueued: list[str] = []

        async def enqueue_some(driver: Driver) -> None:
            while not stop.is_set():
                some = [record(idempotency_key=keys[n * 37 % len(keys)]) for n in range(20)]
                answers = await driver.enqueue(some, now=NOW)
                enqueued.extend(answer.id for answer in answers)

        other = threading.Thread(target=lambda: asyncio.run(_opened(url, enqueue_some)))
        other.start()
        try:
            added = store.publish(write, ["0.1"], now=NOW)
        finally:
            stop.set()
            other.join()
    assert len(set(enqueued)) == 20
    jobs = jobs_in(url)
    assert len(jobs) == len({job.idempotency_key for job in jobs.values()}) == len(keys)
    assert added + len(jobs.keys() & set(enqueued)) >= len(keys)


async def _opened(url: str, work: Callable[[Driver], Any]) -> None:
    async with connect(url) as driver:
        await work(driver)


@pytest.mark.parametrize("field", ["id", "type", "queue", "codec", "key"])
def test_what_postgres_cannot_hold_is_refused_when_it_is_staged(postgres_url: str, field: str) -> None:
    with open_store(postgres_url) as store, pytest.raises(InvalidRequest, match=f"{field} .*NUL"):
        store.stage(new_write(), "0.1", [[record(), msgspec.structs.replace(record(), **{field: "a\0b"})]])


def test_chunks_hold_all_jobs_in_order_and_not_too_many_bytes() -> None:
    large = b"x" * (BLOB_BYTES // 3)
    jobs = [record() for _ in range(2 * BLOB_JOBS + 5)] + [record(payload=large) for _ in range(10)]
    chunks: list[Sequence[JobRecord]] = list(chunked([jobs], BLOB_JOBS))
    assert [job.id for chunk in chunks for job in chunk] == [job.id for job in jobs]
    assert all(len(chunk) <= BLOB_JOBS for chunk in chunks)
    assert all(sum(len(job.payload) for job in chunk) <= BLOB_BYTES for chunk in chunks)
    assert unpack(pack(jobs[:3])) == jobs[:3]


def test_a_write_of_its_own_is_told_from_one_of_a_series() -> None:
    write = new_write()
    assert series_of(write) == (write, -1)
    assert series_of(numbered_write("a/b", 12)) == ("a/b", 12)


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_publishers_and_single_enqueues_with_the_same_idempotency_keys_make_one_job_each(url: str) -> None:
    keys = [f"k{n}" for n in range(2_000)]
    writes = [new_write(), new_write()]
    with open_store(url) as store:
        for write, some in zip(writes, (keys, keys[::-1]), strict=True):
            jobs = [record(idempotency_key=key, payload=key.encode()) for key in some]
            store.stage(write, "0.1", [jobs[:700], jobs[700:]])
    stop = threading.Event()
    answers: dict[str, set[str]] = {key: set() for key in keys}
    errors: list[BaseException] = []

    async def enqueue_some(driver: Driver, start: int, step: int) -> None:
        at = start
        while not stop.is_set():
            some = [keys[(at + n * step) % len(keys)] for n in range(5)]
            at += 5 * step
            made = [record(idempotency_key=key, payload=key.encode()) for key in some]
            for key, answer in zip(some, await driver.enqueue(made, now=NOW), strict=True):
                answers[key].add(answer.id)

    def run(work: Callable[[T], Any], argument: T) -> threading.Thread:
        def guarded() -> None:
            try:
                work(argument)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def publish(write: str) -> None:
        with open_store(url) as own:
            own.publish(write, ["0.1"], now=NOW)

    others = [
        run(asyncio.run, _opened(url, partial(enqueue_some, start=start, step=step)))
        for start, step in ((0, 37), (1_999, -53))
    ]
    publishers = [run(publish, write) for write in writes]
    for thread in publishers:
        thread.join()
    stop.set()
    for thread in others:
        thread.join()
    assert errors == []
    found = jobs_in(url).values()
    assert sorted(job.idempotency_key or "" for job in found) == sorted(keys)
    by_key = {job.idempotency_key: job.id for job in found}
    assert all(ids <= {by_key[key]} for key, ids in answers.items())
    assert all(job.payload.decode() == job.idempotency_key for job in found)
    assert stats_of(url, "q").counts[JobState.READY] == len(keys)


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_an_idempotency_key_whose_job_is_gone_makes_a_new_one(url: str, behind: Behind) -> None:
    old = [record(idempotency_key=f"k{n}") for n in range(3)]
    ask(url, lambda driver: driver.enqueue(old, now=NOW))
    ask(url, lambda driver: driver.cancel([job.id for job in old[:2]], now=NOW))

    # As when retention of another version left the keys.
    assert isinstance(behind, BehindPostgres)
    behind.rows("DELETE FROM finished")
    with open_store(url) as store:
        new = [record(idempotency_key=f"k{n}") for n in (2, 1, 0, 1, 5)]
        assert write_jobs(store, new) == 3
    assert jobs_in(url).keys() == {old[2].id, new[1].id, new[2].id, new[4].id}
    (again,) = ask(url, lambda driver: driver.enqueue([record(idempotency_key="k1")], now=NOW))
    assert again.id == new[1].id


async def test_calls_go_on_after_a_blob_with_known_ids_was_published(url: str) -> None:
    async with connect(url) as driver:
        known = record(id="known")
        await driver.enqueue([known], now=NOW)
        for n in range(3):
            new = record(id=f"new-{n}")
            await driver.put_blob("staging/w/t/0", pack([known, new]))
            await driver.publish_blobs(["staging/w/t/0"], series=f"s{n}", number=-1, portion=1, now=NOW)
            await driver.enqueue([record()], now=NOW)
            assert (await driver.get([new.id], now=NOW))[0] is not None
            await driver.stats(now=NOW)


async def test_bad_names_and_records_are_refused_and_stop_nobody(url: str) -> None:
    async with connect(url) as driver:
        await driver.enqueue([record()], now=NOW)
        await driver.put_blob("staging/w/t/0", pack([record()]))
        for stream in ("abc", "0", "9" * 30):
            with contextlib.suppress(InvalidRequest):
                await driver.read_log(stream, after=0, until=10, limit=10)
        with pytest.raises(InvalidRequest):
            await driver.split_jobs(queue=None, parts=2**31 - 1)
        with contextlib.suppress(InvalidRequest):
            await driver.put_blob("staging/w", b"where a folder may be")
        with contextlib.suppress(InvalidRequest):
            await driver.drop_blobs(["staging/w"])
        await driver.put_blob("writes", b"nothing that anybody can read")
        await driver.prune(now=NOW)
        await driver.enqueue([record()], now=NOW)
