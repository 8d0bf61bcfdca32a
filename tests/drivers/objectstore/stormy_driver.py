"""The driver on a store in bad weather, as the conformance kit can drive it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from drivers.objectstore.faulty_blobs import Faults, FaultyBlobs, Weather
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.options import Options, parse_url
from taskharbor_testkit.conformance.backend import Backend, Store

CALLS = (
    "enqueue",
    "reserve",
    "extend_lease",
    "settle",
    "reclaim",
    "cancel",
    "requeue",
    "purge",
    "prune",
    "configure",
)

SMALL = Options(poll=None, segment_rows=4, merge=2, grace=0.0)


def _then_something_lands(name: str) -> Callable[..., Any]:
    async def call(self: StormyDriver, *args: Any, **kwargs: Any) -> Any:
        answer = await getattr(ObjectStoreDriver, name)(self, *args, **kwargs)
        if self.weather.is_awaited and self.weather.random.random() < 0.5:
            await self.weather.land()
        return answer

    return call


class StormyDriver(ObjectStoreDriver):
    """Opens in calm weather, works in bad weather; what got lost on the way arrives between calls."""

    weather: Weather

    @classmethod
    def on(cls, weather: Weather, options: Options = SMALL) -> StormyDriver:
        place = parse_url("mem://")
        driver = cls(lambda: FaultyBlobs(place.open(), weather), options, is_in_memory=True)
        driver.weather = weather
        return driver

    def clone(self) -> StormyDriver:
        driver = super().clone()
        driver.weather = self.weather
        return driver

    async def open(self) -> None:
        faults, self.weather.faults = self.weather.faults, Faults()
        try:
            await super().open()
        finally:
            self.weather.faults = faults


for _name in CALLS:
    setattr(StormyDriver, _name, _then_something_lands(_name))


class StormyBackend(Backend):
    """Every store has weather of its own, and all that it met is counted in `met`."""

    def __init__(self, faults: Faults, seed: int) -> None:
        super().__init__(lambda: "")
        self.met: dict[str, int] = {}
        self._faults = faults
        self._seeds = Random(seed)

    def store(self, directory: Path) -> AbstractAsyncContextManager[Store]:
        return self._in_weather()

    @asynccontextmanager
    async def _in_weather(self) -> AsyncIterator[Store]:
        weather = Weather(Random(self._seeds.random()), self._faults)
        store = Store(StormyDriver.on(weather))
        try:
            yield store
        finally:
            weather.clear_up()
            await store.close()
            for fault, times in weather.met.items():
                self.met[fault] = self.met.get(fault, 0) + times


def seed_from_environment() -> int:
    """Printed, so that a run can be repeated."""
    seed = int(os.environ.get("TASKHARBOR_STORM_SEED", "20261116"))
    print(f"TASKHARBOR_STORM_SEED={seed}")
    return seed
