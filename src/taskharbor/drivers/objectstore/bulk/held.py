"""A synchronous hold on the store: whatever is open lives on the process's background loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from taskharbor.bulk import background
from taskharbor.bulk.contract import BulkStore
from taskharbor.drivers.objectstore.bulk.logs import Logs
from taskharbor.drivers.objectstore.options import options_of
from taskharbor.drivers.objectstore.places import parse_place
from taskharbor.drivers.objectstore.probe import probe
from taskharbor.drivers.objectstore.store import OpenStore

T = TypeVar("T")


class HeldStore(BulkStore):
    """Opens what is needed when it is needed: readers never write, so they get less. Each process opens its own."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.place = parse_place(url)
        self.options = options_of(self.place)
        self._logs: Logs | None = None
        self._writable: OpenStore | None = None

    def call(self, work: Callable[[Logs], Coroutine[Any, Any, T]]) -> T:
        """Run one coroutine on what a reader sees, and wait for it. From any thread, also below a running event loop."""
        return background.wait_for(work(self._read_logs()))

    def begin(self, work: Callable[[Logs], Coroutine[Any, Any, T]]) -> Future[T]:
        """The same without waiting: bytes come while the caller works on others."""
        return background.begin(work(self._read_logs()))

    def change(self, work: Callable[[OpenStore], Coroutine[Any, Any, T]]) -> T:
        """The same for those who write. Makes the store where there is none."""
        return background.wait_for(work(self._opened()))

    def _read_logs(self) -> Logs:
        if self._logs is None:

            async def opened() -> Logs:
                logs = Logs(self.place.open(), self.options.shards)
                try:
                    await logs.open()
                except BaseException:
                    await logs.close()
                    raise
                return logs

            self._logs = background.wait_for(opened())
        return self._logs

    def _opened(self) -> OpenStore:
        if self._writable is None:

            async def opened() -> OpenStore:
                store = OpenStore(self.place.open(), self.options, None)
                try:
                    await probe(store.blobs)
                    await store.open()
                except BaseException:
                    await store.close()
                    raise
                return store

            self._writable = background.wait_for(opened())
        return self._writable

    def close(self) -> None:
        logs, self._logs = self._logs, None
        store, self._writable = self._writable, None
        if logs is not None:
            background.wait_for(logs.close())
        if store is not None:
            background.wait_for(store.close())
        super().close()
