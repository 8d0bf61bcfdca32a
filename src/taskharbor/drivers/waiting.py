"""Waiting for work: one loop for every driver and for the broker.

A driver supplies a `Source`: the version of some queues, the time at which something in them comes due, and notifications of
changes. The version decides. A notification only says when to look, so a lost, doubled or late notification never loses a
wake-up. The caller keeps the text of a wait (`seen`) and passes it to the next one, so no handle remembers its waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from taskharbor.drivers.operations import Wait
from taskharbor.drivers.records import Woken
from taskharbor.jobs import SECOND, Micros

log = logging.getLogger("taskharbor.waiting")

ALWAYS: Micros = -(2**52)
"""An instant before every instant that a store may hold."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
"""Seconds between two tries to connect a listener."""


class Look(NamedTuple):
    """The state of some queues at one moment."""

    version: str
    """Opaque text, made and compared by the source alone."""
    is_changed: bool
    """True if something may have become runnable since the version that the caller has seen."""
    due: Micros | None
    """The instant at which the next scheduled job or lease comes due after `since`."""

    @classmethod
    def at(cls, versions: Iterable[object], seen: str | None, due: Micros | None) -> Look:
        """Make the look of a source whose versions only have to be compared."""
        version = ",".join(map(str, versions))
        return cls(version, version != seen, due)


class Source(Protocol):
    """The part of waiting that differs between stores."""

    notifications: Notifications
    trusts_notifications: bool
    """True: a notification ends the wait by itself. False: the queues are looked at first, because that is cheap or because a
    notification may be about other queues."""

    def listen(self, queues: Sequence[str]) -> float | None:
        """Begin to listen for changes of the queues. Returns the seconds after which to look again; None while every change
        notifies."""

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        """Return the state of the queues now, compared with `version` (None: nothing was seen yet)."""


async def wait(source: Source, call: Wait) -> Woken:
    """Implement `Driver.wait` on a source. Without `seen` it returns at once."""
    loop = asyncio.get_running_loop()
    started, now, timeout = loop.time(), call.now, call.timeout
    queues = list(dict.fromkeys(call.queues))
    since, version = _read(call.seen)
    # Subscribed before the first look, so that no change is missed between the two.
    with source.notifications.subscribe(queues) as notified:
        source.listen(queues)
        look = await source.look(queues, version, since)
        is_woken = look.is_changed or version is None
        is_due = look.due is not None and look.due - now <= timeout * SECOND
        deadline = started + (max(0, look.due - now) / SECOND if look.due is not None and is_due else timeout)
        if is_woken:
            # A loop of waits that return at once must still let other tasks run.
            await asyncio.sleep(0)
        while not is_woken and (left := deadline - loop.time()) > 0:
            pause = source.listen(queues)
            is_notified = await set_within(notified, left if pause is None else min(left, pause))
            if is_notified and source.trusts_notifications:
                is_woken = True
            elif is_notified or loop.time() < deadline:
                notified.clear()
                look = await source.look(queues, version, since)
                is_woken = look.is_changed
    return Woken(is_woken or is_due, f"{now}/{look.version}")


def _read(seen: str | None) -> tuple[Micros, str | None]:
    """Return the time of the wait that returned `seen`, and the version. The caller has tried to claim all that was due by then.
    So a due job that cannot run (paused, no room) does not wake it again."""
    since, slash, version = (seen or "").partition("/")
    if not slash or len(since) > 20 or not since.removeprefix("-").isdecimal():
        return ALWAYS, None
    return int(since), version


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


class Notifications:
    """Wakes the waiters of a queue in this process, on any event loop and in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waiters: dict[str, dict[asyncio.Event, asyncio.AbstractEventLoop]] = {}
        """Waiters by queue. Empty if nobody waits, so that a notification costs nothing."""

    @contextlib.contextmanager
    def subscribe(self, queues: Sequence[str]) -> Iterator[asyncio.Event]:
        """Subscribe an event. Every notification of one of the queues sets it."""
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._lock:
            for queue in queues:
                self.waiters.setdefault(queue, {})[event] = loop
        try:
            yield event
        finally:
            with self._lock:
                for queue in queues:
                    del self.waiters[queue][event]
                    if not self.waiters[queue]:
                        del self.waiters[queue]

    def is_awaited(self, queue: str) -> bool:
        return queue in self.waiters

    def notify(self, queues: Iterable[str] | None = None) -> None:
        """Wake the waiters of these queues; None: of all queues. Something may have become runnable there."""
        here = asyncio._get_running_loop()
        with self._lock:
            names = self.waiters if queues is None else queues
            waiters = [waiter for name in names for waiter in self.waiters.get(name, {}).items()]
        for event, loop in waiters:
            if loop is here:
                event.set()
            else:
                # A loop that was closed under its waiter has no waiter left.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(event.set)


_shared: WeakValueDictionary[tuple[int, str], Notifications] = WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_notifications(store: str) -> Notifications:
    """Return the one registry of a store in this process, for all handles on it. A forked child has its own."""
    with _shared_lock:
        return _shared.setdefault((os.getpid(), store), Notifications())


async def keep_connected(listen: Callable[[], Awaitable[None]], on_lost: Callable[[], None]) -> None:
    """Run a listener again and again. It returns or raises when its connection breaks."""
    pause = _FIRST_PAUSE
    while True:
        try:
            await listen()
            pause = _FIRST_PAUSE
        except Exception as error:
            log.debug("a listener cannot connect: %s", error)
        on_lost()
        await asyncio.sleep(pause * (0.5 + random.random()))
        pause = min(pause * 2, _LONGEST_PAUSE)
