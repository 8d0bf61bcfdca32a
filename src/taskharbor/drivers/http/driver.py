"""A handle on a store behind a broker: the contract's methods. The broker calls the same methods on its own driver."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterator
from typing import Any, Self, TypeVar, cast

from msgspec.structs import replace

from taskharbor.drivers import operations as op
from taskharbor.drivers.broker_protocol import VERSION, encode
from taskharbor.drivers.contract import AttemptPage, Capabilities, Driver, Enqueued, Page, Woken
from taskharbor.drivers.http.broker_connections import Brokers, HttpOptions, parse_url
from taskharbor.drivers.records import Greeting
from taskharbor.errors import BackendUnavailable, InvalidRequest, SchemaMismatch, TaskHarborError
from taskharbor.jobs import SECOND, Attempt, JobRecord, Micros

A = TypeVar("A")

_LONGEST_POLL = 25.0
"""The longest silence of a wait, in seconds. Proxies cut connections that are silent for longer."""
_MOST_LOST = 8
"""The most lost answers per queue and worker. A broker remembers an answer for a minute."""


class HttpDriver(Driver):
    """`http://127.0.0.1:7433` or `https://token@jobs.example.com`; `HttpOptions` lists the options of the URL.

    Durability is that of the store behind the broker.
    """

    # Defaults for any store behind a broker. An open handle has the real ones.
    capabilities = Capabilities(passes_over_busy=True)

    def __init__(self, options: HttpOptions) -> None:
        self.options = options
        self._brokers = Brokers(options)
        self._lost_claims = defaultdict[tuple[str, str], deque[str]](lambda: deque(maxlen=_MOST_LOST))
        """Names of reserves whose answer was lost, by queue and worker. The next reserve asks for their jobs first."""
        self._greeting: Greeting | None = None
        self._giving_back: set[asyncio.Task[None]] = set()

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(parse_url(url))

    def clone(self) -> Self:
        return type(self)(self.options)

    async def open(self) -> None:
        if self._greeting is not None:
            return
        await self._brokers.open()
        try:
            greeting = await self._brokers.ask(op.Hello())
            if greeting.version != VERSION:
                raise SchemaMismatch(
                    f"the broker at {self.options.place} speaks version {greeting.version} of the driver protocol, this driver "
                    f"version {VERSION}: use the same version of TaskHarbor at both ends"
                )
        except BaseException:
            await self._brokers.close()
            raise
        self._greeting = greeting
        store = greeting.capabilities
        # A broker shares its store with all its clients, whatever the store could do alone.
        self.__dict__["capabilities"] = Capabilities(
            durable=store.durable,
            passes_over_busy=store.passes_over_busy,
            ticks_schedules=store.ticks_schedules,
            batch=min(Capabilities().batch, greeting.max_batch),
        )

    async def close(self) -> None:
        if self._greeting is None:
            return
        # Jobs that are being given back still need the connections.
        await asyncio.gather(*self._giving_back, return_exceptions=True)
        self._greeting = None
        await self._brokers.close()

    async def time(self) -> Micros:
        return await self._brokers.ask(op.Time())

    # -- operations ---------------------------------------------------------------------------------------

    def run(self, call: op.Operation[A]) -> Coroutine[Any, Any, A]:
        """Carry out a call. Most calls go to the broker as they are. A batch or a page is split if the broker's limits require
        it."""
        if type(call) in (op.Enqueue, op.Reserve, op.Get, op.ListJobs, op.ReadAttempts, op.Wait):
            return super().run(call)
        if call.batch is not None:
            return cast("Coroutine[Any, Any, A]", self._run_in_parts(call, call.batch))
        return self._brokers.ask(call)

    async def _enqueue(self, call: op.Enqueue) -> list[Enqueued]:
        body = encode(call)
        if len(body) > self._limits.max_body:
            raise InvalidRequest(
                f"{len(call.records)} jobs of {len(body):,} bytes together: the broker at {self.options.place} takes "
                f"{self._limits.max_body:,} at once; enqueue fewer jobs per call, or start it with a larger --max-body"
            )
        return await self._brokers.ask(call, body)

    async def _reserve(self, call: op.Reserve) -> list[JobRecord]:
        lost = self._lost_claims[call.queue, call.worker]
        name = lost.pop() if lost else self._brokers.new_name()
        try:
            return await self._brokers.ask(call, name=name)
        except asyncio.CancelledError:
            # The caller went away. Leased jobs would stall until their leases expire.
            back = asyncio.ensure_future(self._give_back(call, name))
            self._giving_back.add(back)
            back.add_done_callback(self._giving_back.discard)
            raise
        except BackendUnavailable:
            lost.append(name)
            raise

    async def _give_back(self, call: op.Reserve, name: str) -> None:
        """Repeat the same claim with limit 0. Jobs that the earlier try leased go back. If the broker has yet to read that try,
        it does nothing."""
        with contextlib.suppress(TaskHarborError):
            await self._brokers.ask(replace(call, limit=0), name=name)

    async def _get(self, call: op.Get) -> list[JobRecord | None]:
        """Ask for each id once: a broker answers an id once in a call. It answers the first ids only if their jobs are large."""
        ids = list(dict.fromkeys(call.job_ids))
        found: dict[str, JobRecord | None] = {}
        while left := ids[len(found) : len(found) + self._limits.max_batch]:
            # Each answer has at least one job, whatever its size.
            found |= zip(left, await self._brokers.ask(replace(call, job_ids=left)), strict=False)
        return [found[job_id] for job_id in call.job_ids]

    async def _list_jobs(self, call: op.ListJobs) -> Page:
        jobs: list[JobRecord] = []
        cursor = call.cursor
        while True:
            wanted = min(call.limit - len(jobs), self._limits.max_batch)
            page = await self._brokers.ask(replace(call, limit=wanted, cursor=cursor))
            jobs += page.jobs
            cursor = page.cursor
            if cursor is None or len(jobs) >= call.limit:
                return Page(jobs, cursor)

    async def _read_attempts(self, call: op.ReadAttempts) -> AttemptPage:
        rows: list[Attempt] = []
        after = call.after
        while True:
            wanted = min(call.limit - len(rows), self._limits.max_batch)
            page = await self._brokers.ask(op.ReadAttempts(after, wanted))
            rows += page.attempts
            after = page.cursor
            if len(page.attempts) < wanted or len(rows) >= call.limit:
                return AttemptPage(rows, page.cursor)

    # -- what a broker takes at once ------------------------------------------------------------------------

    @property
    def _limits(self) -> Greeting:
        if self._greeting is None:
            raise self._brokers.not_open()
        return self._greeting

    async def _run_in_parts(self, call: op.Operation[Any], batch: str) -> list[Any]:
        answers: list[Any] = []
        for body in self._bodies(call, batch, getattr(call, batch)):
            answers += await self._brokers.ask(call, body)
        return answers

    def _bodies(self, call: op.Operation[Any], batch: str, items: list[Any]) -> Iterator[bytes]:
        """Split the call into as few parts as the broker's limits allow, mostly one.

        Each item is judged on its own in any case, so a worker with many large results need not know the limits.
        """
        limits = self._limits
        for start in range(0, len(items), limits.max_batch):
            part = items[start : start + limits.max_batch]
            body = encode(replace(call, **{batch: part}))
            if len(body) <= limits.max_body or len(part) == 1:
                yield body
            else:
                half = len(part) // 2
                yield from self._bodies(call, batch, part[:half])
                yield from self._bodies(call, batch, part[half:])

    # -- waiting ------------------------------------------------------------------------------------------

    async def _wait(self, call: op.Wait) -> Woken:
        loop = asyncio.get_running_loop()
        longest = min(_LONGEST_POLL, self._limits.max_wait)
        began, seen = loop.time(), call.seen
        while True:
            spent = loop.time() - began
            patience = max(0.0, min(call.timeout - spent, longest))
            part = replace(call, now=call.now + round(spent * SECOND), timeout=patience, seen=seen)
            told = await self._brokers.ask(part, patience=patience)
            if told.woken or loop.time() - began >= call.timeout:
                return told
            seen = told.seen
