"""Staging and publishing: all of a write at once, once, and nothing of what was not published."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
import pytest

from broker.broker_client import Unwell
from bulk.stores import NOW, Behind, BehindPostgres, jobs_in, record, stats_of, within, write_jobs
from taskharbor.bulk import stage
from taskharbor.bulk.publish_staged import RECORD, Plan, Writes, publish
from taskharbor.bulk.stage import (
    StagedBlob,
    StagingLost,
    chunked,
    folder_of,
    new_write,
    numbered_write,
    pack,
    series_of,
)
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.postgres import bulk as postgres_bulk
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import JobRecord, JobState, UpdateFlags
from taskharbor.requests import AlikeJobs, new_id_head
from taskharbor_testkit.waits import waits_of

T = TypeVar("T")

on_postgres = pytest.mark.parametrize("kind", ["postgres"], indirect=True)

_UUID7 = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_QUEUE, _STREAM = 'we"ird }{ % ☂\\/UPPER' + "x" * 170, f'odd: {{series}} / "☂" {"y" * 150}'
_ODD: dict[str, Any] = {"type": 'o\'dd "type" \\', "queue": _QUEUE, "headers": {"a": '"\\{}', "b": "ü"}}
_ODD |= {"codec": "msgpack", "priority": -7, "run_at_us": NOW + 5_000_000, "timeout_us": 9}
_ODD |= {"max_attempts": 2, "max_stalls": 3, "backoff_min_us": 5, "backoff_max_us": 6}
"""A value that is no default, for every field that jobs may have in common."""


@pytest.fixture
def small_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "BLOB_JOBS", 500)
    monkeypatch.setattr(postgres_bulk, "_CHUNK_JOBS", 500)


def alike(count: int, **fields: Any) -> AlikeJobs:
    return AlikeJobs(record(id="", **fields), [b"{}"] * count)


def run_all(*work: Callable[[], T]) -> list[T]:
    """Each in a thread of its own; the error of one is raised here."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [one.result() for one in [pool.submit(one) for one in work]]


def publish_anew(url: str, write: str, tasks: Sequence[str] = ("0.1",)) -> int:
    with open_store(url) as own:
        return own.publish(write, tasks, now=NOW)


# -- what becomes of staged jobs ------------------------------------------------------------------------------


def test_a_published_job_is_the_job_that_was_staged(store: BulkStore, url: str) -> None:
    records = [
        record(payload=b'{"n":1}'),
        record(payload=bytes(range(256)), **_ODD),
        record(payload=b"x" * 70_000, update=None),
        record(key="k", idempotency_key="i", update=UpdateFlags(run_at="later"), payload=b"{}"),
    ]
    write = new_write()
    assert store.stage(write, "0.1", [records[:2], records[2:]]) == 4
    assert jobs_in(url) == {}
    assert store.publish(write, ["0.1"], now=NOW) == 4
    found = jobs_in(url)
    for wanted in records:
        wanted.state = JobState.SCHEDULED if wanted.run_at_us > NOW else JobState.READY
        assert found[wanted.id] == wanted
    assert stats_of(url, "q").counts[JobState.READY] == 3
    assert stats_of(url, _QUEUE).counts[JobState.SCHEDULED] == 1


@pytest.mark.parametrize("fields", [{}, _ODD], ids=["defaults", "odd"])
def test_alike_jobs_have_the_fields_of_a_template(store: BulkStore, url: str, fields: dict[str, Any]) -> None:
    """And a payload each."""
    template = record(id="", **fields)
    payloads = [b"", bytes(range(256)), b'{"n":1}', b"x" * 70_000]
    assert write_jobs(store, AlikeJobs(template, payloads)) == 4
    found = jobs_in(url)
    assert sorted(job.payload for job in found.values()) == sorted(payloads)
    template.state = JobState.SCHEDULED if fields else JobState.READY
    for job_id, job in found.items():
        assert _UUID7.fullmatch(job_id)
        template.id, template.payload = job_id, job.payload
        assert job == template
    assert stats_of(url, template.queue).counts[template.state] == 4


