"""A handle on a memory store: the contract's asynchronous face, and the waiting.

No operation awaits while it holds the store's lock, or at all except `wait`; so handles on any number of event loops
and threads can share a store, and a loop with virtual time drives it deterministically.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast

from msgspec.structs import astuple

from taskharbor.bulk.stage import NOTHING, unpack
from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, LogPage, LogState, LogStream
from taskharbor.drivers.memory.operating import MemoryStore
from taskharbor.drivers.waiting import Look, wait
from taskharbor.errors import InvalidRequest, JobError
from taskharbor.jobs import JobState, Micros

A = TypeVar("A")

_NAME = re.compile(r"[\w.-]*")

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryDriver(Driver):
    """`memory://` is a new private store, `memory://name` the one store of that name in this process.

    Closing a handle lets go of nothing: a named store outlives its last handle, so that a web application and a worker
    in one process may come and go. `MemoryDriver.drop(name)` is how a test gets rid of it.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        durable=False, multi_process=False, publishes_at_once=True
    )

    def __init__(self, store: MemoryStore | None = None, *, clock: Clock | None = None) -> None:
        """Everything that could differ between two runs can be injected: the clock here, tokens and ids in the store."""
        self._store = MemoryStore() if store is None else store
        self._clock: Clock = SystemClock() if clock is None else clock
        self._source = _Source(self._store)

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: str) -> Self:
        scheme, _, name = url.partition("://")
        if scheme != "memory" or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{url!r} is not a memory URL: write memory:// or memory://name "
                "(letters, digits, '_', '.', '-'); it takes no options"
            )
        if not name:
            return cls()
        with _named_lock:
            return cls(_named.setdefault(name, MemoryStore()))

    @staticmethod
    def drop(name: str) -> bool:
        """Forget the store of that name: the next `memory://name` is empty. Handles on the old one keep it."""
        with _named_lock:
            return _named.pop(name, None) is not None

    def clone(self) -> Self:
        return type(self)(self._store, clock=self._clock)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def time(self) -> Micros:
        return self._clock.now()

    # -- operations ---------------------------------------------------------------------------------------

    async def run(self, call: op.Operation[A]) -> A:
        if isinstance(call, op.Wait):
            return cast("A", await wait(self._source, call))
        run = _RUN.get(type(call))
        if run is None:
            return await super().run(call)
        with self._store.lock:
            answer: A = run(self._store, call)
            return answer

    # -- in bulk ------------------------------------------------------------------------------------------

    async def _log_streams(self, call: op.LogStreams) -> LogState:
        with self._store.lock:
            log = self._store.log
            stream = LogStream(name="", queue=None, last=log.last, trimmed=log.trimmed, is_dense=True)
            return LogState(self._store.store_id, [stream])

    async def _read_log(self, call: op.ReadLog) -> LogPage:
        with self._store.lock:
            rows, last = self._store.log.read(call.after, call.limit)
        found = [row for row in rows if row.seq <= call.until]
        return LogPage(found, last if len(found) == call.limit else call.until)

    async def _remove(self, call: op.Remove) -> list[JobState | JobError]:
        with self._store.lock:
            return self._store.remove(call.job_ids)

    async def _put_blob(self, call: op.PutBlob) -> bool:
        with self._store.lock:
            is_expected = not call.swaps or self._store.blobs.get(call.blob) == call.expected
            if is_expected:
                self._store.blobs[call.blob] = call.data
            return is_expected

    async def _read_blobs(self, call: op.ReadBlobs) -> list[bytes | None]:
        with self._store.lock:
            return [self._store.blobs.get(name) for name in call.names]

    async def _list_blobs(self, call: op.ListBlobs) -> list[str]:
        with self._store.lock:
            return sorted(name for name in self._store.blobs if name.startswith(f"{call.folder}/"))

    async def _drop_blobs(self, call: op.DropBlobs) -> list[None]:
        with self._store.lock:
            for name in call.names:
                self._store.blobs.pop(name, None)
        return [None] * len(call.names)

    async def _publish_blobs(self, call: op.PublishBlobs) -> dict[str, int]:
        with self._store.lock:
            jobs = [job for name in call.names for job in unpack(self._store.blobs.get(name, NOTHING))]
            return {"": self._store.publish(jobs, (call.series, call.number, call.portion), call.now)}


class _Source:
    """The queues of a store, for `waiting.wait`."""

    trusts_notifications = False

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.notifications = store.notifications

    def listen(self, queues: Sequence[str]) -> None:
        return None

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        store = self._store
        with store.lock:
            versions = [store.versions.get(queue, 0) for queue in queues]
            return Look.at(versions, version, store.next_due(queues, since))


_RUN: dict[type[op.Operation[Any]], Callable[[MemoryStore, Any], Any]] = {
    op.Enqueue: lambda store, call: store.enqueue(call.records, call.now),
    op.Reserve: lambda store, call: store.reserve(*astuple(call)),
    op.ExtendLease: lambda store, call: store.extend(*astuple(call)),
    op.Settle: lambda store, call: store.settle(*astuple(call)),
    op.Reclaim: lambda store, call: store.reclaim(*astuple(call)),
    op.Cancel: lambda store, call: store.cancel(*astuple(call)),
    op.Requeue: lambda store, call: store.requeue(*astuple(call)),
    op.Purge: lambda store, call: store.purge(*astuple(call)),
    op.Prune: lambda store, call: store.prune(*astuple(call)),
    op.Get: lambda store, call: store.get(*astuple(call)),
    op.ListJobs: lambda store, call: store.list_jobs(*astuple(call)),
    op.Stats: lambda store, call: store.stats(*astuple(call)),
    op.Configure: lambda store, call: store.configure(call.queue, call.settings),
    op.Settings: lambda store, call: store.settings(*astuple(call)),
    op.ReadAttempts: lambda store, call: store.read_attempts(*astuple(call)),
    op.JobAttempts: lambda store, call: store.job_attempts(*astuple(call)),
}
