"""What time it is, by the store, and how seldom it is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

from taskharbor.clock import FakeClock
from taskharbor.drivers.objectstore.blobs import ASK_EVERY, StoreTime
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.jobs import SECOND, Micros


class Stamped(LocalFiles):
    """A folder that tells a time."""

    def __init__(self, folder: Path, offset: Micros | None) -> None:
        super().__init__(folder)
        self.offset = offset
        self.asked = 0

    async def now(self) -> Micros | None:
        self.asked += 1
        return None if self.offset is None else STEADY.now() + self.offset


STEADY = FakeClock(1_700_000_000 * SECOND)


class Machine:
    """A machine whose clock can be set, beside a steady one that cannot."""

    def __init__(self, folder: Path, offset: Micros | None) -> None:
        self.blobs = Stamped(folder, offset)
        self.clock = FakeClock(STEADY.now())
        self.time = StoreTime(self.blobs, self.clock, STEADY.now)

    def pass_time(self, micros: Micros) -> None:
        STEADY.advance(micros / SECOND)
        self.clock.advance(micros / SECOND)

    def now(self) -> Micros:
        return asyncio.run(self.time.now())


def test_a_difference_that_cannot_be_told_is_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2 * SECOND)
    assert machine.now() == machine.clock.now()


def test_a_store_that_tells_no_time_leaves_this_machines(tmp_path: Path) -> None:
    machine = Machine(tmp_path, None)
    assert machine.now() == machine.clock.now()


def test_a_wrong_clock_is_corrected_and_the_store_is_asked_once_in_a_while(tmp_path: Path) -> None:
    machine = Machine(tmp_path, -3600 * SECOND)
    for _ in range(100):
        assert machine.now() == STEADY.now() - 3600 * SECOND
        machine.pass_time(SECOND)
    assert machine.blobs.asked == 1
    machine.pass_time(ASK_EVERY)
    machine.now()
    assert machine.blobs.asked == 2


def test_a_clock_that_was_set_is_noticed_at_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0)
    assert machine.now() == STEADY.now()
    machine.clock.advance(1800)
    assert machine.now() == STEADY.now()
    assert machine.blobs.asked == 2
