"""Many who wait, one handle on the store.

A driver's `wait` remembers per handle what it has seen, so clients that share a handle would take each other's wake-ups. Here
one task per watched queue waits on the store, and every stir gets a number. Who says the number it saw last misses nothing,
whether or not it was waiting at that moment.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

from taskharbor.broker.problems import Problem
from taskharbor.drivers.contract import Driver
from taskharbor.jobs import Micros

log = logging.getLogger("taskharbor.broker")

LOOK_AGAIN = 1.0
"""Seconds after which the store is asked anew: only then it tells of what will come due that was stored since."""
NEEDLESS = 5
"""Every so many looks without a stir count as one. A claim on our own handle may hide a stir from a look that begins right
after it; nobody waits longer than this for what was hidden."""
MOST_WATCHED = 10_000
"""Queues at once: names cost a caller nothing."""
FORGET_AFTER = 60.0
"""Seconds for which a queue is watched after the last one who asked."""


class _Watch:
    """One queue that somebody waits for."""

    __slots__ = ("asked_at", "now", "since", "stirred", "task", "waiters")

    def __init__(self, since: int) -> None:
        self.since = since
        """The number from which on nothing was missed."""
        self.stirred = since
        self.waiters: set[asyncio.Future[None]] = set()
        self.asked_at = 0.0
        self.now: Micros = 0
        self.task: asyncio.Task[None] | None = None


class Wakes:
    """Used from the server's loop."""

    def __init__(
        self,
        driver: Driver,
        *,
        now: Callable[[], Micros],
        stopping: asyncio.Event,
        max_waiting: int,
        max_seconds: float,
        trusts_clients: bool,
    ) -> None:
        self._driver = driver
        self._now = now
        self._stopping = stopping
        self._max_waiting = max_waiting
        self._max_seconds = max_seconds
        self._trusts_clients = trusts_clients
        self._name = secrets.token_hex(4)
        """Numbers of another broker, or of this one before it was started anew, mean nothing here."""
        self._number = 0
        self._watches: dict[str, _Watch] = {}
        self.waiting = 0

    def mark(self, queues: Sequence[str]) -> str:
        """To be taken before a look at the queues: what stirs later ends the wait that is given this."""
        for queue in queues:
            self._watch(queue)
        return f"{self._name}.{self._number}"

    async def wait(
        self, queues: Sequence[str], seen: str | None, *, now: Micros, timeout: float
    ) -> tuple[bool, str]:
        """Whether something may have stirred in one of the queues since `seen`; and what has been seen by now.

        `now` counts only where clients' clocks are trusted: then what comes due is judged by it.
        """
        number = self._number_of(seen)
        watches = [self._watch(queue, now) for queue in dict.fromkeys(queues)]
        if any(watch.since > number or watch.stirred > number for watch in watches):
            return True, self._seen()
        if self._stopping.is_set() or timeout <= 0 or not watches:
            return False, self._seen()
        if self.waiting >= self._max_waiting:
            raise _too_many(f"{self.waiting} calls are waiting for work already")
        self.waiting += 1
        try:
            is_stirred = await self._sleep(watches, min(timeout, self._max_seconds))
        finally:
            self.waiting -= 1
        return is_stirred, self._seen()

    def stop(self) -> None:
        """Everybody who waits is answered at once."""
        for watch in self._watches.values():
            _wake(watch)

    async def close(self) -> None:
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watches.clear()

    def _seen(self) -> str:
        return f"{self._name}.{self._number}"

    def _number_of(self, seen: str | None) -> int:
        name, _, number = (seen or "").partition(".")
        return int(number) if name == self._name and number.isdecimal() and len(number) < 20 else -1

    async def _sleep(self, watches: Sequence[_Watch], seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        for watch in watches:
            watch.waiters.add(woken)
        try:
            async with asyncio.timeout(seconds):
                await woken
        except TimeoutError:
            return False
        finally:
            asked_at = loop.time()
            for watch in watches:
                watch.waiters.discard(woken)
                watch.asked_at = asked_at
        return not self._stopping.is_set()

    # -- watching the store -------------------------------------------------------------------------------

    def _watch(self, queue: str, now: Micros | None = None) -> _Watch:
        watch = self._watches.get(queue)
        if watch is None:
            if len(self._watches) >= MOST_WATCHED:
                raise _too_many(f"{MOST_WATCHED} queues are being watched already")
            self._number += 1
            watch = self._watches[queue] = _Watch(self._number)
            watch.now = self._now() if now is None else now
            watch.task = asyncio.create_task(self._look(queue, watch))
        elif now is not None:
            watch.now = now
        watch.asked_at = asyncio.get_running_loop().time()
        return watch

    async def _look(self, queue: str, watch: _Watch) -> None:
        loop = asyncio.get_running_loop()
        needless = failures = 0
        while watch.waiters or loop.time() - watch.asked_at < FORGET_AFTER:
            now = watch.now if self._trusts_clients else self._now()
            try:
                is_stirred = await self._driver.wait([queue], now=now, timeout=LOOK_AGAIN)
            except Exception as error:
                # Whatever it is: who waits here must not be forgotten.
                if failures == 0:
                    log.warning("cannot wait for queue %s: %s; trying again", queue, type(error).__name__)
                failures += 1
                # Who waits is told by its own next look at the queue.
                is_stirred = True
                _wake(watch)
                await asyncio.sleep(LOOK_AGAIN)
            else:
                failures = 0
            needless = 0 if is_stirred else needless + 1
            if is_stirred or needless >= NEEDLESS:
                needless = 0
                self._number += 1
                watch.stirred = self._number
                _wake(watch)
        # Nobody asks any more. The next one begins with a new watch, and is told to look.
        del self._watches[queue]


def _too_many(detail: str) -> Problem:
    hint = "wait a moment and ask again, without wait_seconds or with fewer workers"
    return Problem(429, "too_many_waiting", detail, hint=hint, headers={"Retry-After": "1"})


def _wake(watch: _Watch) -> None:
    for waiter in watch.waiters:
        if not waiter.done():
            waiter.set_result(None)
