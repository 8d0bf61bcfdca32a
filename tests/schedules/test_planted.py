"""Bugs on purpose: the mistakes that others have shipped. The simulation must find each of them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from schedules.virtual import World
from taskharbor.drivers.contract import Driver
from taskharbor.jobs import Micros, UpdateFlags
from taskharbor.schedules import client, specification, ticking, times
from taskharbor.schedules.specification import Reading, StoredSchedule, own_record
from taskharbor.schedules.tick_ids import tick_id

SEEDS = range(120)
Plant = Callable[[pytest.MonkeyPatch], None]


def random_ids(patch: pytest.MonkeyPatch) -> None:
    """Each try gives the job of a tick another id."""
    chance = random.Random(1)

    def drawn(made: Any, name: str, generation: str, at: datetime) -> str:
        return tick_id(made, name, f"{chance.randrange(16**12):012x}", at)

    patch.setattr(specification, "tick_id", drawn)


def next_from_now(patch: pytest.MonkeyPatch) -> None:
    """One tick is made and the next one comes after now, whatever was missed in between."""
    due = Reading.due
    patch.setattr(Reading, "due", lambda self, cursor, now: due(self, cursor, now)[:1])


def declaring_resets(patch: pytest.MonkeyPatch) -> None:
    """Each declaration is stored, and its time is that of the next tick: what is due is forgotten."""

    async def put(driver: Driver, stored: StoredSchedule, now: Micros) -> bool:
        await driver.enqueue([own_record(stored, now, now, UpdateFlags(run_at="yes"))], now=now)
        return True

    patch.setattr(client, "put", put)


def frozen_offset(patch: pytest.MonkeyPatch) -> None:
    """The offset of the zone is that of one day, for ever."""

    def fixed(name: str) -> timezone:
        offset = datetime(2026, 1, 1, tzinfo=ZoneInfo(name)).utcoffset()
        assert offset is not None
        return timezone(offset)

    patch.setattr(times, "zone_of", fixed)


def late_check(patch: pytest.MonkeyPatch) -> None:
    """Jobs are made first, and the overlap is looked at afterwards."""
    look, enqueue = ticking._look, ticking._enqueue
    asked: list[Any] = []

    async def later(*arguments: Any) -> None:
        asked[:] = arguments

    async def first(driver: Any, steps: Sequence[Any], now: Micros) -> None:
        await enqueue(driver, steps, now)
        await look(*asked)

    patch.setattr(ticking, "_look", later)
    patch.setattr(ticking, "_enqueue", first)


def unbounded(patch: pytest.MonkeyPatch) -> None:
    """After an outage, all missed ticks are made at once."""
    patch.setattr(Reading, "due", lambda self, cursor, now: self.ticks(cursor, now, 1_000_000))


BUGS: dict[str, tuple[Plant, str]] = {
    "random id": (random_ids, "is doubled"),
    "next from now": (next_from_now, "lost"),
    "declaring resets": (declaring_resets, "lost"),
    "frozen offset": (frozen_offset, "is not due"),
    "late check": (late_check, "beside"),
    "unbounded": (unbounded, "is not due"),
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No parsed schedule outlives a bug."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    forget()


def forget() -> None:
    for cached in (times._cron, times.times_of, specification.read):
        cached.cache_clear()


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_and_the_seed_is_clean_without_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, message = BUGS[name]
    forget()
    with monkeypatch.context() as patch:
        plant(patch)
        seed = next((one for one in SEEDS if any(message in said for said in World(one).run().wrong)), None)
    assert seed is not None, f"{name} was not found in {len(SEEDS)} seeds"
    print(f"found by seed {seed}")
    forget()
    assert World(seed).run().wrong == []
