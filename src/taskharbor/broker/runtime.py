"""The open driver of a broker, its clock, leadership, sweeps, and the clients that wait for jobs."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import msgspec
from msgspec.structs import replace

from taskharbor.broker.calls import Calls
from taskharbor.broker.config import BrokerConfig, Rates, Shares
from taskharbor.broker.error_responses import Problem
from taskharbor.clock import BackendClock, Clock
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.operations import Wait
from taskharbor.drivers.records import Woken
from taskharbor.drivers.waiting import Look, Notifications, wait
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import Micros
from taskharbor.worker.backend_loop import ScheduleLoop, SweepLoop

log = logging.getLogger("taskharbor.broker")

TEND_SECONDS = 5.0
LEAD_AGAIN_SECONDS = 1.0


class Leads(Protocol):
    """The leadership that a broker needs to answer. A store that several brokers share has none, and all of them answer."""

    @property
    def is_leader(self) -> bool: ...

    @property
    def leader_url(self) -> str | None:
        """The address of the leader, as far as it is known; this broker's own while it leads."""

    async def run(self) -> None:
        """Take, renew, lose and take again, until cancelled."""

    async def resign(self) -> None:
        """Give leadership back at once, so that a standby need not wait for the term to end."""

    def look_now(self) -> None:
        """Check the leadership now: a call failed in a way that a new leader would explain."""


# Makes a candidate, once the driver is open.
Candidacy: TypeAlias = Callable[[], Leads]


def candidacy_for(driver: Driver, *, url: str, term: float) -> Candidacy | None:
    """Make a candidacy. `url`: the address of this broker for clients, if it leads. `term`: the longest silence of a leader in
    seconds."""
    candidate = getattr(driver, "candidate", None)
    return None if candidate is None else partial(candidate, url=url, term=term)


class Service:
    """The state that all requests share. Made anywhere, started on the server's loop."""

    def __init__(
        self, driver: Driver, config: BrokerConfig | None, candidacy: Candidacy | None, clock: Clock | None
    ) -> None:
        self.driver = driver
        self.config = config or BrokerConfig()
        # None: any number of brokers answer over this store.
        self.leads: Leads | None = None
        self._candidacy = candidacy
        # True if this broker ends expired leases, applies retention and makes the jobs of schedules. Its clock must not end the
        # leases of clients that give their own time.
        self.sweeps = self.config.sweeps and not self.config.trust_client_time
        # Set: long polls are answered at once, and new calls are refused.
        self.stopping = asyncio.Event()
        # The clock that leases are measured by.
        self.clock: Clock = clock or BackendClock(driver.time)
        self.calls = Calls(driver, self.config)
        self.long_polls = LongPolls(driver, self.config, self.now)
        # The tasks beside the requests, from the start to the end.
        self._tasks: list[asyncio.Task[None]] = []

    def now(self) -> Micros:
        """Return the time that leases are measured by."""
        return self.clock.now()

    @property
    def is_leading(self) -> bool:
        """True if this broker answers calls."""
        return self._candidacy is None or (self.leads is not None and self.leads.is_leader)

    @property
    def leader_url(self) -> str | None:
        """The address of the leader: of this broker or another. None while no leader is known. A broker that lost its term
        without noticing still finds its own address there, and must not send its callers to itself."""
        leads = self.leads
        if leads is None:
            return self.config.advertise if self._candidacy is None else None
        url = leads.leader_url
        return None if url == self.config.advertise and not leads.is_leader else url

    async def start(self) -> None:
        """Open the driver, set the clock, and begin to sweep and to lead."""
        await self.driver.open()
        if isinstance(self.clock, BackendClock):
            try:
                await self.clock.sync()
            except BaseException:
                await self.driver.close()
                raise
        self._tasks.append(asyncio.create_task(self._tend()))
        if self.sweeps:
            schedules = ScheduleLoop(
                self.driver, clock=self.clock, name="broker", is_on=lambda: self.is_leading
            )
            self._tasks.append(asyncio.create_task(schedules.run()))
        if self._candidacy is not None:
            expire = getattr(self.driver, "expire_in_every_pass", None)
            if expire is not None and self.sweeps:
                expire(self.now)
            self.leads = self._candidacy()
            self._tasks.append(asyncio.create_task(self._lead(self.leads)))

    def stop_waiting(self) -> None:
        """Begin a stop: answer all long polls."""
        self.stopping.set()
        self.long_polls.stop()

    async def close(self) -> None:
        """End long polls, give leadership back, and close the driver."""
        self.stop_waiting()
        if not self._tasks:
            return
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(self.long_polls.close(), _end(tasks))
        if self.leads is not None:
            try:
                await self.leads.resign()
            except (TaskHarborError, OSError) as error:
                log.warning(
                    "could not resign (%s): a standby takes over when the term ends", type(error).__name__
                )
        await self.driver.close()

    # -- beside the requests ------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Keep the clock set, and sweep. Workers sweep too, but clients in other languages do not."""
        sweep = SweepLoop(self.driver, clock=self.clock)
        while True:
            await asyncio.sleep(TEND_SECONDS)
            try:
                if isinstance(self.clock, BackendClock) and self.clock.is_due:
                    await self.clock.sync()
                if self.sweeps and self.is_leading:
                    await sweep.sweep()
            except (TaskHarborError, OSError) as error:
                log.debug("the sweep failed (%s); it is repeated", type(error).__name__)

    async def _lead(self, leads: Leads) -> None:
        """Lead until stopped. After a lost term or an outage of the store, stand by and try again."""
        while True:
            try:
                await leads.run()
            except (TaskHarborError, OSError) as error:
                log.warning("leadership is interrupted (%s); trying again", type(error).__name__)
            await asyncio.sleep(LEAD_AGAIN_SECONDS)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- long polls: many clients wait, one watcher per queue waits on the store -------------------------------
