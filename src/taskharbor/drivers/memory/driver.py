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
from taskharbor.drivers.contract import (
    AttemptPage,
    Capabilities,
    Driver,
    Enqueued,
    Extension,
    JobFilter,
    Page,
    QueueSettings,
    QueueStats,
    Settlement,
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

    async def enqueue(
        self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False
    ) -> list[Enqueued]:
        with self._store.lock:
            return self._store.enqueue(records, now)

    async def reserve(
        self,
        queue: str,
        *,
        limit: int,
        lease_for: Micros,
        now: Micros,
        worker: str,
        types: Sequence[str] | None = None,
    ) -> list[JobRecord]:
        with self._store.lock:
            return self._store.reserve(queue, limit, lease_for, now, worker, types)

    async def extend_lease(
        self, extensions: Sequence[Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        with self._store.lock:
            return self._store.extend(extensions, lease_for, now)

    async def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        with self._store.lock:
            return self._store.settle(settlements, now)

    async def reclaim(self, *, now: Micros, queue: str | None = None, limit: int = 1000) -> int:
        with self._store.lock:
            return self._store.reclaim(now, queue, limit)

    # -- operating ----------------------------------------------------------------------------------------

    async def cancel(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        with self._store.lock:
            return self._store.cancel(job_ids, now)

    async def requeue(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        with self._store.lock:
            return self._store.requeue(job_ids, now)

    async def purge(self, selection: JobFilter, *, limit: int = 1000) -> int:
        with self._store.lock:
            return self._store.purge(selection, limit)

    async def prune(self, *, now: Micros, limit: int = 1000) -> int:
        with self._store.lock:
            return self._store.prune(now, limit)

    async def get(self, job_ids: Sequence[str], *, now: Micros) -> list[JobRecord | None]:
        with self._store.lock:
            return self._store.get(job_ids, now)

    async def list_jobs(
        self, selection: JobFilter, *, now: Micros, limit: int = 100, cursor: str | None = None
    ) -> Page:
        with self._store.lock:
            return self._store.list_jobs(selection, now, limit, cursor)

    async def stats(self, *, now: Micros, queue: str | None = None) -> list[QueueStats]:
        with self._store.lock:
            return self._store.stats(now, queue)

    async def configure(self, queue: str, settings: QueueSettings, *, now: Micros) -> None:
        with self._store.lock:
            self._store.configure(queue, settings)

    async def settings(self, queue: str) -> QueueSettings:
        with self._store.lock:
            return self._store.settings(queue)

    # -- history ------------------------------------------------------------------------------------------

    async def read_attempts(self, *, after: str | None = None, limit: int = 1000) -> AttemptPage:
        with self._store.lock:
            return self._store.read_attempts(after, limit)

    async def job_attempts(self, job_id: str) -> list[Attempt]:
        with self._store.lock:
            return self._store.job_attempts(job_id)

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
