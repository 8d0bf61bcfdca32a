"""The sweep: ends leases whose holders are gone, applies retention, keeps the clock set.

Reserving reclaims too, but only in the queues somebody still serves; this covers the rest.
"""

from __future__ import annotations

import asyncio
import logging
import random

from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver
from taskharbor.errors import BackendUnavailable

log = logging.getLogger("taskharbor.worker")

RECLAIM_EVERY = 5.0
PRUNE_EVERY = 60.0
BATCH = 1000


class SweepLoop:
    def __init__(self, driver: Driver, *, clock: Clock, rng: random.Random | None = None) -> None:
        self._driver = driver
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._random = rng or random.Random()
        self._prune_at = self._loop.time() + self._random.uniform(0, PRUNE_EVERY)

    async def run(self) -> None:
        while True:
            # Spread out, so that a fleet started together does not sweep together.
            await asyncio.sleep(RECLAIM_EVERY * self._random.uniform(0.8, 1.2))
            try:
                await self.sweep()
            except (BackendUnavailable, OSError) as error:
                log.debug("sweep failed: %s", error)

    async def sweep(self) -> None:
        await self._clock.refresh()
        while await self._driver.reclaim(now=self._clock.now(), limit=BATCH) == BATCH:
            pass
        if self._loop.time() >= self._prune_at:
            self._prune_at = self._loop.time() + PRUNE_EVERY
            while await self._driver.prune(now=self._clock.now(), limit=BATCH) >= BATCH:
                pass
