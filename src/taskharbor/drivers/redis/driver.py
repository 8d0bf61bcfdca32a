"""A handle on a Redis store: the contract's face. The work itself is done by scripts on the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ClassVar, Self, TypeVar

from taskharbor.bulk.publish import finish_left_behind
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import (
    Capabilities,
    Driver,
    Enqueued,
    JobShare,
    Woken,
)
from taskharbor.drivers.redis import bulk, inspect, log, operate, settle
from taskharbor.drivers.redis.blocking_claims import AnswerLost, BlockingClaims
from taskharbor.drivers.redis.client import Client
from taskharbor.drivers.redis.enqueue import enqueue
from taskharbor.drivers.redis.failure_queue import deliver
from taskharbor.drivers.redis.options import Options, parse_url
from taskharbor.drivers.redis.reserve import Claim, Claimed, Claimer, reserve
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.waiting import wait
from taskharbor.errors import BackendUnavailable, JobError, TaskHarborError
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros
from taskharbor.requests import new_token

A = TypeVar("A")

_FUNCTIONS: dict[type[op.Operation[Any]], Callable[[Store, Any], Any]] = {
    op.ExtendLease: op.by_fields(settle.extend_lease),
    op.Cancel: op.by_fields(operate.cancel),
    op.Requeue: op.by_fields(operate.requeue),
    op.Purge: op.by_fields(operate.purge),
    op.Configure: op.by_fields(operate.configure),
    op.Settings: op.by_fields(operate.settings_of),
    op.Get: op.by_fields(inspect.get),
    op.ListJobs: op.by_fields(inspect.list_jobs),
    op.Stats: op.by_fields(inspect.stats),
    op.ReadAttempts: op.by_fields(log.read_attempts),
    op.JobAttempts: op.by_fields(log.job_attempts),
    op.LogStreams: op.by_fields(bulk.log_streams),
    op.ReadLog: bulk.read_log,
    op.PutBlob: bulk.put_blob,
    op.ReadBlobs: op.by_fields(bulk.read_blobs),
    op.ListBlobs: op.by_fields(bulk.list_blobs),
    op.DropBlobs: op.by_fields(bulk.drop_blobs),
    op.PublishBlobs: bulk.publish_blobs,
}


class RedisDriver(Driver):
    """`redis://host:6379/0`; see `Options` for what may follow the question mark.

    Durability is the server's: what its append-only file has when the machine dies.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, multi_process=True)

    def __init__(self, options: Options) -> None:
        self.options = options
        self._client: Client | None = None
        self._open_store: Store | None = None
        self._blocking: BlockingClaims | None = None
        self._claimer = Claimer()
        self._giving_back: set[asyncio.Task[None]] = set()

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(parse_url(url))

    def clone(self) -> Self:
        return type(self)(self.options)

    async def open(self) -> None:
        if self._client is not None:
            return
        client = Client(self.options)
        await client.open()
        self._client = client
        self._open_store = store = Store(client)
        self._blocking = BlockingClaims(self.options, store, self.time)

    async def close(self) -> None:
        self._blocking = None
        if self._open_store is not None:
            await self._open_store.listener.close()
            # What is still under way needs it: jobs to be given back.
            await asyncio.gather(*self._giving_back, return_exceptions=True)
        client, self._client, self._open_store = self._client, None, None
        if client is not None:
            await client.close()

    @property
    def _store(self) -> Store:
        if self._open_store is None:
            raise BackendUnavailable(
                f"{self.options.place} is not open: await open() first, or use `async with`"
            )
        return self._open_store

    async def time(self) -> Micros:
        seconds, micros = await self._store.client.command("TIME")
        return int(seconds) * SECOND + int(micros)

    # -- producing and working ----------------------------------------------------------------------------

    async def _enqueue(self, call: op.Enqueue) -> list[Enqueued]:
        return await enqueue(self._store, call.records, call.now, new_ids=call.new_ids)

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        store, blocking = self._store, self._blocking
        assert blocking is not None
        queue = call.queue
        token, is_unclear = self._claimer.token(queue, call.worker)
        claim = _claim(call, token)
        try:
            claimed = await reserve(store, claim, is_unclear=is_unclear)
        except asyncio.CancelledError:
            self._take_back(claim)
            raise
        except BackendUnavailable:
            self._claimer.lose_answer(queue, call.worker, token)
            raise
        blocking.saw(claim, claimed)
        if claimed.moves >= 0 and call.types is None:
            store.listener.emptied[queue] = str(claimed.moves)
        await self._tell(claimed, queue)
        return claimed.jobs

    async def _reserve_next(self, call: op.Reserve, timeout: float) -> list[JobRecord] | None:
        blocking = self._blocking
        if blocking is None or self._claimer.is_unclear(call.queue, call.worker):
            return None
        claim = _claim(call, new_token())
        try:
            claimed = await blocking.claim(claim, timeout)
        except asyncio.CancelledError:
            self._take_back(claim)
            raise
        except AnswerLost:
            self._claimer.lose_answer(call.queue, call.worker, claim.token)
            return None
        if claimed is None:
            return None
        await self._tell(claimed, call.queue)
        return claimed.jobs

    def _take_back(self, claim: Claim) -> None:
        """The caller went away: whatever was leased would stall until the leases expire."""
        back = asyncio.ensure_future(self._give_back(claim))
        self._giving_back.add(back)
        back.add_done_callback(self._giving_back.discard)

    async def _tell(self, claimed: Claimed, queue: str) -> None:
        if claimed.untold:
            # Whoever moves jobs of this queue next will tell it; what was leased must not be lost for that.
            with contextlib.suppress(TaskHarborError):
                await deliver(self._store, queue)

    async def _give_back(self, claim: Claim) -> None:
        """The same claim once more, for no job: what the earlier try leased goes back, and if the server has yet to read that
        try, it comes to nothing."""
        with contextlib.suppress(TaskHarborError):
            await reserve(self._store, claim._replace(limit=0, types=None), is_unclear=True)

    async def _settle(self, call: op.Settle) -> list[JobError | None]:
        answers, untold = await settle.settle(self._store, call.settlements, call.now)
        await self._deliver(untold)
        return answers

    async def _reclaim(self, call: op.Reclaim) -> int:
        ended, untold = await operate.reclaim(self._store, call.now, call.queue, call.limit)
        await self._deliver(untold)
        return ended

    async def _deliver(self, queues: Iterable[str]) -> None:
        for queue in queues:
            await deliver(self._store, queue)

    # -- other operations ---------------------------------------------------------------------------------

    functions = _FUNCTIONS

    def _apply(
        self, function: Callable[..., Coroutine[Any, Any, A]], call: op.Operation[A]
    ) -> Coroutine[Any, Any, A]:
        return function(self._store, call)

    async def _split_log(self, call: op.SplitLog) -> list[int]:
        return await bulk.split_log(self._store, call)

    async def _split_jobs(self, call: op.SplitJobs) -> list[JobShare]:
        return await bulk.split_jobs(self._store, call)

    async def _prune(self, call: op.Prune) -> int:
        removed = await operate.prune(self._store, call.now, call.limit)
        # Nobody else may ever come by: a bulk write whose publisher died must not stay half done.
        await finish_left_behind(self, call.now)
        return removed

    # -- history ------------------------------------------------------------------------------------------

    # -- in bulk ------------------------------------------------------------------------------------------

    async def _remove(self, call: op.Remove) -> list[JobState | JobError]:
        return await bulk.remove(self._store, call.job_ids, await self.time())

    # -- waiting ------------------------------------------------------------------------------------------

    async def _wait(self, call: op.Wait) -> Woken:
        return await wait(self._store.listener, call)


def _claim(call: op.Reserve, token: str) -> Claim:
    return Claim(call.queue, call.limit, call.lease_for, call.now, call.worker, call.types, token)
