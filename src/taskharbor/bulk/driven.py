"""A synchronous hold on an asynchronous driver, for the generic store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from taskharbor.bulk.contract import BulkStore
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.registry import connect
from taskharbor.portal import portal

T = TypeVar("T")


class DriverBacked(BulkStore):
    """Opens the driver at the first call, on the process's background loop, and closes it with the store."""

    def __init__(self, url: str, driver: Driver | None = None) -> None:
        super().__init__(url)
        self._driver = connect(url) if driver is None else driver
        self._is_open = False

    def call(self, work: Callable[[Driver], Coroutine[Any, Any, T]]) -> T:
        """Run one coroutine with the open driver and wait for it. From any thread, also below a running event loop."""
        if not self._is_open:
            portal().call(self._driver.open())
            self._is_open = True
        return portal().call(work(self._driver))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            portal().call(self._driver.close())
        super().close()
