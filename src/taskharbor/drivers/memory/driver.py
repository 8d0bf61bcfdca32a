"""A handle on a memory store: the contract's asynchronous face, and the waiting.

No operation awaits while it holds the store's lock, or at all except `wait`; so handles on any number of event loops
and threads can share a store, and a loop with virtual time drives it deterministically.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

from taskharbor.bulk.stage import NOTHING, unpack
from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, LogPage, LogState, LogStream, Woken
from taskharbor.drivers.memory.operating import MemoryStore
from taskharbor.drivers.waiting import Look, wait
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Micros

A = TypeVar("A")

_NAME = re.compile(r"[\w.-]*")

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def _log_streams(store: MemoryStore, call: op.LogStreams) -> LogState:
    log = store.log
    stream = LogStream(name="", queue=None, last=log.last, trimmed=log.trimmed, is_dense=True)
    return LogState(store.store_id, [stream])


def _read_log(store: MemoryStore, call: op.ReadLog) -> LogPage:
    rows, last = store.log.read(call.after, call.limit)
    found = [row for row in rows if row.seq <= call.until]
    return LogPage(found, last if len(found) == call.limit else call.until)


def _put_blob(store: MemoryStore, call: op.PutBlob) -> bool:
    is_expected = not call.swaps or store.blobs.get(call.blob) == call.expected
    if is_expected:
        store.blobs[call.blob] = call.data
    return is_expected


def _drop_blobs(store: MemoryStore, call: op.DropBlobs) -> list[None]:
    for name in call.names:
        store.blobs.pop(name, None)
    return [None] * len(call.names)


def _publish_blobs(store: MemoryStore, call: op.PublishBlobs) -> dict[str, int]:
    jobs = [job for name in call.names for job in unpack(store.blobs.get(name, NOTHING))]
    return {"": store.publish(jobs, (call.series, call.number, call.portion), call.now)}


_FUNCTIONS: dict[type[op.Operation[Any]], Callable[[MemoryStore, Any], Any]] = {
    op.Enqueue: lambda store, call: store.enqueue(call.records, call.now),
    op.Reserve: op.by_fields(MemoryStore.reserve),
    op.ExtendLease: op.by_fields(MemoryStore.extend),
    op.Settle: op.by_fields(MemoryStore.settle),
    op.Reclaim: op.by_fields(MemoryStore.reclaim),
    op.Cancel: op.by_fields(MemoryStore.cancel),
    op.Requeue: op.by_fields(MemoryStore.requeue),
    op.Purge: op.by_fields(MemoryStore.purge),
    op.Prune: op.by_fields(MemoryStore.prune),
    op.Configure: lambda store, call: store.configure(call.queue, call.settings),
    op.Settings: op.by_fields(MemoryStore.settings),
    op.Get: op.by_fields(MemoryStore.get),
    op.ListJobs: op.by_fields(MemoryStore.list_jobs),
    op.Stats: op.by_fields(MemoryStore.stats),
    op.ReadAttempts: op.by_fields(MemoryStore.read_attempts),
    op.JobAttempts: op.by_fields(MemoryStore.job_attempts),
    op.LogStreams: _log_streams,
    op.ReadLog: _read_log,
    op.Remove: op.by_fields(MemoryStore.remove),
    op.PutBlob: _put_blob,
    op.ReadBlobs: lambda store, call: [store.blobs.get(name) for name in call.names],
    op.ListBlobs: lambda store, call: sorted(
        name for name in store.blobs if name.startswith(f"{call.folder}/")
    ),
    op.DropBlobs: _drop_blobs,
    op.PublishBlobs: _publish_blobs,
}


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

    functions = _FUNCTIONS

    async def _apply(self, function: Callable[..., A], call: op.Operation[A]) -> A:
        with self._store.lock:
            return function(self._store, call)

    async def _wait(self, call: op.Wait) -> Woken:
        return await wait(self._source, call)


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
