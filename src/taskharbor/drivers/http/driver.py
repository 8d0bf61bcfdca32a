"""A handle on a store behind a broker: the contract's face. The broker calls the same methods on a driver of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Self, TypeVar

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
from taskharbor.drivers.http import protocol as wire
from taskharbor.drivers.http.brokers import Brokers
from taskharbor.drivers.http.claims import Claims
from taskharbor.drivers.http.item_errors import join_errors
from taskharbor.drivers.http.options import Options, parse_url
from taskharbor.drivers.http.settlements import Settlements
from taskharbor.errors import BackendUnavailable, InvalidRequest, JobError, SchemaMismatch, TaskHarborError
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Lease, Micros

T = TypeVar("T")

_LONGEST_POLL = 25.0
"""Seconds that a wait is silent. What stands between a client and a broker cuts connections that are silent for longer."""
_MOST_QUEUE_SETS = 256
_NOTHING = wire.encode_call(wire.NoArguments())


class HttpDriver(Driver):
    """`http://127.0.0.1:7433` or `https://token@jobs.example.com`; see `Options` for what may follow the question mark.

    Durability is that of the store behind the broker.
    """

    # What may be behind a broker. The handle knows better once it is open.
    capabilities: ClassVar[Capabilities] = Capabilities(
        durable=True, multi_process=True, passes_over_busy=True
    )

    def __init__(self, options: Options) -> None:
        self.options = options
        self._brokers = Brokers(options)
        self._claims = Claims()
        self._hello: wire.Hello | None = None
        self._seen: dict[tuple[str, ...], str] = {}
        """By queues that were waited for, what the last wait for them was told."""
        self._giving_back: set[asyncio.Task[None]] = set()

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(parse_url(url))

    def clone(self) -> Self:
        return type(self)(self.options)

    async def open(self) -> None:
        if self._hello is not None:
            return
        await self._brokers.open()
        try:
            hello = await self._brokers.ask(wire.HELLO, _NOTHING)
            if hello.version != wire.VERSION:
                raise SchemaMismatch(
                    f"the broker at {self.options.place} speaks version {hello.version} of the driver protocol, this driver "
                    f"version {wire.VERSION}: use the same version of TaskHarbor at both ends"
                )
        except BaseException:
            await self._brokers.close()
            raise
        self._hello = hello
        # A broker shares its store with all its clients, whatever the store could do without it.
        self.__dict__["capabilities"] = Capabilities(
            durable=hello.capabilities.durable,
            multi_process=True,
            passes_over_busy=hello.capabilities.passes_over_busy,
        )

    async def close(self) -> None:
        if self._hello is None:
            return
        # What is still under way needs the connections: jobs to be given back.
        await asyncio.gather(*self._giving_back, return_exceptions=True)
        self._hello = None
        await self._brokers.close()

    async def time(self) -> Micros:
        return await self._brokers.ask(wire.TIME, _NOTHING)

    # -- producing and working ----------------------------------------------------------------------------

    async def enqueue(
        self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False
    ) -> list[Enqueued]:
        if not records:
            return []
        call = wire.EnqueueCall(list(records), now)
        # A first try that reaches one broker after a second one reached another must still be recognised.
        call.new_ids = new_ids and len(self.options.bases) == 1
        body = wire.encode_call(call)
        if len(body) > self._limits.max_body:
            raise InvalidRequest(
                f"{len(records)} jobs of {len(body):,} bytes together: the broker at {self.options.place} takes "
                f"{self._limits.max_body:,} at once; enqueue fewer jobs per call, or start it with a larger --max-body"
            )
        existing = await self._brokers.ask(
            wire.ENQUEUE,
            body,
            body_again=lambda: wire.encode_call(wire.EnqueueCall(call.records, now)),
        )
        return existing.accepted(records)

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
        call = wire.ReserveCall(queue, limit, lease_for, now, worker, None if types is None else list(types))
        name = self._claims.name(queue, worker) or self._brokers.new_name()
        try:
            return await self._brokers.ask(wire.RESERVE, wire.encode_call(call), name=name)
        except asyncio.CancelledError:
            # The caller went away: whatever was leased would stall until the leases expire.
            back = asyncio.ensure_future(self._give_back(call, name))
            self._giving_back.add(back)
            back.add_done_callback(self._giving_back.discard)
            raise
        except BackendUnavailable:
            self._claims.lose_answer(queue, worker, name)
            raise

    async def _give_back(self, call: wire.ReserveCall, name: str) -> None:
        """The same claim once more, for no job: what the earlier try leased goes back, and if the broker has yet to read that
        try, it comes to nothing."""
        call.limit = 0
        with contextlib.suppress(TaskHarborError):
            await self._brokers.ask(wire.RESERVE, wire.encode_call(call), name=name)

    async def extend_lease(
        self, extensions: Sequence[Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        answers: list[Lease | JobError] = []
        for _, body in self._bodies(extensions, lambda part: wire.ExtendCall(list(part), lease_for, now)):
            told = await self._brokers.ask(wire.EXTEND_LEASE, body)
            answers += join_errors(told.leases, told.errors)
        return answers

    async def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        answers: list[JobError | None] = []
        for count, body in self._bodies(settlements, lambda part: wire.SettleCall(Settlements.of(part), now)):
            told = await self._brokers.ask(wire.SETTLE, body)
            written: list[JobError | None] = [None] * count
            for place, error in told.errors.items():
                written[place] = error.error()
            answers += written
        return answers

    async def reclaim(self, *, now: Micros, queue: str | None = None, limit: int = 1000) -> int:
        return await self._brokers.ask(wire.RECLAIM, wire.encode_call(wire.ReclaimCall(now, queue, limit)))

    # -- operating ----------------------------------------------------------------------------------------

    async def cancel(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        return await self._change_states(wire.CANCEL, job_ids, now)

    async def requeue(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        return await self._change_states(wire.REQUEUE, job_ids, now)

    async def _change_states(
        self, operation: wire.Operation[wire.JobsCall, wire.States], job_ids: Sequence[str], now: Micros
    ) -> list[JobState | JobError]:
        answers: list[JobState | JobError] = []
        for _, body in self._bodies(job_ids, lambda part: wire.JobsCall(list(part), now)):
            told = await self._brokers.ask(operation, body)
            answers += join_errors(told.states, told.errors)
        return answers

    async def purge(self, selection: JobFilter, *, limit: int = 1000) -> int:
        return await self._brokers.ask(wire.PURGE, wire.encode_call(wire.PurgeCall(selection, limit)))

    async def prune(self, *, now: Micros, limit: int = 1000) -> int:
        return await self._brokers.ask(wire.PRUNE, wire.encode_call(wire.PruneCall(now, limit)))

    async def configure(self, queue: str, settings: QueueSettings, *, now: Micros) -> None:
        await self._brokers.ask(wire.CONFIGURE, wire.encode_call(wire.ConfigureCall(queue, settings, now)))

    async def settings(self, queue: str) -> QueueSettings:
        return await self._brokers.ask(wire.SETTINGS, wire.encode_call(wire.SettingsCall(queue)))

    # -- looking: what a broker gives in several pages is one page here --------------------------------------

    async def get(self, job_ids: Sequence[str], *, now: Micros) -> list[JobRecord | None]:
        found: list[JobRecord | None] = []
        for _, body in self._bodies(job_ids, lambda part: wire.JobsCall(list(part), now)):
            part = await self._brokers.ask(wire.GET, body)
            found += part
        return found

    async def list_jobs(
        self, selection: JobFilter, *, now: Micros, limit: int = 100, cursor: str | None = None
    ) -> Page:
        jobs: list[JobRecord] = []
        while True:
            call = wire.ListCall(selection, now, min(limit - len(jobs), self._limits.max_batch), cursor)
            page = await self._brokers.ask(wire.LIST_JOBS, wire.encode_call(call))
            jobs += page.jobs
            cursor = page.cursor
            if cursor is None or len(jobs) >= limit:
                return Page(jobs, cursor)

    async def stats(self, *, now: Micros, queue: str | None = None) -> list[QueueStats]:
        return await self._brokers.ask(wire.STATS, wire.encode_call(wire.StatsCall(now, queue)))

    # -- history ------------------------------------------------------------------------------------------

    async def read_attempts(self, *, after: str | None = None, limit: int = 1000) -> AttemptPage:
        rows: list[Attempt] = []
        while True:
            wanted = min(limit - len(rows), self._limits.max_batch)
            page = await self._brokers.ask(
                wire.READ_ATTEMPTS, wire.encode_call(wire.ReadAttemptsCall(after, wanted))
            )
            rows += page.attempts
            after = page.cursor
            if len(page.attempts) < wanted or len(rows) >= limit:
                return AttemptPage(rows, page.cursor)

    async def job_attempts(self, job_id: str) -> list[Attempt]:
        return await self._brokers.ask(wire.JOB_ATTEMPTS, wire.encode_call(wire.JobAttemptsCall(job_id)))

    # -- what a broker takes at once ------------------------------------------------------------------------

    @property
    def _limits(self) -> wire.Hello:
        if self._hello is None:
            raise BackendUnavailable(
                f"the driver for {self.options.place} is not open: await open() first, or use `async with`"
            )
        return self._hello

    def _bodies(
        self, items: Sequence[T], call: Callable[[Sequence[T]], object]
    ) -> Iterator[tuple[int, bytes]]:
        """The items in as few calls as the broker's limits allow, mostly one; and how many are in each.

        Each is judged on its own in any case, so that a worker with many large results need not know of the limits.
        """
        limits = self._limits
        for start in range(0, len(items), limits.max_batch):
            part = items[start : start + limits.max_batch]
            body = wire.encode_call(call(part))
            if len(body) <= limits.max_body or len(part) == 1:
                yield len(part), body
            else:
                half = len(part) // 2
                yield from self._bodies(part[:half], call)
                yield from self._bodies(part[half:], call)

    # -- waiting ------------------------------------------------------------------------------------------

    async def wait(self, queues: Sequence[str], *, now: Micros, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        names = tuple(dict.fromkeys(queues))
        longest = min(_LONGEST_POLL, self._limits.max_wait)
        began = loop.time()
        while True:
            spent = loop.time() - began
            patience = max(0.0, min(timeout - spent, longest))
            call = wire.WaitCall(list(names), now + round(spent * SECOND), patience, self._seen.get(names))
            told = await self._brokers.ask(wire.WAIT, wire.encode_call(call), patience=patience)
            # Only a wait that was answered has seen anything.
            self._seen.pop(names, None)
            self._seen[names] = told.seen
            if len(self._seen) > _MOST_QUEUE_SETS:
                del self._seen[next(iter(self._seen))]
            if told.woken or loop.time() - began >= timeout:
                return told.woken
