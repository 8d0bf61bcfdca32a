"""Runs calls of the contract for callers. Every call of both APIs passes here.

A token that is limited to some queues reaches no other one. An answer with payloads ends after a number of bytes: the store is
read in small portions, so a caller cannot make the broker hold all jobs at once. Few new queues come in one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar, cast

import msgspec
from msgspec.structs import replace

from taskharbor.broker.config import BrokerConfig, Rates
from taskharbor.broker.error_responses import Problem, invalid
from taskharbor.broker.tokens import Caller
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver, Page
from taskharbor.errors import JobNotFound
from taskharbor.jobs import JobRecord, Micros
from taskharbor.schedules import QUEUE
from taskharbor.schedules.specification import decode

A = TypeVar("A")

# Jobs that are read from the store at once for an answer with payloads.
PORTION = 64
# Answers with payloads that are made at once.
READERS = 4
# The most queues in one enqueue. A queue costs a store more than a job.
MOST_QUEUES = 256
NEW_QUEUES_PER_SECOND = 10.0
NEW_QUEUES_AT_ONCE = 1000.0
_KNOWN_QUEUES = 100_000
# Bytes of a payload. A claim of smaller ones needs no portions, each of which is a transaction.
_LARGE = 65_536

# Calls that name jobs, and no queue.
_OF_JOBS = (op.Get, op.ExtendLease, op.Settle, op.CancelJobs, op.Requeue, op.Remove)


class Calls:
    """The driver behind the broker, as callers may use it."""

    def __init__(self, driver: Driver, config: BrokerConfig) -> None:
        self._driver = driver
        self._most_bytes = config.max_answer_bytes
        self._reading = asyncio.Semaphore(READERS)
        # Queues that had a job lately, and whether one had a large payload. The oldest is forgotten first.
        self._known_queues: dict[str, bool] = {}
        self._new_queues = Rates(NEW_QUEUES_PER_SECOND, NEW_QUEUES_AT_ONCE)

    async def run(self, caller: Caller, call: op.Operation[A]) -> A:
        """Carry out a checked call for a caller. Raises `Problem` if the caller's token does not reach its queues.

        A page ends early, and the answer of `Get` has only the first of the jobs, after `max_answer_bytes`.
        """
        run = self._run if caller.queues is None else self._run_limited
        return cast("A", await run(caller, call))

    async def _run_limited(self, caller: Caller, call: op.Operation[Any]) -> Any:
        queue = getattr(call, "queue", None)
        if isinstance(call, (op.JobAttempts, *_OF_JOBS)):
            return await self._run_for_own(caller, call)
        if isinstance(call, (op.Reclaim, op.Prune)) and queue is None:
            # The broker sweeps by itself, and a worker does not know that it must not sweep all queues.
            return 0
        if isinstance(call, op.Stats) and queue is None:
            return [one for one in await self._run(caller, call) if caller.reaches(one.queue)]
        check_queues(caller, queues_of(call))
        return await self._run(caller, call)

    async def _run(self, caller: Caller, call: op.Operation[Any]) -> Any:
        if isinstance(call, op.Configure):
            self._check_new_queues(caller, {call.queue})
        if isinstance(call, op.Enqueue):
            self._check_new_queues(caller, {record.queue for record in call.records})
            for queue in {record.queue for record in call.records if len(record.payload) > _LARGE}:
                self._known_queues[queue] = True
        if isinstance(call, op.Reserve) and call.limit > PORTION and self._known_queues.get(call.queue):
            return await self._first_leases(call)
        if isinstance(call, op.ListJobs):
            async with self._reading:
                return await self._page(call)
        if isinstance(call, op.Get) and len(call.job_ids) > 1:
            async with self._reading:
                return await self._first_of(call)
        return await self._driver.run(call)

    async def heads(self, caller: Caller, job_ids: Sequence[str], now: Micros) -> dict[str, JobRecord | None]:
        """Return the jobs that the caller may see, without payloads and results."""
        found: dict[str, JobRecord | None] = {}
        ids = list(dict.fromkeys(job_ids))
        for start in range(0, len(ids), PORTION):
            part = ids[start : start + PORTION]
            for job_id, job in zip(part, await self._driver.get(part, now=now), strict=True):
                if job is not None and caller.reaches(job.queue):
                    found[job_id] = replace(job, payload=b"", result=None)
        return found

    # -- queues ---------------------------------------------------------------------------------------------

    async def _run_for_own(self, caller: Caller, call: op.Operation[Any]) -> Any:
        """A call that names jobs. Jobs of queues that the caller does not reach do not exist for it."""
        if isinstance(call, op.JobAttempts):
            # The rows outlive the job.
            return [row for row in await self._driver.run(call) if caller.reaches(row.queue)]
        items = getattr(call, call.batch or "")
        ids = [one if isinstance(one, str) else one.job_id for one in items]
        own = await self.heads(caller, ids, getattr(call, "now", 0))
        reached = [item for item, job_id in zip(items, ids, strict=True) if job_id in own]
        part: Any = replace(call, **{call.batch or "": reached})
        answers = iter(await self._run(caller, part) if reached else ())
        told: list[Any] = []
        for job_id in ids:
            if job_id in own:
                answer = next(answers, self)
                if answer is self:  # An answer of `Get` that ends early.
                    break
                told.append(answer)
            else:
                told.append(None if isinstance(call, op.Get) else JobNotFound(job_id))
        return told

    def _check_new_queues(self, caller: Caller, queues: set[str]) -> None:
        if len(queues) > MOST_QUEUES:
            raise invalid(
                f"{len(queues)} queues in one request: at most {MOST_QUEUES}; send several requests"
            )
        new = queues - self._known_queues.keys()
        if new and (pause := self._new_queues.take(caller.name, len(new))):
            detail = f"the token {caller.name} has used {NEW_QUEUES_AT_ONCE:g} new queues"
            raise Problem(
                "rate_limited", detail, hint="use few queues, and many jobs in each", retry_after=pause
            )
        self._known_queues |= dict.fromkeys(new, False)
        while len(self._known_queues) > _KNOWN_QUEUES:
            del self._known_queues[next(iter(self._known_queues))]

    # -- answers with payloads ------------------------------------------------------------------------------

    async def _page(self, call: op.ListJobs) -> Page:
        jobs: list[JobRecord] = []
        cursor, size = call.cursor, 0
        while True:
            limit = min(PORTION, call.limit - len(jobs))
            part = await self._driver.run(replace(call, limit=limit, cursor=cursor))
            jobs += part.jobs
            cursor = part.cursor
            size += sum(map(_size, part.jobs))
            if cursor is None or len(jobs) >= call.limit or size >= self._most_bytes:
                return Page(jobs, cursor)

    async def _first_leases(self, call: op.Reserve) -> list[JobRecord]:
        jobs: list[JobRecord] = []
        while sum(map(_size, jobs)) < self._most_bytes:
            wanted = min(PORTION, call.limit - len(jobs))
            part = await self._driver.run(replace(call, limit=wanted))
            jobs += part
            if len(part) < PORTION:
                break
        return jobs

    async def _first_of(self, call: op.Get) -> list[JobRecord | None]:
        jobs: list[JobRecord | None] = []
        size = 0
        while len(jobs) < len(call.job_ids) and size < self._most_bytes:
            part = await self._driver.run(
                replace(call, job_ids=call.job_ids[len(jobs) : len(jobs) + PORTION])
            )
            jobs += part
            size += sum(map(_size, filter(None, part)))
        return jobs


class CallersDriver(Driver):
    """The broker's driver, for the schedules of a caller: it reaches what the caller reaches."""

    def __init__(self, calls: Calls, caller: Caller) -> None:
        self._calls, self._caller = calls, caller

    async def run(self, call: op.Operation[A]) -> A:
        if isinstance(call, op.Get):
            # All of them, without payloads: an answer that ends early would look like jobs that are gone.
            heads = await self._calls.heads(self._caller, call.job_ids, call.now)
            return cast("A", [heads.get(job_id) for job_id in call.job_ids])
        answer = await self._calls.run(self._caller, call)
        if isinstance(call, op.ListJobs):
            # A caller sees no schedule whose jobs go elsewhere. A call that names one is refused.
            jobs = cast("Page", answer).jobs
            if call.selection.key is not None:
                check_queues(self._caller, map(_target, jobs))
            jobs[:] = [job for job in jobs if self._caller.reaches(_target(job))]
        return answer

    @classmethod
    def from_url(cls, url: str) -> Self:
        raise NotImplementedError("it is made for a caller, and not by a URL")

    def clone(self) -> Self:
        return self

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def time(self) -> Micros:
        return await self._calls._driver.time()


