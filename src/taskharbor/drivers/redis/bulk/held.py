"""A synchronous hold on the store: connections live on the process's background loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from taskharbor.bulk import background
from taskharbor.bulk.contract import BulkStore
from taskharbor.drivers.redis.connections import Connections
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import Store

T = TypeVar("T")


class HeldStore(BulkStore):
    """Connects at the first call and lets go with the store. Each process makes its own connections."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.options = parse_url(url)
        self._held: Store | None = None

    def call(self, work: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        """Run one coroutine with the open store and wait for it. From any thread, also below a running event loop."""
        return background.wait_for(work(self._opened()))

    def begin(self, work: Callable[[Store], Coroutine[Any, Any, T]]) -> Future[T]:
        """The same without waiting: the server works while the caller does."""
        return background.begin(work(self._opened()))

    def _opened(self) -> Store:
        if self._held is None:
            connections = Connections(self.options)
            background.wait_for(connections.open())
            self._held = Store(connections)
        return self._held

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            background.wait_for(held.connections.close())
        super().close()
