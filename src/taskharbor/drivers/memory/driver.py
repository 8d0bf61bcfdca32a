"""A handle on a memory store: the contract's asynchronous face, and the waiting.

No operation awaits while it holds the store's lock, or at all except `wait`; so handles on any number of event loops
and threads can share a store, and a loop with virtual time drives it deterministically.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from typing import ClassVar, Self

from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import (
    AttemptPage,
    Capabilities,
    Driver,
    Enqueued,
    Page,
    QueueSettings,
    QueueStats,
)
from taskharbor.drivers.memory.bell import Waiter
from taskharbor.drivers.memory.operating import MemoryStore
from taskharbor.errors import InvalidRequest, JobError
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Lease, Micros

_NAME = re.compile(r"[\w.-]*")

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryDriver(Driver):
    """`memory://` is a new private store, `memory://name` the one store of that name in this process.

    Closing a handle lets go of nothing: a named store outlives its last handle, so that a web application and a worker
    in one process may come and go. `MemoryDriver.drop(name)` is how a test gets rid of it.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(durable=False, multi_process=False)

    def __init__(self, store: MemoryStore | None = None, *, clock: Clock | None = None) -> None:
        """Everything that could differ between two runs can be injected: the clock here, tokens and ids in the store."""
        self._store = MemoryStore() if store is None else store
        self._clock: Clock = SystemClock() if clock is None else clock
        self._seen: dict[str, int] = {}
        """Per queue, how far this handle's waits have seen the store's bell."""

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

    # -- producing and working ----------------------------------------------------------------------------

    async def _enqueue(self, call: op.Enqueue) -> list[Enqueued]:
        with self._store.lock:
            return self._store.enqueue(call.records, call.now)

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        with self._store.lock:
            return self._store.reserve(
                call.queue, call.limit, call.lease_for, call.now, call.worker, call.types
            )

    async def _extend_lease(self, call: op.ExtendLease) -> list[Lease | JobError]:
        with self._store.lock:
            return self._store.extend(call.extensions, call.lease_for, call.now)

    async def _settle(self, call: op.Settle) -> list[JobError | None]:
        with self._store.lock:
            return self._store.settle(call.settlements, call.now)

    async def _reclaim(self, call: op.Reclaim) -> int:
        with self._store.lock:
            return self._store.reclaim(call.now, call.queue, call.limit)

    # -- operating ----------------------------------------------------------------------------------------

    async def _cancel(self, call: op.Cancel) -> list[JobState | JobError]:
        with self._store.lock:
            return self._store.cancel(call.job_ids, call.now)

    async def _requeue(self, call: op.Requeue) -> list[JobState | JobError]:
        with self._store.lock:
            return self._store.requeue(call.job_ids, call.now)

    async def _purge(self, call: op.Purge) -> int:
        with self._store.lock:
            return self._store.purge(call.selection, call.limit)

    async def _prune(self, call: op.Prune) -> int:
        with self._store.lock:
            return self._store.prune(call.now, call.limit)

    async def _get(self, call: op.Get) -> list[JobRecord | None]:
        with self._store.lock:
            return self._store.get(call.job_ids, call.now)

    async def _list_jobs(self, call: op.ListJobs) -> Page:
        with self._store.lock:
            return self._store.list_jobs(call.selection, call.now, call.limit, call.cursor)

    async def _stats(self, call: op.Stats) -> list[QueueStats]:
        with self._store.lock:
            return self._store.stats(call.now, call.queue)

    async def _configure(self, call: op.Configure) -> None:
        with self._store.lock:
            self._store.configure(call.queue, call.settings)

    async def _settings(self, call: op.Settings) -> QueueSettings:
        with self._store.lock:
            return self._store.settings(call.queue)

    # -- history ------------------------------------------------------------------------------------------

    async def _read_attempts(self, call: op.ReadAttempts) -> AttemptPage:
        with self._store.lock:
            return self._store.read_attempts(call.after, call.limit)

    async def _job_attempts(self, call: op.JobAttempts) -> list[Attempt]:
        with self._store.lock:
            return self._store.job_attempts(call.job_id)

    # -- waiting ------------------------------------------------------------------------------------------

    async def wait(self, queues: Sequence[str], *, now: Micros, timeout: float) -> bool:
        store, seen = self._store, self._seen
        waiter = Waiter()
        with store.lock:
            before = {queue: seen.get(queue, 0) for queue in queues}
            is_rung = store.bell.versions(queues) != before
            due = store.next_due(queues)
            if not is_rung:
                store.bell.enter(waiter, queues)
        comes_due = due is not None and due - now <= timeout * SECOND
        if is_rung:
            # A loop of waits that never have to wait must still let others run.
            await asyncio.sleep(0)
        else:
            try:
                delay = (due - now) / SECOND if due is not None and comes_due else timeout
                await asyncio.wait((waiter.future,), timeout=max(delay, 0.0))
            finally:
                with store.lock:
                    store.bell.leave(waiter, queues)
        # Only a wait that returns has seen anything; and a ring may have come while the time-out fired.
        with store.lock:
            after = store.bell.versions(queues)
            seen.update(after)
        return comes_due or after != before
