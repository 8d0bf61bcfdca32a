"""What goes wrong with database images, planted: each scenario passes, and each fails once its bug is planted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from drivers.objectstore.fake_blobs import HeldBlobs
from drivers.objectstore.harness import driver_on, finish
from records import NOW, make_record
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.objectstore import cas, image
from taskharbor.drivers.objectstore.blobs import Conflict, Unclear
from taskharbor.drivers.objectstore.cas import Attempt, CasObject, Content, answer, new_commit, seal
from taskharbor.drivers.objectstore.catalog import state_name
from taskharbor.drivers.objectstore.image import Image
from taskharbor.errors import BackendUnavailable

STATE = state_name("q", 0)


async def ids_there(blobs: HeldBlobs) -> set[str]:
    """As a process sees them that comes new to the store."""
    async with driver_on(blobs) as driver:
        return {job.id for job in (await driver.list_jobs(JobFilter(), now=NOW, limit=1000)).jobs}


# -- scenarios ------------------------------------------------------------------------------------------------


async def what_was_answered_is_in_the_object(blobs: HeldBlobs) -> None:
    job, other = make_record(), make_record()
    async with driver_on(blobs) as driver:
        await driver.enqueue([job], now=NOW)
        await driver.enqueue([other], now=NOW)
        assert await ids_there(blobs) == {job.id, other.id}


async def a_refused_write_runs_again_on_what_is_there(blobs: HeldBlobs) -> None:
    ours, theirs = make_record(), make_record()
    async with driver_on(blobs) as one, driver_on(blobs) as two:
        await one.enqueue([make_record()], now=NOW)
        await two.enqueue([theirs], now=NOW)
        (answer,) = await one.enqueue([ours], now=NOW, new_ids=True)
        assert not answer.existed
    assert {ours.id, theirs.id} < await ids_there(blobs)


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


# -- bugs -----------------------------------------------------------------------------------------------------


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
    async def write(self: Any, held: Any, outcomes: Any) -> bool:
        commit = new_commit()
        header = held.header.after(commit, epoch=0)
        body = held.state.serialize()
        self._note_size(len(body))
        try:
            version = await self._blobs.write(self.name, seal(header, body), held.version)
        except (Conflict, Unclear):
            newer = await self._read()
            newer.state = held.state
            self._held = newer
            self._attempts.append(Attempt(header.serial, commit, outcomes))
            return False
        self._held = Content(held.state, header, version)
        answer(outcomes)
        return True

    patch.setattr(CasObject, "_write", write)


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


@pytest.mark.parametrize(
    "scenario", dict.fromkeys(scenario for _, scenario in BUGS), ids=lambda one: one.__name__
)
async def test_without_a_bug(scenario: Scenario) -> None:
    await scenario(HeldBlobs())


@pytest.mark.parametrize(("plant", "scenario"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
async def test_the_scenario_catches(
    plant: Callable[[pytest.MonkeyPatch], None], scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    # An assertion of the scenario, or an error where the image cannot be opened at all.
    with pytest.raises((Exception, pytest.fail.Exception)):
        await scenario(HeldBlobs())
