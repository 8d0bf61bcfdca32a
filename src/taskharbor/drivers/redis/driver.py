"""A handle on a Redis store: the contract's face. The work itself is done by functions on the server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Self, TypeVar

from taskharbor.bulk.publish import finish_left_behind
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, Enqueued, JobShare, Woken
from taskharbor.drivers.redis import enqueue, inspect, leases, log, operate
from taskharbor.drivers.redis.listener import Listener
from taskharbor.drivers.redis.options import Options, parse_url
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.waiting import wait
from taskharbor.errors import BackendUnavailable, JobError
from taskharbor.jobs import JobRecord, Micros

A = TypeVar("A")


class RedisDriver(Driver):
    """`redis://host:6379/0`; see `Options` for what may follow the question mark.

    Durability is the server's: what its append-only file has when the machine dies.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, multi_process=True)

    def __init__(self, options: Options) -> None:
        self.options = options
        self._open_store: Store | None = None
        self._listener: Listener
        self._claims: leases.Claims

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(parse_url(url))

    def clone(self) -> Self:
        return type(self)(self.options)

    async def open(self) -> None:
        if self._open_store is None:
            store = Store(self.options)
            await store.open()
            self._listener = Listener(store)
            self._claims = leases.Claims(store, self._listener.emptied)
            self._open_store = store

    async def close(self) -> None:
        store, self._open_store = self._open_store, None
        if store is not None:
            await self._listener.close()
            await self._claims.close()
            await store.close()

    @property
    def _store(self) -> Store:
        if self._open_store is None:
            raise BackendUnavailable(
                f"{self.options.place} is not open: await open() first, or use `async with`"
            )
        return self._open_store

    async def time(self) -> Micros:
        return await self._store.time()

    functions: ClassVar[dict[type[op.Operation[Any]], Callable[..., Any]]] = {
        op.ExtendLease: op.by_fields(leases.extend_lease),
        op.Reclaim: op.by_fields(operate.reclaim),
        op.Cancel: op.by_fields(operate.cancel),
        op.Requeue: op.by_fields(operate.requeue),
        op.Purge: op.by_fields(operate.purge),
        op.Remove: op.by_fields(operate.remove),
        op.Configure: op.by_fields(operate.configure),
        op.Settings: op.by_fields(operate.settings_of),
        op.Get: op.by_fields(inspect.get),
        op.ListJobs: op.by_fields(inspect.list_jobs),
        op.Stats: op.by_fields(inspect.stats),
        op.ReadAttempts: op.by_fields(log.read_attempts),
        op.JobAttempts: op.by_fields(log.job_attempts),
        op.LogStreams: op.by_fields(log.log_streams),
        op.ReadLog: op.by_fields(log.read_log),
        op.PutBlob: enqueue.put_blob,
        op.ReadBlobs: op.by_fields(enqueue.read_blobs),
        op.ListBlobs: op.by_fields(enqueue.list_blobs),
        op.DropBlobs: op.by_fields(enqueue.drop_blobs),
        op.PublishBlobs: enqueue.publish_blobs,
    }

    def _apply(
        self, function: Callable[..., Coroutine[Any, Any, A]], call: op.Operation[A]
    ) -> Coroutine[Any, Any, A]:
        return function(self._store, call)

    async def _enqueue(self, call: op.Enqueue) -> list[Enqueued]:
        return await enqueue.enqueue(self._store, call.records, call.now, new_ids=call.new_ids)

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        assert self._store
        return await self._claims.reserve(call)

    async def _reserve_next(self, call: op.Reserve, timeout: float) -> list[JobRecord] | None:
        return None if self._open_store is None else await self._claims.reserve_next(call, timeout)

    async def _settle(self, call: op.Settle) -> list[JobError | None]:
        return await leases.settle(self._store, call.settlements, call.now)

    async def _split_log(self, call: op.SplitLog) -> list[int]:
        return await log.split_log(self._store, call.stream, call.after, call.until, call.rows)

    async def _split_jobs(self, call: op.SplitJobs) -> list[JobShare]:
        return await inspect.split_jobs(self._store, call.queue, call.parts)

    async def _prune(self, call: op.Prune) -> int:
        removed = await operate.prune(self._store, call.now, call.limit)
        # Nobody else may ever come by: a bulk write whose publisher died must not stay half done.
        await finish_left_behind(self, call.now)
        return removed

    async def _wait(self, call: op.Wait) -> Woken:
        return await wait(self._listener, call)
