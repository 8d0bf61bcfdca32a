"""A caller of `wait`, for tests. It passes the text of a wait to the next one, as a worker does."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from taskharbor.drivers.contract import Driver


class Waits:
    """Keeps `seen` by queues. The first wait for some queues returns at once, woken."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._seen: dict[tuple[str, ...], str] = {}

    async def __call__(self, queues: Sequence[str], *, now: int, timeout: float) -> bool:
        key = tuple(queues)
        told = await self.driver.wait(queues, now=now, timeout=timeout, seen=self._seen.get(key))
        self._seen[key] = told.seen
        return told.woken


_of_handles: WeakKeyDictionary[Driver, Waits] = WeakKeyDictionary()


def waits_of(driver: Driver) -> Waits:
    """The one caller of a handle, for a test that has no more than one."""
    return _of_handles.setdefault(driver, Waits(driver))