def _target(schedule: JobRecord) -> str | None:
    """Return the queue of a schedule's jobs. One that cannot be read makes none."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return decode(schedule.payload).spec.queue
    return QUEUE


def _size(job: JobRecord) -> int:
    return len(job.payload) + len(job.result or b"") + len(job.progress or b"") + len(job.last_error or "")


def queues_of(call: op.Operation[Any]) -> Iterable[str | None]:
    """Return the queues that a call names. None stands for all queues."""
    match call:
        case op.Enqueue():
            return {record.queue for record in call.records}
        case op.Wait():
            return call.queues
        case op.ListJobs() | op.Purge():
            return [call.selection.queue]
        case op.Configure():
            other = call.settings.failure_queue
            return [call.queue] if other is None else [call.queue, other]
    # Staged jobs may be of any queue, and the log has rows of all.
    return [getattr(call, "queue", None)]


def check_queues(caller: Caller, queues: Iterable[str | None]) -> None:
    """Raise `Problem` if a caller does not reach one of the queues."""
    for queue in queues:
        if not caller.reaches(queue):
            detail = f"the token {caller.name} reaches the queues {caller.queues} only"
            hint = "name one of these queues" if queue is None else "use a token that reaches this queue"
            raise Problem("forbidden", detail, hint=hint)