# A watcher raises the queue's number whenever the store says that something may have become runnable. A client that passes the
# number it saw last misses nothing, whether or not it was waiting at that moment.

# Seconds after which the store is asked again. Only then it tells the due times of jobs that were stored since.
LOOK_AGAIN = 1.0
# The most queues that are watched at once: a caller can name any number. Each is looked at once a second.
MOST_WATCHED = 2000
# Seconds that a queue is watched after the last call that named it: long enough to ask again after an answer.
FORGET_AFTER = 5.0


class _Watcher(msgspec.Struct):
    """One queue that clients wait for.

    Attributes:
        caller: The caller that named it first.
    """

    caller: str
    changed_at: int = 0
    asked_at: float = 0.0
    now: Micros = 0
    task: asyncio.Task[None] | None = None


class LongPolls:
    """The waits of all clients, and a source for `waiting.wait`. Used on the server's loop."""

    trusts_notifications = False

    def __init__(self, driver: Driver, config: BrokerConfig, now: Callable[[], Micros]) -> None:
        self.notifications = Notifications()
        self._driver = driver
        self._config = config
        self._now = now
        self._is_stopped = False
        # A random name: numbers of another broker, or of this one before a restart, mean nothing here.
        self._name = secrets.token_hex(4)
        self._number = 0
        self._watchers: dict[str, _Watcher] = {}
        # Lines of the log about queues that cannot be watched: a caller can name many.
        self._lines = Rates(1.0, 10.0)
        has_tokens = bool(config.tokens)
        self._watched = Shares.of_tokens(MOST_WATCHED, has_tokens)
        self._waiting = Shares.of_tokens(config.max_waiting, has_tokens)

    @property
    def waiting(self) -> int:
        """The number of clients that wait."""
        return self._waiting.held

    async def wait(self, call: Wait, caller: str) -> Woken:
        """`Driver.wait` for a client. `now` counts only where clients' clocks are trusted: dues are judged by it then."""
        for queue in call.queues:
            self._watch(queue, call.now, caller)
        told = await wait(self, replace(call, timeout=0.0))
        if not told.woken and call.timeout > 0:
            if not self._waiting.take(caller):
                detail = (
                    f"too many calls of the token {caller}, or of all tokens, are waiting for work already"
                )
                raise Problem("too_many_waiting", detail, retry_after=1)
            try:
                longest = min(call.timeout, self._config.max_wait_seconds)
                told = await wait(self, replace(call, timeout=longest, seen=told.seen))
            finally:
                self._waiting.give_back(caller)
        return Woken(told.woken and not self._is_stopped, told.seen)

    def stop(self) -> None:
        """Answer all waiting clients at once."""
        self._is_stopped = True
        self.notifications.notify()

    async def close(self) -> None:
        """End all watchers."""
        await _end([watcher.task for watcher in self._watchers.values() if watcher.task is not None])
        self._watchers.clear()

    # -- the source of `waiting.wait` -----------------------------------------------------------------------

    def listen(self, queues: Sequence[str]) -> None:
        """Nothing to prepare: a wait has made its watchers already."""

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        """The number of each queue's last change. It differs from `version` if one has changed since."""
        watchers = [self._watchers.get(queue) for queue in queues]
        look = Look.at((self._name, *(one and one.changed_at for one in watchers)), version, None)
        return look._replace(is_changed=look.is_changed or self._is_stopped)

    # -- watching the store ---------------------------------------------------------------------------------

    def _change(self, watcher: _Watcher) -> None:
        self._number += 1
        watcher.changed_at = self._number

    def _watch(self, queue: str, now: Micros, caller: str) -> None:
        watcher = self._watchers.get(queue)
        if watcher is None:
            if not self._watched.take(caller):
                detail = f"too many queues are being watched for the token {caller}, or for all tokens"
                raise Problem("too_many_waiting", detail, retry_after=1)
            watcher = self._watchers[queue] = _Watcher(caller)
            # Changes before the watch began are not known.
            self._change(watcher)
            watcher.task = asyncio.create_task(self._keep_watching(queue, watcher))
        watcher.now, watcher.asked_at = now, asyncio.get_running_loop().time()

    async def _keep_watching(self, queue: str, watcher: _Watcher) -> None:
        loop = asyncio.get_running_loop()
        seen: str | None = None
        is_failing = False
        while self.notifications.is_awaited(queue) or loop.time() - watcher.asked_at < FORGET_AFTER:
            if self.notifications.is_awaited(queue):
                watcher.asked_at = loop.time()
            now = watcher.now if self._config.trust_client_time else self._now()
            try:
                told = await self._driver.wait([queue], now=now, timeout=LOOK_AGAIN, seen=seen)
                seen, is_failing, is_changed = told.seen, False, told.woken
            except Exception as error:
                # Any error: waiting clients must not be forgotten, and their own next claim tells them of it.
                if not is_failing and not self._lines.take(""):
                    log.warning("cannot wait for queue %r: %s; trying again", queue, type(error).__name__)
                is_failing = is_changed = True
            if is_changed:
                self._change(watcher)
                self.notifications.notify((queue,))
            if is_failing:
                await asyncio.sleep(LOOK_AGAIN)
        # The next client begins with a new watcher, and is told to look.
        del self._watchers[queue]
        self._watched.give_back(watcher.caller)
