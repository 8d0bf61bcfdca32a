"""A handle on an object store: the contract's calls, each handed on to where it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import (
    AttemptPage,
    Capabilities,
    Driver,
    Enqueued,
    JobShare,
    LogPage,
    LogState,
    Page,
    QueueSettings,
    QueueStats,
    Woken,
)
from taskharbor.drivers.objectstore import bulk, enqueue, inspect, leased, log, operate
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.catalog import Catalog
from taskharbor.drivers.objectstore.cell import Term
from taskharbor.drivers.objectstore.options import Options, options_of
from taskharbor.drivers.objectstore.places import parse_place
from taskharbor.drivers.objectstore.probe import probe
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.drivers.waiting import wait
from taskharbor.errors import BackendUnavailable, JobError
from taskharbor.jobs import Attempt, JobRecord, JobState, Lease, Micros


class ObjectStoreDriver(Driver):
    """`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///folder`, `mem://name`.

    Several handles, in any number of processes, may work on one store directly: every write depends on the version that was
    read, so nothing is lost, and they slow each other down. A broker in front of the store is the fast way for many.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(
        self,
        open_blobs: Callable[[], Blobs],
        options: Options | None = None,
        *,
        clock: Clock | None = None,
        is_in_memory: bool = False,
    ) -> None:
        self._open_blobs = open_blobs
        self._options = Options() if options is None else options
        self._clock: Clock = SystemClock() if clock is None else clock
        self._is_in_memory = is_in_memory
        self._open: OpenStore | None = None
        if is_in_memory:
            self.capabilities = Capabilities(durable=False, multi_process=False)  # type: ignore[misc]

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: str) -> Self:
        place = parse_place(url)
        return cls(place.open, options_of(place), is_in_memory=place.scheme == "mem")

    def clone(self) -> Self:
        return type(self)(self._open_blobs, self._options, clock=self._clock, is_in_memory=self._is_in_memory)

    async def open(self) -> None:
        await self._open_store(reads_only=False)

    async def open_to_read(self) -> None:
        await self._open_store(reads_only=True)

    async def _open_store(self, *, reads_only: bool) -> None:
        if self._open is not None:
            return
        store = OpenStore(self._open_blobs(), self._options, self._clock, reads_only=reads_only)
        try:
            if not reads_only:
                await probe(store.blobs)
            await store.open()
        except BaseException:
            await store.close()
            raise
        self._open = store

    async def close(self) -> None:
        store, self._open = self._open, None
        if store is not None:
            await store.close()

    @property
    def open_store(self) -> OpenStore:
        """What is behind an open handle, for those who read by the million."""
        if self._open is None:
            raise BackendUnavailable("this handle is not open: call open() first")
        return self._open

    async def time(self) -> Micros:
        """The store's, where it differs from this machine's by more than can be told."""
        store = self.open_store
        # To ask the store is a write.
        return self._clock.now() if store.reads_only else await store.time.now()

    # -- leading (for a broker) ---------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        return self.open_store.catalog

    def lead(self, term: Term | None) -> None:
        """Write under this term from now on, and believe what is in memory as long as it is valid."""
        self.open_store.lead(term)

    def compare_soon(self) -> None:
        """Look at the objects once before answering from memory again: others may write to them as well."""
        self.open_store.compare_soon()

    def expire_in_every_pass(self, clock: Callable[[], Micros] | None) -> None:
        """With every write, also end what is over by this clock. Only for who leads: others' clocks may differ."""
        self.open_store.every_pass_at = clock

    # -- producing and working ----------------------------------------------------------------------------

    async def _enqueue(self, call: op.Enqueue) -> list[Enqueued]:
        return await enqueue.enqueue(self.open_store, call.records, call.now, call.new_ids)

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        return await leased.reserve(
            self.open_store, call.queue, call.limit, call.lease_for, call.now, call.worker, call.types
        )

    async def _extend_lease(self, call: op.ExtendLease) -> list[Lease | JobError]:
        return await leased.extend(self.open_store, call.extensions, call.lease_for, call.now)

    async def _settle(self, call: op.Settle) -> list[JobError | None]:
        return await leased.settle(self.open_store, call.settlements, call.now)

    async def _reclaim(self, call: op.Reclaim) -> int:
        return await leased.reclaim(self.open_store, call.now, call.queue, call.limit)

    # -- operating ----------------------------------------------------------------------------------------

    async def _cancel(self, call: op.Cancel) -> list[JobState | JobError]:
        return await operate.cancel(self.open_store, call.job_ids, call.now)

    async def _requeue(self, call: op.Requeue) -> list[JobState | JobError]:
        return await operate.requeue(self.open_store, call.job_ids, call.now)

    async def _purge(self, call: op.Purge) -> int:
        return await operate.purge(self.open_store, call.selection, call.limit)

    async def _prune(self, call: op.Prune) -> int:
        return await operate.prune(self.open_store, call.now, call.limit)

    async def _get(self, call: op.Get) -> list[JobRecord | None]:
        return await inspect.get(self.open_store, call.job_ids, call.now)

    async def _list_jobs(self, call: op.ListJobs) -> Page:
        return await inspect.list_jobs(self.open_store, call.selection, call.now, call.limit, call.cursor)

    async def _stats(self, call: op.Stats) -> list[QueueStats]:
        return await inspect.stats(self.open_store, call.now, call.queue)

    async def _configure(self, call: op.Configure) -> None:
        await operate.configure(self.open_store, call.queue, call.settings)

    async def _settings(self, call: op.Settings) -> QueueSettings:
        return await inspect.settings(self.open_store, call.queue)

    # -- history ------------------------------------------------------------------------------------------

    async def _read_attempts(self, call: op.ReadAttempts) -> AttemptPage:
        return await log.read_attempts(self.open_store, call.after, call.limit)

    async def _job_attempts(self, call: op.JobAttempts) -> list[Attempt]:
        return await log.job_attempts(self.open_store, call.job_id)

    # -- in bulk ------------------------------------------------------------------------------------------

    async def _log_streams(self, call: op.LogStreams) -> LogState:
        return await bulk.log_streams(self.open_store)

    async def _read_log(self, call: op.ReadLog) -> LogPage:
        return await bulk.read_log(self.open_store, call)

    async def _split_log(self, call: op.SplitLog) -> list[int]:
        return await bulk.split_log(self.open_store, call)

    async def _split_jobs(self, call: op.SplitJobs) -> list[JobShare]:
        return await bulk.split_jobs(self.open_store, call)

    async def _remove(self, call: op.Remove) -> list[JobState | JobError]:
        return await bulk.remove(self.open_store, call.job_ids)

    async def _put_blob(self, call: op.PutBlob) -> bool:
        return await bulk.put_blob(self.open_store, call)

    async def _read_blobs(self, call: op.ReadBlobs) -> list[bytes | None]:
        return await bulk.read_blobs(self.open_store, call.names)

    async def _list_blobs(self, call: op.ListBlobs) -> list[str]:
        return await self.open_store.blobs.names(call.folder)

    async def _drop_blobs(self, call: op.DropBlobs) -> list[None]:
        await self.open_store.blobs.delete(call.names)
        return [None] * len(call.names)

    async def _check_room(self, call: op.CheckRoom) -> None:
        await bulk.check_room(self.open_store, call)

    async def _publish_blobs(self, call: op.PublishBlobs) -> dict[str, int]:
        return await bulk.publish_blobs(self.open_store, call)

    # -- waiting ------------------------------------------------------------------------------------------

    async def _wait(self, call: op.Wait) -> Woken:
        return await wait(self.open_store, call)