@pytest.mark.usefixtures("small_blobs")
def test_jobs_are_claimed_in_the_order_in_which_they_were_written(store: BulkStore, url: str) -> None:
    payloads = iter([b"%d" % number for number in range(2000)])

    def some(count: int) -> list[bytes]:
        return [next(payloads) for _ in range(count)]

    def others(count: int) -> list[JobRecord]:
        return [record(payload=payload, type=f"t{number % 3}") for number, payload in enumerate(some(count))]

    template = record(id="")
    first = [others(10), AlikeJobs(template, some(617)), others(75), AlikeJobs(template, some(1))]
    second = [AlikeJobs(template, some(100)), others(3), alike(9, run_at_us=NOW + 1)]
    write = new_write()
    store.stage(write, "1.7", second)
    store.stage(write, "0.9", first)
    assert store.publish(write, ["0.9", "1.7"], now=NOW) == 815
    claimed = within(url, lambda driver: driver.reserve("q", limit=999, lease_for=9, now=NOW, worker="w"))
    assert [job.payload for job in claimed] == [b"%d" % number for number in range(806)]
    counts = stats_of(url, "q").counts
    assert (counts[JobState.INFLIGHT], counts[JobState.SCHEDULED]) == (806, 9)


def test_keys_and_idempotency_keys_go_by_the_rules(store: BulkStore, url: str) -> None:
    known = [record(idempotency_key="known"), record(key="waits")]
    within(url, lambda driver: driver.enqueue(known, now=NOW))
    jobs = [
        record(idempotency_key="known"),
        record(key="waits", payload=b'"changed"'),
        record(key="fresh"),
        # One job for an idempotency key, whether its jobs have keys or not.
        record(idempotency_key="a", run_at_us=NOW + 1),
        record(key="one", idempotency_key="a"),
        record(key="two", idempotency_key="b"),
        record(idempotency_key="b", priority=3),
        record(idempotency_key="c"),
        record(idempotency_key="c"),
        # Merged into the job that waits for the key two.
        record(key="two", idempotency_key="d"),
        record(idempotency_key="d"),
    ]
    assert write_jobs(store, jobs, AlikeJobs(record(id="", key="alike"), [b"1", b"2", b"3"])) == 5
    found = jobs_in(url)
    assert len(found) == 7
    payloads = {job.key: job.payload for job in found.values() if job.key is not None}
    # PostgreSQL stores jobs with keys first, so the one of the key a may be the second.
    payloads.pop("one", None)
    assert payloads == {"waits": b'"changed"', "fresh": b"", "two": b"", "alike": b"3"}
    again = [record(idempotency_key=key) for key in "abcd"]
    answers = within(url, lambda driver: driver.enqueue(again, now=NOW))
    assert all(answer.existed for answer in answers)
    assert answers[1].id == answers[3].id == jobs[5].id


@on_postgres
def test_somebody_who_waits_is_woken(store: BulkStore, url: str) -> None:
    write = new_write()
    store.stage(write, "0.1", [[record()]])

    async def wait_and_publish(driver: Driver) -> bool:
        await waits_of(driver)(["q"], now=NOW, timeout=0.01)
        waiting = asyncio.ensure_future(waits_of(driver)(["q"], now=NOW, timeout=30))
        await asyncio.to_thread(store.publish, write, ["0.1"], now=NOW)
        return await waiting

    assert within(url, wait_and_publish) is True


# -- which jobs are published, and how often ------------------------------------------------------------------


def test_jobs_of_tasks_that_were_not_named_are_forgotten(store: BulkStore, url: str, behind: Behind) -> None:
    write = new_write()
    good, lost = record(), record()
    store.stage(write, "0.1", [[lost]])
    store.stage(write, "0.2", [[good]])
    assert store.stage(write, "0.3", []) == 0
    assert store.publish(write, ["0.2", "0.3"], now=NOW) == 1
    assert list(jobs_in(url)) == [good.id]
    assert not behind.has_staged(write)


