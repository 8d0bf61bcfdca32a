"""A handle on an object store: the contract's calls, carried out by the engine on the shards of the jobs."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, ClassVar, Self, TypeVar, cast

from msgspec.structs import astuple, replace

from taskharbor.bulk.publish_staged import finish_left_behind
from taskharbor.bulk.stage import unpack
from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers import operations as op
from taskharbor.drivers import records as rec
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.engine import bulk, operate, reserve, settle
from taskharbor.drivers.engine import inspect as engine
from taskharbor.drivers.engine.dispatch import FUNCTIONS
from taskharbor.drivers.engine.repair import REPAIRED, set_aside
from taskharbor.drivers.engine.tables import Transaction, load
from taskharbor.drivers.objectstore import archive, inspect
from taskharbor.drivers.objectstore.archive import ARCHIVED, Segments
from taskharbor.drivers.objectstore.blobs import Blobs, Conflict, StoreTime, Unclear, probe
from taskharbor.drivers.objectstore.image import holding_jobs, take_numbers
from taskharbor.drivers.objectstore.leadership import Leadership
from taskharbor.drivers.objectstore.options import ObjectStoreOptions, parse_url
from taskharbor.drivers.objectstore.queue import Shard, Store, accept
from taskharbor.drivers.waiting import wait
from taskharbor.errors import (
    BackendUnavailable,
    InvalidRequest,
    JobError,
    JobFinished,
    JobNotDead,
    JobNotFound,
    JobNotInflight,
    TaskHarborError,
)
from taskharbor.jobs import JobRecord, JobState, Micros

A = TypeVar("A")

_PORTION = 1000
"""Archived jobs that a purge removes in one step."""
_TRIES = 6
_PAUSE = 0.05
_PLAIN, _ZLIB = b"\0", b"\1"
_SQL = load("image", __package__)

_ARCHIVED_ANSWERS: Mapping[type[op.Operation[Any]], Callable[[Any, JobRecord], Any]] = {
    op.ExtendLease: lambda extension, job: JobNotInflight(job.id),
    op.Settle: lambda settlement, job: settle.settle_ended(settlement, rec.STATE_NUMBERS[job.state]),
    op.CancelJobs: lambda _, job: job.state if job.state is JobState.CANCELLED else JobFinished(job.id),
    op.Requeue: lambda _, job: JobNotDead(job.id),
    op.Get: lambda _, job: job,
}
"""The answers of calls about a job that has moved into a segment. Such a job never changes."""


async def _by_id(store: Store, call: op.Operation[A]) -> A:
    """Carry out a call about single jobs, each in the shard that has it."""
    items, *rest = astuple(call)
    job_ids = [item if isinstance(item, str) else item.job_id for item in items]
    function = _get if isinstance(call, op.Get) else FUNCTIONS[type(call)]
    answer_archived = _ARCHIVED_ANSWERS[type(call)]

    async def ask(shard: Shard, at: list[int]) -> list[Any]:
        own, run = [items[one] for one in at], shard.change if call.changes else shard.look
        if isinstance(call, REPAIRED):
            run = partial(shard.change_mended, now=call.now)
        answers: list[Any] = await run(lambda transaction: function(transaction, own, *rest))
        lost = [answer.job_id for answer in answers if isinstance(answer, JobNotFound)]
        archived = await shard.archived(lost) if lost else {}
        for place, answer in enumerate(answers):
            if isinstance(answer, JobNotFound) and answer.job_id in archived:
                answers[place] = answer_archived(own[place], archived[answer.job_id])
        return answers

    found: Any = await store.by_id(job_ids, ask)
    if isinstance(call, op.Get):
        found = [None if isinstance(answer, JobNotFound) else answer for answer in found]
    return cast(A, found)


class ObjectStoreDriver(Driver):
    """`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///folder`, `mem://name`.

    Any number of handles and processes may work on one store directly. Every write depends on the version that was read, so
    nothing is lost, but they slow each other down. For many clients, a broker in front of the store is faster.
    """

    capabilities: ClassVar[rec.Capabilities] = rec.Capabilities(waits_by_requests=True)
    functions: ClassVar[Mapping[type[op.Operation[Any]], Callable[..., Any]]] = {
        **dict.fromkeys(_ARCHIVED_ANSWERS, _by_id),
        op.ListJobs: inspect.list_jobs,
        op.Stats: inspect.stats,
        op.ReadAttempts: inspect.read_attempts,
        op.JobAttempts: inspect.job_attempts,
        op.LogStreams: inspect.log_streams,
        op.ReadLog: inspect.read_log,
        op.SplitLog: inspect.split_log,
        op.SplitJobs: inspect.split_jobs,
        op.Wait: wait,
    }

    def __init__(
        self,
        open_blobs: Callable[[], Blobs],
        options: ObjectStoreOptions | None = None,
        *,
        clock: Clock | None = None,
        is_in_memory: bool = False,
    ) -> None:
        self._open_blobs = open_blobs
        self._options = ObjectStoreOptions() if options is None else options
        self._clock: Clock = SystemClock() if clock is None else clock
        self._is_in_memory = is_in_memory
        self._store: Store | None = None
        self._turn = 0
        """The shard with which the next reservation begins."""
        if is_in_memory:
            self.capabilities = rec.Capabilities(durable=False, multi_process=False)  # type: ignore[misc]

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: str) -> Self:
        parsed = parse_url(url)
        return cls(parsed.open, parsed.options, is_in_memory=parsed.is_in_memory)

    def clone(self) -> Self:
        return type(self)(self._open_blobs, self._options, clock=self._clock, is_in_memory=self._is_in_memory)

    async def open(self, *, reads_only: bool = False) -> None:
        if self._store is not None:
            return
        store = Store(self._open_blobs(), self._options, reads_only=reads_only)
        try:
            if not reads_only:
                await probe(store.blobs)
            await store.catalog.open(makes=not reads_only)
        except BaseException:
            await store.close()
            raise
        self._store = store
        self._time = StoreTime(store.blobs, self._clock)

    async def open_to_read(self) -> None:
        await self.open(reads_only=True)

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    @property
    def store(self) -> Store:
        if self._store is None:
            raise BackendUnavailable("this handle is not open: call open() first")
        return self._store

    async def _apply(self, function: Callable[..., Coroutine[Any, Any, A]], call: op.Operation[A]) -> A:
        return await function(self.store, call)

    async def time(self) -> Micros:
        """Return the store's time if it differs from this machine's by more than the resolution of a store's clock."""
        # Asking the store is a write.
        return self._clock.now() if self.store.reads_only else await self._time.now()

    # -- leading (for a broker) ---------------------------------------------------------------------------

    def candidate(self, *, url: str, term: float) -> Leadership:
        """Make a candidate for the leadership of the open store. `url`: the address for clients. `term`: the longest silence in
        seconds."""
        return Leadership(self.store, url=url, term=term)

    def expire_in_every_pass(self, clock: Callable[[], Micros] | None) -> None:
        """With every write, also end leases that have expired by this clock. Only for a leader: the clocks of others may
        differ."""
        self.store.expires_by = clock

    # -- producing ----------------------------------------------------------------------------------------

    async def _enqueue(self, call: op.Enqueue) -> list[rec.Enqueued]:
        store, records = self.store, call.records
        parts: dict[Shard, list[int]] = {}
        homes: dict[str, Shard] = {}
        for at, record in enumerate(records):
            shard = store.shard_of(record)
            if homes.setdefault(record.id, shard) is not shard:
                # The second queue must see an id that the first queue gets in the same batch.
                before = await self._enqueue(op.Enqueue(records[:at], call.now, call.new_ids))
                return before + await self._enqueue(op.Enqueue(records[at:], call.now))
            parts.setdefault(shard, []).append(at)
        for shard, part in parts.items():
            await shard.refuse_when_full([records[at] for at in part])
        await store.add_queues(parts)
        elsewhere = {} if call.new_ids else await store.known_elsewhere(homes)
        answers = {at: rec.Enqueued(record.id, True) for at, record in enumerate(records)}
        first = take_numbers(len(records))

        async def enqueue(shard: Shard, part: list[int]) -> None:
            part = [at for at in part if elsewhere.get(records[at].id, shard) is shard]
            if part:
                own, numbers = [records[at] for at in part], [first + at for at in part]
                made = await shard.enqueue(own, numbers, call.now)
                answers.update(zip(part, made, strict=True))

        await asyncio.gather(*(enqueue(*part) for part in parts.items()))
        return [answers[at] for at in range(len(records))]

    # -- working ------------------------------------------------------------------------------------------

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        shards = self.store.shards_of(call.queue)

        async def reserve_from(shard: Shard, limit: int) -> list[JobRecord]:
            place = shard.number, len(shards)
            jobs = await shard.change_mended(
                lambda transaction: reserve.reserve(
                    transaction, call.queue, limit, call.lease_for, call.now, call.worker, call.types, place
                ),
                call.now,
                is_claim=True,
            )
            self.store.note((job.id for job in jobs), shard)
            return jobs

        if len(shards) == 1:
            return await reserve_from(shards[0], call.limit)
        # Beginning elsewhere each time, so that no shard is starved; what came together is handed out in the queue's order.
        self._turn = (self._turn + 1) % len(shards)
        shards = shards[self._turn :] + shards[: self._turn]

        def has_work(transaction: Transaction) -> bool:
            return transaction.execute(_SQL["has_work"], {"now": call.now}).fetchone() is not None

        # Which of them are worth a change is seen of all of them at the same time.
        looks = await asyncio.gather(*(shard.look(has_work) for shard in shards), return_exceptions=True)
        found: list[JobRecord] = []
        errors = [look for look in looks if isinstance(look, BaseException)]
        for shard, look in zip(shards, looks, strict=True):
            if look is True and len(found) < call.limit:
                # A shard that fails keeps nobody from the jobs of the others, nor those that are leased by now.
                try:
                    found += await reserve_from(shard, call.limit - len(found))
                except TaskHarborError as error:
                    errors.append(error)
        if errors and not found:
            raise errors[0]
        # Ids of one producer follow the order in which it made them; between producers nothing is promised here.
        return sorted(found, key=lambda job: (-job.priority, job.run_at_us, job.id))

    async def _reclaim(self, call: op.Reclaim) -> int:
        def reclaim(shard: Shard, limit: int) -> Awaitable[int]:
            return shard.change_mended(
                lambda transaction: settle.reclaim(transaction, call.now, None, limit), call.now
            )

        return await self.store.change_each(call.queue, call.limit, reclaim)

    async def repair(self) -> list[str]:
        """Set aside jobs in the queues' objects that no call can load. Returns what was found."""
        now, found = await self.time(), list[str]()
        for shard in await self.store.shards():
            found += await shard.change(lambda transaction: set_aside(transaction, now, ended_too=True))
        return found

    # -- operating ----------------------------------------------------------------------------------------

    async def _cancel_keys(self, call: op.CancelKeys) -> list[int]:
        parts: dict[Shard, list[int]] = {}
        for at, key in enumerate(call.keys):
            parts.setdefault(self.store.shard_for(call.queue, key), []).append(at)
        counts: dict[int, int] = {}

        async def cancel(shard: Shard, part: list[int]) -> None:
            own = replace(call, keys=[call.keys[at] for at in part])
            made = await shard.change(lambda transaction: operate.cancel_keys(transaction, *astuple(own)))
            counts.update(zip(part, made, strict=True))

        await asyncio.gather(*(cancel(*part) for part in parts.items()))
        return [counts[at] for at in range(len(call.keys))]

    async def _configure(self, call: op.Configure) -> None:
        number, most = self.store.catalog.shards, call.settings.max_inflight
        names_it = call.fields is None or "max_inflight" in call.fields
        if names_it and most is not None and most < number:
            raise InvalidRequest(
                f"max_inflight={most} cannot be shared by {number} shards, each of which needs one at least: "
                f"allow {number} or more, or keep this queue in a store without shards"
            )
        shards = self.store.shards_of(call.queue)
        await self.store.add_queues(shards)

        def configure(transaction: Transaction) -> None:
            operate.configure(transaction, *astuple(call))

        await asyncio.gather(*(shard.change(configure) for shard in shards))

    async def _settings(self, call: op.Settings) -> rec.QueueSettings:
        first, *_ = self.store.shards_of(call.queue)
        return await first.look(lambda transaction: engine.settings(transaction, call.queue))

    async def _prune(self, call: op.Prune) -> int:
        jobs = rows = 0

        async def prune(shard: Shard, _: int) -> int:
            nonlocal jobs, rows
            left = call.limit - jobs, call.limit - rows
            some_jobs, some_rows = await shard.change_with(
                lambda transaction: archive.due(transaction, call.now),
                lambda transaction, segments: archive.prune(transaction, segments, call.now, *left),
            )
            jobs += some_jobs
            rows += some_rows
            return some_jobs + some_rows

        removed = await self.store.change_each(None, call.limit, prune)
        # Nobody else may ever come by: a bulk write whose publisher died must not stay half done.
        await finish_left_behind(self, call.now)
        return removed

    async def _purge(self, call: op.Purge) -> int:
        selection = call.selection
        ended = ARCHIVED if selection.states is None else ARCHIVED & selection.states
        archived = replace(selection, states=ended)

        async def purge(shard: Shard, limit: int) -> int:
            removed = await shard.change(lambda transaction: operate.purge(transaction, selection, limit))
            while ended and removed < limit:
                portion = min(limit - removed, _PORTION)
                found = await inspect.list_shard(shard, archived, 0, portion)
                if not found:
                    break
                answers = await shard.remove([job.id for _, job in found])
                removed += sum(isinstance(answer, JobState) for answer in answers)
            return removed

        return await self.store.change_each(selection.queue, call.limit, purge)

    async def _remove(self, call: op.Remove) -> list[JobState | JobError]:
        return await self.store.by_id(
            call.job_ids, lambda shard, at: shard.remove([call.job_ids[one] for one in at])
        )

    # -- blobs --------------------------------------------------------------------------------------------

    async def _put_blob(self, call: op.PutBlob) -> bool:
        blobs, name, data = self.store.blobs, call.blob, call.data
        stored = _ZLIB + await asyncio.to_thread(zlib.compress, data, 1) if blobs.is_remote else _PLAIN + data
        if not call.swaps:
            await blobs.put(name, stored)
            return True
        for tries in range(_TRIES):
            found = await blobs.read(name)
            held = None if found is None else _plain(found.data)
            if held != call.expected:
                # An earlier try of this loop may have landed.
                return tries > 0 and held == data
            try:
                await blobs.write(name, stored, None if found is None else found.version)
                return True
            except (Conflict, Unclear):
                await asyncio.sleep(_PAUSE * 2**tries)
        raise BackendUnavailable(f"{blobs.where(name)} could not be written: nothing certain was heard of it")

    async def _read_blobs(self, call: op.ReadBlobs) -> list[bytes | None]:
        found = await asyncio.gather(*map(self.store.blobs.read, call.names))
        return [None if blob is None else _plain(blob.data) for blob in found]

    async def _list_blobs(self, call: op.ListBlobs) -> list[str]:
        return await self.store.blobs.names(call.folder)

    async def _drop_blobs(self, call: op.DropBlobs) -> list[None]:
        await self.store.blobs.delete(call.names)
        return [None] * len(call.names)

    async def _check_room(self, call: op.CheckRoom) -> None:
        for shard in self.store.shards_of(call.queue):
            await shard.look(lambda transaction: None)
            shard.check_room(call.size // self.store.catalog.shards)

    async def _publish_blobs(self, call: op.PublishBlobs) -> dict[str, int]:
        """One change of each queue's image, with the note that it was made: so a portion that is published again adds nothing,
        not even jobs that were merged into another by their key. Ids are made by the tasks that stage, so other queues are not
        asked."""
        blobs = await self._read_blobs(op.ReadBlobs(call.names))
        jobs = [job for data in blobs if data is not None for job in unpack(data)]
        first = take_numbers(max(1, len(jobs)))
        parts: dict[Shard, list[int]] = {}
        for at, job in enumerate(jobs):
            parts.setdefault(self.store.shard_of(job), []).append(at)
        await self.store.add_queues(parts)

        async def publish(shard: Shard, part: list[int]) -> int:
            records, numbers = [jobs[at] for at in part], [first + at for at in part]

            def add(transaction: Transaction, segments: Segments) -> int:
                shard.check_room(sum(len(record.payload) for record in records))
                answers = accept(transaction, segments, records, numbers, call.now)
                return sum(not answer.existed for answer in answers)

            return await shard.change_with(
                lambda transaction: holding_jobs(transaction, [record.id for record in records]),
                lambda transaction, segments: bulk.publish_once(
                    transaction, call, lambda: add(transaction, segments)
                ),
            )

        totals = await asyncio.gather(*(publish(*part) for part in parts.items()))
        return {shard.name: total for shard, total in zip(parts, totals, strict=True)}


def _get(transaction: Transaction, job_ids: list[str], now: Micros) -> list[JobRecord | JobNotFound]:
    found = engine.get(transaction, job_ids, now)
    return [job or JobNotFound(job_id) for job_id, job in zip(job_ids, found, strict=True)]


def _plain(stored: bytes) -> bytes:
    return zlib.decompress(memoryview(stored)[1:]) if stored[:1] == _ZLIB else stored[1:]
