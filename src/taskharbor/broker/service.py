"""The broker's inside: one open driver, its clock, and what runs beside the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.long_poll import LongPolls
from taskharbor.clock import BackendClock, Clock, SystemClock
from taskharbor.drivers.contract import Driver
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import Micros
from taskharbor.worker.engine import SweepLoop

log = logging.getLogger("taskharbor.broker")

TEND_SECONDS = 5.0
LEAD_AGAIN_SECONDS = 1.0


class Leads(Protocol):
    """The leadership of this broker, which it needs to answer. A store that several brokers share has none, and all answer."""

    @property
    def is_leader(self) -> bool: ...

    @property
    def leader_url(self) -> str | None:
        """Where the leader is, as far as is known; our own address while we lead."""

    async def run(self) -> None:
        """Take, renew, lose and take again, until cancelled."""

    async def resign(self) -> None:
        """Give leadership back at once, so that a standby need not wait for the term to end."""

    def look_now(self) -> None:
        """A call failed in a way that a new leader would explain: do not wait for the next renewal to find out."""


Candidacy: TypeAlias = Callable[[Driver], Leads]
"""Makes a candidate of a driver that is open."""


def candidacy_for(driver: Driver, *, url: str, term: float) -> Candidacy | None:
    """`url`: where clients reach this broker, should it lead. `term`: seconds that a leader may be silent."""
    if not callable(getattr(driver, "lead", None)):
        return None
    from taskharbor.drivers.objectstore.leadership import Leadership

    def stand(led: Driver) -> Leads:
        return Leadership(led, url=url, term=term)  # type: ignore[arg-type]

    return stand


class Service:
    """What every request works with. Made anywhere, started on the server's loop."""

    def __init__(
        self,
        driver: Driver,
        config: BrokerConfig | None = None,
        candidacy: Candidacy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.driver = driver
        self.config = config or BrokerConfig()
        self.leads: Leads | None = None
        """None: over this store any number of brokers answer."""
        self._candidacy = candidacy
        self.stopping = asyncio.Event()
        """Set: long polls are answered at once, and new calls are refused."""
        self._backend_clock = BackendClock(driver.time) if clock is None else None
        self._clock: Clock = self._backend_clock or clock or SystemClock()
        self.long_polls = LongPolls(driver, self.config, self.now)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_started = False

    def now(self) -> Micros:
        return self._clock.now()

    @property
    def is_leading(self) -> bool:
        return self._candidacy is None or (self.leads is not None and self.leads.is_leader)

    @property
    def leader_url(self) -> str | None:
        """Where another leads, or we do. None while nobody is known: one who lost its term without noticing yet still has its
        own name there, and must not send its callers to itself."""
        leads = self.leads
        if leads is None:
            return self.config.advertise if self._candidacy is None else None
        url = leads.leader_url
        return None if url == self.config.advertise and not leads.is_leader else url

    async def start(self) -> None:
        await self.driver.open()
        if self._backend_clock is not None:
            try:
                await self._backend_clock.sync()
            except BaseException:
                await self.driver.close()
                raise
        self._tasks.append(asyncio.create_task(self._tend()))
        if self._candidacy is not None:
            expire = getattr(self.driver, "expire_in_every_pass", None)
            if expire is not None and self._sweeps:
                expire(self.now)
            self.leads = self._candidacy(self.driver)
            self._tasks.append(asyncio.create_task(self._lead(self.leads)))
        self._is_started = True

    def stop_waiting(self) -> None:
        """The first half of a stop: nobody is kept waiting any more."""
        self.stopping.set()
        self.long_polls.stop()

    async def close(self) -> None:
        self.stop_waiting()
        if not self._is_started:
            return
        self._is_started = False
        await self.long_polls.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.leads is not None:
            try:
                await self.leads.resign()
            except (TaskHarborError, OSError) as error:
                log.warning(
                    "could not resign (%s): a standby takes over when the term ends", type(error).__name__
                )
        await self.driver.close()

    # -- beside the requests ------------------------------------------------------------------------------

    @property
    def _sweeps(self) -> bool:
        """Where clients bring their own time, ours must not end their leases."""
        return self.config.sweeps and not self.config.trust_client_time

    async def _tend(self) -> None:
        """Keeps the clock set, and sweeps: workers do that on the side, clients in other languages do not."""
        sweep = SweepLoop(self.driver, clock=self._clock)
        while True:
            await asyncio.sleep(TEND_SECONDS)
            try:
                if self._backend_clock is not None and self._backend_clock.is_due:
                    await self._backend_clock.sync()
                if self._sweeps and self.is_leading:
                    await sweep.sweep()
            except (TaskHarborError, OSError) as error:
                log.debug("the sweep failed (%s); it is repeated", type(error).__name__)

    async def _lead(self, leads: Leads) -> None:
        """A term that was lost, or a store that was away, is no reason to stop: stand by and try again."""
        while True:
            try:
                await leads.run()
            except (TaskHarborError, OSError) as error:
                log.warning("leadership is interrupted (%s); trying again", type(error).__name__)
            await asyncio.sleep(LEAD_AGAIN_SECONDS)