def test_who_publish_the_same_write_at_once_or_again_publish_it_once(store: BulkStore, url: str) -> None:
    write, tasks = new_write(), ["0.1", "1.2"]
    for task in tasks:
        store.stage(write, task, [[record() for _ in range(150)], alike(20)])
    assert run_all(*[partial(publish_anew, url, write, tasks)] * 4) == [340] * 4
    assert store.publish(write, tasks, now=NOW) == 340
    assert stats_of(url, "q").counts[JobState.READY] == len(jobs_in(url)) == 340


def test_a_batch_that_is_done_over_is_published_once(store: BulkStore, url: str, behind: Behind) -> None:
    """A batch of a stream."""
    first, second = numbered_write(_STREAM, 0), numbered_write(_STREAM, 1)
    for write, count in ((first, 3), (second, 2)):
        for attempt in range(2):
            store.stage(write, f"0.{attempt}", [[record() for _ in range(count)]])
            assert store.publish(write, [f"0.{attempt}"], now=NOW) == count
    store.stage(first, "0.9", [[record()]])
    assert store.publish(first, ["0.9"], now=NOW) == 0
    assert len(jobs_in(url)) == 5
    assert not behind.has_staged(first)
    assert behind.published() == {_STREAM}


def test_an_abandoned_write_leaves_and_takes_nothing(store: BulkStore, url: str, behind: Behind) -> None:
    """But a batch of a stream may be tried again."""
    for write, published in ((new_write(), 0), (numbered_write("stream-b", 4), 1)):
        store.stage(write, "0.1", [[record()]])
        store.abandon(write)
        assert not behind.has_staged(write)
        store.stage(write, "1.2", [[record()]])
        assert behind.has_staged(write) == bool(published)
        assert store.publish(write, ["1.2"], now=NOW) == len(jobs_in(url)) == published


@pytest.mark.usefixtures("small_blobs")
def test_what_is_not_all_there_is_not_published(store: BulkStore, url: str, behind: Behind) -> None:
    def batches() -> Iterator[list[JobRecord]]:
        yield [record()]
        raise ArithmeticError("the input broke off")

    write = new_write()
    with pytest.raises(ArithmeticError):
        store.stage(write, "0.2", batches())
    store.stage(write, "0.1", [[record() for _ in range(501)]])
    behind.lose_some()
    for task in ("0.1", "0.2", "5.5"):
        with pytest.raises(StagingLost, match=re.escape(task)):
            store.publish(write, [task], now=NOW)
    assert jobs_in(url) == {}


def test_what_dead_writers_left_is_removed_in_time(store: BulkStore, behind: Behind) -> None:
    old, older = new_write(), new_write()
    for write in (old, older):
        store.stage(write, "0.1", [[record()]])
    for write in (new_write(), numbered_write("stream", 3)):
        write_jobs(store, [record()], write=write)
    behind.pass_days(older)
    last = new_write()
    write_jobs(store, [record()], write=last)
    assert (behind.has_staged(old), behind.has_staged(older)) == (True, False)
    assert behind.published() == {last, "stream"}


# -- blobs, and plans of publishers that died -----------------------------------------------------------------


def plan(write: str, blob: str = "staging/nothing") -> Plan:
    """A plan whose publisher died long ago."""
    return Plan(write, 0, [[StagedBlob(blob, 5)]])


