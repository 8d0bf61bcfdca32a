"""A private store for the time of a test, and the app's own back afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from taskharbor.clock import Clock, FakeClock, SystemClock
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.harbor import Harbor


class PrivateDriver(MemoryDriver):
    """A memory store that belongs to a test."""


def is_private(harbor: Harbor) -> bool:
    return isinstance(harbor._driver, PrivateDriver)


@contextmanager
def memory_store(harbor: Harbor, *, clock: Clock | None = None) -> Iterator[Harbor]:
    """Give the app an empty memory store; its own store, clients and clock come back at the end.

    Time stands still at the moment of the swap, so that delays can be stepped over (`harbor.clock`, or `drain` with
    `with_scheduled`). For time that flows, pass `clock=SystemClock()`.
    """
    ticking = FakeClock(SystemClock().now()) if clock is None else clock
    before = (harbor._driver, harbor._client, harbor._async_clients, harbor.clock)
    harbor._async_clients = weakref.WeakKeyDictionary()
    harbor.clock = ticking
    harbor.use(PrivateDriver(clock=ticking))
    try:
        yield harbor
    finally:
        harbor.close()
        harbor._driver, harbor._client, harbor._async_clients, harbor.clock = before
