"""The image of a queue: what was written reads the same, what failed changes nothing, and what is deleted takes no room."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from drivers.objectstore.fake_blobs import HeldBlobs
from drivers.objectstore.harness import driver_on, finish
from records import NOW, make_record
from taskharbor.drivers.contract import Ack, Fail, JobFilter, QueueSettings, Settlement
from taskharbor.drivers.engine import enqueue, inspect, operate, reserve, settle
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.migrations import Migration
from taskharbor.drivers.objectstore import archive, compaction, image
from taskharbor.drivers.objectstore.image import Image, entries, take_numbers
from taskharbor.drivers.waiting import ALWAYS
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import SECOND, Failure, JobRecord, UpdateFlags

R = TypeVar("R")


def change(state: Image, step: Callable[[Transaction], R]) -> R:
    return state.change(step)[0]


def add(state: Image, *jobs: JobRecord) -> None:
    first = take_numbers(len(jobs))
    numbers = [first + at for at in range(len(jobs))]
    change(state, lambda transaction: enqueue.enqueue(transaction, jobs, NOW, numbers=numbers))


def claim(state: Image, limit: int, *, now: int = NOW, types: list[str] | None = None) -> list[JobRecord]:
    return change(
        state, lambda transaction: reserve.reserve(transaction, "q", limit, 10 * SECOND, now, "w", types)
    )


def read_again(state: Image) -> Image:
    return Image(state.serialize(), "here", "q")


def shown(state: Image) -> tuple[Any, ...]:
    return state.look(
        lambda transaction: (
            inspect.find_jobs(transaction, JobFilter(), NOW, 1000, inspect.FOREVER),
            inspect.stats(transaction, NOW, None),
            inspect.attempts_between(transaction, 0, inspect.FOREVER, 1000),
            inspect.watch(transaction, ["q"], ALWAYS),
            inspect.settings(transaction, "q"),
        )
    )


def a_full_image() -> Image:
    """Every state a job can be in, with every kind of field filled."""
    state = Image(b"", "here", "q")
    settings = QueueSettings(max_inflight=5, failure_queue="failed", keep_dead_us=None)
    change(state, lambda transaction: operate.configure(transaction, "q", settings, NOW))
    keyed = make_record(key="k", headers={"trace": "1"}, payload=b"\x00\xff", idempotency_key="i", priority=3)
    add(state, keyed, make_record(), make_record(payload=b"x" * 5000), make_record())
    held = claim(state, 4)
    boom = Failure("ValueError", "boom", "Traceback")
    ends: list[Settlement] = [
        Ack(held[1].id, held[1].token or "", b"r"),
        Fail(held[2].id, held[2].token or "", 1, boom),
    ]
    change(state, lambda transaction: settle.settle(transaction, ends, NOW))
    add(
        state,
        make_record(key="k", update=UpdateFlags(run_at="later")),
        make_record(run_at_us=NOW + SECOND),
        make_record(type="sms", max_stalls=2, timeout_us=SECOND),
    )
    change(state, lambda transaction: operate.cancel(transaction, [held[3].id], NOW))
    return state


def test_an_image_that_was_written_and_read_shows_the_same_and_goes_on_the_same() -> None:
    """The same jobs are reserved in the same order, the same leases end at the same time. Looking touches nothing."""
    state = a_full_image()
    again = read_again(state)
    assert shown(again) == shown(state)
    assert [notice.queue for notice in again.outbox()] == ["failed"]
    assert again.outbox() == state.outbox()
    assert claim(again, 5, types=[]) == []
    assert not again.touched
    for now in (NOW, NOW + SECOND, NOW + 11 * SECOND):
        assert [job.id for job in claim(again, 2, now=now)] == [job.id for job in claim(state, 2, now=now)]


def test_a_step_that_raises_changes_nothing_and_leaves_the_steps_before_it() -> None:
    state = a_full_image()
    add(state, make_record())
    before, image_before = shown(state), state.serialize()

    def half_a_step(transaction: Transaction) -> None:
        enqueue.enqueue(transaction, [make_record()], NOW)
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        state.change(half_a_step)
    assert shown(state) == before == shown(Image(image_before, "here", "q"))


def test_an_image_is_taken_after_commit_only() -> None:
    """Inside a transaction SQLite gives the old pages, or a mixture of old and new ones that looks whole."""
    state = a_full_image()
    with pytest.raises(AssertionError, match="COMMIT"):
        state.change(lambda transaction: state.serialize())


def test_an_image_can_be_opened_anywhere() -> None:
    """One in WAL mode could not: there is no file beside it."""
    state = a_full_image()
    data = state.serialize()
    assert data[18:20] == b"\x01\x01", "the image asks for a write-ahead log"
    other = sqlite3.connect(":memory:")
    other.deserialize(data)
    assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    other.close()


def test_an_image_shrinks_when_its_jobs_are_gone() -> None:
    state = Image(b"", "here", "q")
    empty = len(state.serialize())
    jobs = [make_record(payload=b"x" * 500) for _ in range(500)]
    add(state, *jobs)
    full = len(state.serialize())
    change(state, lambda transaction: transaction.connection.execute("DELETE FROM jobs").rowcount)
    assert len(state.serialize()) < empty + (full - empty) / 3
    assert state.connection.execute("PRAGMA freelist_count").fetchone() == (0,)


def test_numbers_of_a_queue_grow_even_where_the_clock_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Image(b"", "here", "q")
    add(state, make_record())
    numbers = [7, 7, 3]
    change(
        state,
        lambda transaction: enqueue.enqueue(
            transaction, [make_record(), make_record(), make_record()], NOW, numbers=numbers
        ),
    )
    change(state, lambda transaction: enqueue.enqueue(transaction, [make_record(key="k")], NOW, numbers=[1]))
    found = state.look(
        lambda transaction: inspect.find_jobs(transaction, JobFilter(), NOW, 9, inspect.FOREVER)
    )
    assert len({number for number, _ in found}) == 5
    monkeypatch.setattr("time.time_ns", lambda: 0)
    first = take_numbers(10)
    assert take_numbers(1) == first + 10


def test_an_image_of_a_newer_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = Migration("0999_newer", "-- breaks: older versions\nCREATE TABLE newer (id INTEGER) STRICT;")
    assert newer.breaks
    with monkeypatch.context() as later:
        known = image._known()
        later.setattr(image, "_known", lambda: (*known, newer))
        data = Image(b"", "here", "q").serialize()
    with pytest.raises(SchemaMismatch, match="0999_newer"):
        Image(data, "here", "q")


def test_an_image_of_another_queue_is_refused() -> None:
    """A restore that went wrong must not run one queue's jobs as another's."""
    data = a_full_image().serialize()
    with pytest.raises(BackendUnavailable, match="here holds queue 'q' and belongs to 'r'"):
        Image(data, "here", "r")


def test_a_segment_that_was_given_up_never_becomes_part_of_the_queue() -> None:
    """Its writer may only have been asleep, and its object may be gone."""
    state = a_full_image()
    rows, jobs = (
        archive.copied(state.connection, archive.ROWS),
        archive.copied(state.connection, archive.JOBS),
    )
    entry, _ = archive.pack("slow", 0, rows, jobs)
    assert (entry.jobs, entry.rows) == (1, 2), "dead jobs stay: they may be requeued"

    def ends(state: Image) -> int:
        """How its writer asks, before it puts the segment in its place."""
        return change(
            read_again(state), lambda transaction: compaction._execute(transaction, "end", ("slow",))
        )

    assert not ends(state), "it was never begun"
    change(state, lambda transaction: compaction._begin(transaction, "slow"))
    assert ends(state)
    change(state, lambda transaction: compaction._execute(transaction, "abandon", ('["slow"]',)))
    assert not ends(state)
    assert state.look(entries) == []


async def test_rows_of_two_queues_that_count_alike_have_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes may take the same numbers at the same moment."""
    monkeypatch.setattr(image, "take_numbers", lambda count: 7)

    async with driver_on(HeldBlobs()) as driver:
        await finish(driver, 5, queue="one")
        await finish(driver, 5, queue="two")
        rows = (await driver.read_attempts()).attempts
        assert len({row.seq for row in rows}) == len(rows) == 10
        (some,) = [one for one in (await driver.log_streams()).streams if one.queue == "one"]
        page = await driver.read_log(some.name, after=0, until=some.last)
        assert {row.seq for row in page.attempts} == {row.seq for row in rows if row.queue == "one"}