NO_JOBS = f"{folder_of('w')}/task/0-000000"
FORGED = {
    "no such blob": plan("w"),
    "no blob of a bulk write": plan("w", "../catalog"),
    "no jobs in it": plan("w", NO_JOBS),
    "a series without a name": plan(""),
    "a series with a long name": plan("x" * 300),
    "a number that no store keeps": plan(f"s/{2**64}"),
    "a number of many digits": plan(f"s/{'9' * 5000}"),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
async def test_a_plan_that_cannot_be_carried_out_stops_no_other_write(forged: Plan) -> None:
    driver = MemoryDriver()
    await driver.put_blob(NO_JOBS, b"nonsense")
    for name in (forged.write, "another key"):
        await driver.put_blob(RECORD, msgspec.msgpack.encode(Writes({name: forged})))
        for _ in range(2):
            write = new_write()
            staging = stage.TaskStaging(driver, write, "0.1")
            await staging.put([record()])
            await staging.complete()
            assert await publish(driver, write, ["0.1"], NOW) == 1


async def test_an_outage_while_a_plan_is_carried_out_is_not_taken_for_a_bad_plan() -> None:
    driver = Unwell(BackendUnavailable("away"), op.PublishBlobs)
    await driver.put_blob(RECORD, msgspec.msgpack.encode(Writes({"w": plan("w")})))
    with pytest.raises(BackendUnavailable):
        await publish(driver, new_write(), [], NOW)


async def test_a_job_that_is_staged_twice_or_known_is_one_job_and_calls_go_on(url: str) -> None:
    async with connect(url) as driver:
        known = record(id="known")
        await driver.enqueue([known], now=NOW)
        for n in range(3):
            new, keyed = record(), record(key=f"k{n}")
            await driver.put_blob("staging/w/t/0", pack([known, new, keyed, new, keyed]))
            how: dict[str, Any] = {"series": f"s{n}", "number": -1, "portion": 1, "now": NOW}
            assert sum((await driver.publish_blobs(["staging/w/t/0"], **how)).values()) == 2
            await driver.enqueue([record()], now=NOW)
            assert None not in await driver.get([new.id, keyed.id], now=NOW)
        (stats,) = await driver.stats(now=NOW)
        assert stats.counts[JobState.READY] == 10


async def test_bad_names_and_records_stop_nobody(url: str) -> None:
    async with connect(url) as driver:
        await driver.enqueue([record()], now=NOW)
        await driver.put_blob("staging/w/t/0", pack([record()]))
        for call in (
            *(driver.read_log(stream, after=0, until=10, limit=10) for stream in ("abc", "0", "9" * 30)),
            driver.put_blob("staging/w", b"where a folder may be"),
            driver.drop_blobs(["staging/w"]),
        ):
            with contextlib.suppress(InvalidRequest):
                await call
        await driver.put_blob("writes", b"nothing that anybody can read")
        await driver.prune(now=NOW)
        await driver.enqueue([record()], now=NOW)


@pytest.mark.parametrize("is_alike", [False, True])
def test_chunks_hold_all_jobs_in_order_and_not_too_many_bytes(is_alike: bool) -> None:
    payloads = [b"%d" % n for n in range(205)] + [b"x" * (stage.BLOB_BYTES // 3)] * 10
    jobs = [record(payload=payload) for payload in payloads]
    assert stage.unpack(pack(jobs[:3])) == jobs[:3]
    for most in (100, 300):
        chunks = list(chunked([AlikeJobs(record(id=""), payloads) if is_alike else jobs], most))
        assert all(isinstance(chunk, AlikeJobs) == is_alike and len(chunk) <= most for chunk in chunks)
        assert all(sum(len(job.payload) for job in chunk) <= stage.BLOB_BYTES for chunk in chunks)
        assert [job.payload for chunk in chunks for job in chunk] == payloads


@pytest.mark.parametrize("field", ["id", "type", "queue", "codec", "key"])
def test_what_no_store_can_hold_is_refused_when_it_is_staged(field: str) -> None:
    odd = msgspec.structs.replace(record(), **{field: "a\0b"})
    batches: list[Sequence[JobRecord]] = [[record(), odd]]
    batches += [] if field == "id" else [AlikeJobs(odd, [b"{}", b"{}"])]
    for batch in batches:
        with pytest.raises(InvalidRequest, match=f"{field} .*NUL"):
            list(chunked([batch], 10))


# -- PostgreSQL: keys that others use at the same time ----------------------------------------------------------


@on_postgres
@pytest.mark.parametrize("is_beyond_the_locks", [False, True])
def test_publishers_and_single_enqueues_with_the_same_idempotency_keys_make_one_job_each(
    store: BulkStore, url: str, behind: BehindPostgres, is_beyond_the_locks: bool
) -> None:
    """Also more keys than the server has locks."""
    locks = "current_setting('max_locks_per_transaction')::int * current_setting('max_connections')::int"
    room = behind.one(f"SELECT {locks} / 2")
    keys = [f"k{n}" for n in range(room + 100 if is_beyond_the_locks else 600)]
    running = [new_write(), new_write()]
    for write, some in zip(running, (keys, keys[::-1]), strict=True):
        jobs = [record(idempotency_key=key, payload=key.encode()) for key in some]
        store.stage(write, "0.1", [jobs[:200], jobs[200:]])
    answers: dict[str, set[str]] = {key: set() for key in keys}

    async def enqueue_some(driver: Driver, start: int, step: int) -> None:
        at = start
        while running:
            some = [keys[(at + n * step) % len(keys)] for n in range(5)]
            at += 5 * step
            made = [record(idempotency_key=key, payload=key.encode()) for key in some]
            for key, answer in zip(some, await driver.enqueue(made, now=NOW), strict=True):
                answers[key].add(answer.id)

    def publish_one(write: str) -> None:
        try:
            publish_anew(url, write)
        finally:
            running.remove(write)

    enqueuers = [partial(enqueue_some, start=start, step=step) for start, step in ((0, 37), (599, -53))]
    publishers = [partial(publish_one, write) for write in running]
    run_all(*publishers, *(partial(within, url, enqueuer) for enqueuer in enqueuers))
    found = jobs_in(url).values()
    assert sorted(job.idempotency_key or "" for job in found) == sorted(keys)
    by_key = {job.idempotency_key: job.id for job in found}
    assert all(ids <= {by_key[key]} for key, ids in answers.items())
    assert all(job.payload.decode() == job.idempotency_key for job in found)
    assert stats_of(url, "q").counts[JobState.READY] == len(keys)


@on_postgres
def test_while_many_idempotency_keys_are_published_others_do_not_wait(
    store: BulkStore, url: str, behind: BehindPostgres
) -> None:
    """No lock is held for them, neither one for each nor one for all keys."""
    within(url, lambda driver: driver.enqueue([record()], now=NOW))
    locks = "current_setting('max_locks_per_transaction')::int * current_setting('max_connections')::int"
    count, write = behind.one(f"SELECT {locks}"), new_write()
    store.stage(write, "0.1", [[record(idempotency_key=f"k{n}") for n in range(count)]])
    publish = "SELECT publish_write(%s, %s, %s, ARRAY['0.1'], %s, 0, %s)"
    with behind.another() as publisher:
        assert publisher.one(publish, write, *series_of(write), NOW, new_id_head()) == count
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert publisher.one(held) < 5
        others = [
            record(idempotency_key="other"),
            record(key="one"),
            record(key="two", idempotency_key="two"),
        ]
        answers = within(url, lambda driver: driver.enqueue(others, now=NOW))
        assert not any(one.existed for one in answers)
    assert stats_of(url, "q").counts[JobState.READY] == 4, "the publisher's transaction was rolled back"


@on_postgres
def test_an_idempotency_key_without_a_job_is_free(store: BulkStore, url: str, behind: BehindPostgres) -> None:
    old = [record(idempotency_key=f"k{n}") for n in range(3)]
    within(url, lambda driver: driver.enqueue(old, now=NOW))
    within(url, lambda driver: driver.cancel([job.id for job in old[:2]], now=NOW))
    # As when retention of another version left the keys.
    behind("DELETE FROM finished")
    new = [record(idempotency_key=f"k{n}") for n in (2, 1, 0, 1, 5)]
    assert write_jobs(store, new) == 3
    assert jobs_in(url).keys() == {old[2].id, new[1].id, new[2].id, new[4].id}
    (again,) = within(url, lambda driver: driver.enqueue([record(idempotency_key="k1")], now=NOW))
    assert again.id == new[1].id
