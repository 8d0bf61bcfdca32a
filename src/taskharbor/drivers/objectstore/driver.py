"""A handle on an object store: the contract's calls, each handed on to where it is done."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Self, TypeVar

from taskharbor.bulk.publish import finish_left_behind
from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, JobShare, Woken
from taskharbor.drivers.objectstore import enqueue, inspect, leases, retention
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import Term
from taskharbor.drivers.objectstore.catalog import Catalog
from taskharbor.drivers.objectstore.places import Options, options_of, parse_place, probe
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.drivers.waiting import wait
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import Micros

A = TypeVar("A")

_FUNCTIONS: dict[type[op.Operation[Any]], Callable[[OpenStore, Any], Any]] = {
    op.Enqueue: op.by_fields(enqueue.enqueue),
    op.Reserve: op.by_fields(leases.reserve),
    op.ExtendLease: op.by_fields(leases.extend),
    op.Settle: op.by_fields(leases.settle),
    op.Reclaim: op.by_fields(leases.reclaim),
    op.Cancel: op.by_fields(leases.cancel),
    op.Requeue: op.by_fields(leases.requeue),
    op.Purge: op.by_fields(retention.purge),
    op.Configure: lambda store, call: leases.configure(store, call.queue, call.settings),
    op.Settings: op.by_fields(inspect.settings),
    op.Get: op.by_fields(inspect.get),
    op.ListJobs: op.by_fields(inspect.list_jobs),
    op.Stats: op.by_fields(inspect.stats),
    op.ReadAttempts: op.by_fields(inspect.read_attempts),
    op.JobAttempts: op.by_fields(inspect.job_attempts),
    op.LogStreams: op.by_fields(inspect.log_streams),
    op.ReadLog: inspect.read_log,
    op.Remove: op.by_fields(retention.remove_jobs),
    op.PutBlob: enqueue.put_blob,
    op.ReadBlobs: op.by_fields(enqueue.read_blobs),
    op.PublishBlobs: enqueue.publish_blobs,
}


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
        store = OpenStore(
            self._open_blobs(), self._options, self._clock, enqueue.deliver, reads_only=reads_only
        )
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

    # -- operations ---------------------------------------------------------------------------------------

    functions = _FUNCTIONS

    def _apply(
        self, function: Callable[..., Coroutine[Any, Any, A]], call: op.Operation[A]
    ) -> Coroutine[Any, Any, A]:
        return function(self.open_store, call)

    async def _split_log(self, call: op.SplitLog) -> list[int]:
        return await inspect.split_log(self.open_store, call)

    async def _split_jobs(self, call: op.SplitJobs) -> list[JobShare]:
        return await inspect.split_jobs(self.open_store, call)

    async def _check_room(self, call: op.CheckRoom) -> None:
        await enqueue.check_room(self.open_store, call)

    async def _list_blobs(self, call: op.ListBlobs) -> list[str]:
        return await self.open_store.blobs.names(call.folder)

    async def _drop_blobs(self, call: op.DropBlobs) -> list[None]:
        await self.open_store.blobs.delete(call.names)
        return [None] * len(call.names)

    async def _prune(self, call: op.Prune) -> int:
        removed = await retention.prune(self.open_store, call.now, call.limit)
        # Nobody else may ever come by: a bulk write whose publisher died must not stay half done.
        await finish_left_behind(self, call.now)
        return removed

    async def _wait(self, call: op.Wait) -> Woken:
        return await wait(self.open_store, call)
