"""The image of a queue: a failed step changes nothing, a foreign image is refused, and numbers grow. And planted bugs with
database images: each scenario passes, and each fails once its bug is planted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from drivers.objectstore.fake_blobs import HeldBlobs
from drivers.objectstore.harness import driver_on, finish, jobs_of
from records import NOW, make_record
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.engine import enqueue, inspect
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.migrations import Migration
from taskharbor.drivers.objectstore import cas, compaction, image
from taskharbor.drivers.objectstore.cas import CasObject
from taskharbor.drivers.objectstore.catalog import state_name
from taskharbor.drivers.objectstore.image import Image, take_numbers
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import JobRecord

R = TypeVar("R")


def an_image(*numbers: int) -> Image:
    """The image of queue `q`, with a job for each of these numbers."""
    state, jobs = Image(b"", "here", "q"), jobs_of(len(numbers))
    change(state, lambda transaction: enqueue.enqueue(transaction, jobs, NOW, numbers=numbers))
    return state


def change(state: Image, step: Callable[[Transaction], R]) -> R:
    return state.change(step)[0]


def jobs_in(state: Image) -> list[tuple[int, JobRecord]]:
    return state.look(
        lambda transaction: inspect.find_jobs(transaction, JobFilter(), NOW, 9, inspect.FOREVER)
    )


def test_a_step_that_raises_changes_nothing_and_leaves_the_steps_before_it() -> None:
    state = an_image(5)
    before = jobs_in(state)

    def half_a_step(transaction: Transaction) -> None:
        enqueue.enqueue(transaction, jobs_of(1), NOW)
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        state.change(half_a_step)
    assert jobs_in(state) == before == jobs_in(Image(state.serialize(), "here", "q"))


def test_numbers_of_a_queue_grow_even_where_the_clock_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    state = an_image(7, 7, 3)
    change(state, lambda transaction: enqueue.enqueue(transaction, [make_record(key="k")], NOW, numbers=[1]))
    assert len({number for number, _ in jobs_in(state)}) == 4
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


def test_a_segment_that_was_given_up_never_becomes_part_of_the_queue() -> None:
    """Its writer may only have been asleep, and its object may be gone."""
    state = an_image(5)

    def ends(state: Image) -> int:
        """As its writer asks, before it puts the segment in its place."""
        again = Image(state.serialize(), "here", "q")
        return change(
            again, lambda transaction: transaction.execute(compaction._SQL["end"], ("slow",)).rowcount
        )

    assert not ends(state), "it was never begun"
    change(state, lambda transaction: compaction._begin(transaction, "slow"))
    assert ends(state)
    change(state, lambda transaction: transaction.execute(compaction._SQL["abandon"], ('["slow"]',)))
    assert not ends(state)


async def test_rows_of_two_queues_that_count_alike_have_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- planted bugs -----------------------------------------------------------------------------------------

STATE = state_name("q", 0)


async def ids_there(blobs: HeldBlobs) -> set[str]:
    """As a process sees them that comes new to the store."""
    async with driver_on(blobs) as driver:
        return {job.id for job in (await driver.list_jobs(JobFilter(), now=NOW, limit=1000)).jobs}


async def what_was_answered_is_in_the_object(blobs: HeldBlobs) -> None:
    jobs = jobs_of(2)
    async with driver_on(blobs) as driver:
        for job in jobs:
            await driver.enqueue([job], now=NOW)
        assert await ids_there(blobs) == {job.id for job in jobs}


async def a_refused_write_runs_again_on_what_is_there(blobs: HeldBlobs) -> None:
    first, theirs, ours = jobs_of(3)
    async with driver_on(blobs) as one, driver_on(blobs) as two:
        await one.enqueue([first], now=NOW)
        await two.enqueue([theirs], now=NOW)
        (answer,) = await one.enqueue([ours], now=NOW, new_ids=True)
        assert not answer.existed
    assert await ids_there(blobs) == {first.id, theirs.id, ours.id}


async def a_damaged_object_is_refused(blobs: HeldBlobs) -> None:
    async with driver_on(blobs) as driver:
        await driver.enqueue([make_record(payload=b"payload")], now=NOW)
    blobs.keep(STATE, blobs.objects[STATE].data.replace(b"payload", b"pAyload"))
    with pytest.raises(BackendUnavailable, match="damaged"):
        await ids_there(blobs)


async def an_object_stays_small_when_its_jobs_have_left(blobs: HeldBlobs) -> None:
    async with driver_on(blobs, segment_rows=50) as driver:
        await driver.enqueue([make_record()], now=NOW)
        empty = len(blobs.objects[STATE].data)
        await finish(driver, 300)
        await driver.store.settled()
        await driver.enqueue([make_record()], now=NOW)
        assert len(blobs.objects[STATE].data) < 1.5 * empty


def takes_images_inside_a_transaction(patch: pytest.MonkeyPatch) -> None:
    change = Image.change

    def without_commit(self: Image, function: Any) -> Any:
        if not self.connection.in_transaction:
            self.connection.execute("BEGIN")
        return change(self, function)

    patch.setattr(Image, "change", without_commit)
    patch.setattr(Image, "serialize", lambda self: self.connection.serialize())


def asks_for_a_write_ahead_log(patch: pytest.MonkeyPatch) -> None:
    serialize = Image.serialize

    def as_wal(self: Image) -> bytes:
        data = serialize(self)
        return data[:18] + b"\x02\x02" + data[20:]

    patch.setattr(Image, "serialize", as_wal)


def keeps_the_connection_of_a_refused_write(patch: pytest.MonkeyPatch) -> None:
    write = CasObject._write

    async def keep_state(self: Any, held: Any, outcomes: Any) -> bool:
        has_landed = await write(self, held, outcomes)
        if not has_landed:
            self._held = await self._read()
            self._held.state = held.state
        return has_landed

    patch.setattr(CasObject, "_write", keep_state)


def carries_no_checksum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cas, "crc32", lambda data, start=0: 0)


def is_never_vacuumed(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(image._SQL, "pages", "SELECT 0, 1")


Scenario = Callable[[HeldBlobs], Awaitable[None]]
BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], Scenario]] = [
    (takes_images_inside_a_transaction, what_was_answered_is_in_the_object),
    (asks_for_a_write_ahead_log, what_was_answered_is_in_the_object),
    (keeps_the_connection_of_a_refused_write, a_refused_write_runs_again_on_what_is_there),
    (carries_no_checksum, a_damaged_object_is_refused),
    (is_never_vacuumed, an_object_stays_small_when_its_jobs_have_left),
]


@pytest.mark.parametrize(("plant", "scenario"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
async def test_the_scenario_passes_and_catches(
    plant: Callable[[pytest.MonkeyPatch], None], scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scenario(HeldBlobs())
    plant(monkeypatch)
    # An assertion of the scenario, or an error where the image cannot be opened at all.
    with pytest.raises((Exception, pytest.fail.Exception)):
        await scenario(HeldBlobs())
