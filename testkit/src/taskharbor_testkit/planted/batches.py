"""Silent limits: a call does the first items of a large batch, and answers as if it had done all of them.

Their author met the limit of a backend (a list of parameters, a page, a number of keys in one call) and hid it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from msgspec.structs import replace

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Ack, AttemptPage, Enqueued, LogPage, Page, QueueStats
from taskharbor.jobs import SECOND, Attempt, JobRecord, JobState, Lease, Micros, UpdateFlags
from taskharbor_testkit.planted.registry import Bug, HandleBug

A = TypeVar("A")


class _Portion(HandleBug):
    """Carries out the first `most` items of a batch, and makes up the answers for the rest."""

    call: ClassVar[type[op.Operation[Any]]]
    most: ClassVar[int]
    make_up: ClassVar[Callable[[Any, Any], Any]]
    """Returns the answer for one item, by the call and the item."""

    async def run(self, call: op.Operation[A]) -> A:
        if type(call) is not self.call or call.batch is None:
            return await super().run(call)
        items = getattr(call, call.batch)
        answer: Any = await super().run(replace(call, **{call.batch: items[: self.most]}))
        return answer + [type(self).make_up(call, item) for item in items[self.most :]]  # type: ignore[no-any-return]


_PORTIONS: tuple[tuple[str, type[op.Operation[Any]], int, Callable[[Any, Any], Any]], ...] = (
    ("EnqueueStoresTheFirst", op.Enqueue, 2000, lambda call, record: Enqueued(record.id)),
    ("GetFindsTheFirst", op.Get, 1000, lambda call, job_id: None),
    (
        "ExtendKeepsTheFirst",
        op.ExtendLease,
        100,
        lambda call, one: Lease(one.job_id, one.token, call.now + call.lease_for),
    ),
    ("SettleEndsTheFirst", op.Settle, 1000, lambda call, settlement: None),
    ("CancelEndsTheFirst", op.CancelJobs, 2000, lambda call, job_id: JobState.CANCELLED),
    ("CancelOfKeysEndsTheFirst", op.CancelKeys, 100, lambda call, key: 1),
    ("RequeueTakesTheFirst", op.Requeue, 500, lambda call, job_id: JobState.READY),
    ("RemoveTakesTheFirst", op.Remove, 1000, lambda call, job_id: JobState.CANCELLED),
    ("BlobsReadAreTheFirst", op.ReadBlobs, 1000, lambda call, name: None),
    ("BlobsDroppedAreTheFirst", op.DropBlobs, 1000, lambda call, name: None),
)
for _name, _call, _most, _answer in _PORTIONS:
    _doc = f"A call of `{_call.name}` does every item of its batch, not {_most} of them."
    type(_name, (_Portion,), {"__doc__": _doc, "call": _call, "most": _most, "make_up": _answer})


class _SmallerLimit(HandleBug):
    """Takes a limit above `most` for `most`."""

    call: ClassVar[type[op.Operation[Any]]]
    most: ClassVar[int]

    async def run(self, call: Any) -> Any:
        is_limited: bool = type(call) is self.call
        if is_limited:
            call = replace(call, limit=min(call.limit, self.most))
        return await super().run(call)


for _name, _call, _most in (
    ("ReserveGrantsAThousand", op.Reserve, 1000),
    ("ReclaimEndsAThousand", op.Reclaim, 1000),
    ("PurgeRemovesAThousand", op.Purge, 1000),
    ("PruneRemovesTwoThousand", op.Prune, 2000),
):
    _doc = f"A call of `{_call.name}` takes as many as its limit says, not {_most}."
    type(_name, (_SmallerLimit,), {"__doc__": _doc, "call": _call, "most": _most})


class EnqueueInTransactionsOfAThousand(HandleBug):
    """A batch of any size is stored as a whole or not at all."""

    async def run(self, call: Any) -> Any:
        if type(call) is not op.Enqueue:
            return await super().run(call)
        answers: list[Enqueued] = []
        for start in range(0, len(call.records), 1000):
            await asyncio.sleep(0)
            answers += await super().run(replace(call, records=call.records[start : start + 1000]))
        return answers


class ReserveReadsAHundredTypes(Bug):
    """A claim takes jobs of every type that it names, however many."""

    def candidates(self, queue: str, types: Sequence[str] | None, now: Micros) -> list[JobRecord]:
        return super().candidates(queue, None if types is None else types[:100], now)


class TypesAmongAThousandDue(Bug):
    """A claim finds a job of its type behind any number of others."""

    def candidates(self, queue: str, types: Sequence[str] | None, now: Micros) -> list[JobRecord]:
        due = self.runnable(queue, now)
        return due if types is None else [job for job in due[:1000] if job.type in types]


class AThousandDueAreOrdered(Bug):
    """The claim order holds for all jobs that are due, not for the first thousand of them."""

    def runnable(self, queue: str, now: Micros) -> list[JobRecord]:
        self.promote(now)
        ready = [job for job in self.jobs.values() if job.queue == queue and job.state is JobState.READY]
        in_order = sorted(ready[:1000], key=lambda job: (-job.priority, job.run_at_us))
        return in_order + ready[1000:]


class AThousandDeathsAreTold(Bug):
    """Every death of a call leads to a job in the failure queue."""

    told = 0

    def settle(self, settlements: Sequence[Any], *, now: Micros) -> list[Any]:
        self.told = 0
        return super().settle(settlements, now=now)

    def serve_failure_queue(self, dead: JobRecord, queue: str, now: Micros) -> None:
        self.told += 1
        if self.told <= 1000:
            super().serve_failure_queue(dead, queue, now)


class LastPageAtAThousand(HandleBug):
    """A listing ends where no job is left."""

    async def run(self, call: Any) -> Any:
        answer = await super().run(call)
        if type(call) is op.ListJobs and len(answer.jobs) > 1000:
            return Page(answer.jobs[:1000], None)
        return answer


class LogPageOfAThousand(HandleBug):
    """A page of the log and its cursor end at the same row."""

    async def run(self, call: Any) -> Any:
        answer = await super().run(call)
        if type(call) is op.ReadAttempts:
            return AttemptPage(answer.attempts[:1000], answer.cursor)
        return LogPage(answer.attempts[:1000], answer.place) if type(call) is op.ReadLog else answer


class AHundredRowsOfAJob(Bug):
    """All rows of a job are read."""

    def job_attempts(self, job_id: str) -> list[Attempt]:
        return super().job_attempts(job_id)[:100]


class StatsOfAHundredQueues(Bug):
    """Stats name every queue."""

    def stats(self, *, now: Micros, queue: str | None = None) -> list[QueueStats]:
        return super().stats(now=now, queue=queue)[:100]


class PrunesAHundredQueues(Bug):
    """Retention holds in every queue."""

    def is_overdue(self, job: JobRecord, now: Micros) -> bool:
        return job.queue in sorted(self.queues)[:100] and super().is_overdue(job, now)


class CountsUpToAThousand(Bug):
    """The counts of a queue are exact, however large."""

    def counts(self, queue: str) -> dict[JobState, int]:
        return {state: min(count, 1000) for state, count in super().counts(queue).items()}


class WaitsOnAHundredQueues(HandleBug):
    """A wait watches all of its queues."""

    async def run(self, call: Any) -> Any:
        if type(call) is op.Wait:
            call = replace(call, queues=call.queues[:100])
        return await super().run(call)


class ListsAThousandBlobs(Bug):
    """All names in a folder are listed."""

    def list_blobs(self, folder: str) -> list[str]:
        return super().list_blobs(folder)[:1000]


class PublishesAThousandJobs(Bug):
    """All jobs of the blobs are published."""

    is_publishing = False

    def publish_blobs(self, *how: Any, **named: Any) -> dict[str, int]:
        self.is_publishing = True
        try:
            return super().publish_blobs(*how, **named)
        finally:
            self.is_publishing = False

    def enqueue(self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False) -> list[Enqueued]:
        return super().enqueue(records[:1000] if self.is_publishing else records, now=now, new_ids=new_ids)


class IdsForgottenAfterAThousand(Bug):
    """The id of a job is known as long as the job is kept, however many came after it."""

    def enqueue_one(self, given: JobRecord, now: Micros) -> Enqueued:
        place = self.places.get(given.id)
        if place is not None and self.next_place - place > 1000:
            return Enqueued(given.id)
        return super().enqueue_one(given, now)


class IdempotencyKeysForgottenAfterAThousand(Bug):
    """An idempotency key is known as long as its job is kept, however many came after it."""

    def known_for(self, given: JobRecord) -> str | None:
        known = super().known_for(given)
        return None if known is None or self.next_place - self.places[known] > 1000 else known


class PublishesBlobByBlob(Bug):
    """A call publishes all of its blobs or none."""

    def publish_blobs(
        self, series: str, number: int, portion: int, names: Sequence[str], now: Micros
    ) -> dict[str, int]:
        published = dict(self.published)
        for name in names:
            self.published = dict(published)
            answer = super().publish_blobs(series, number, portion, [name], now)
        return answer


class NotesForgottenSoon(Bug):
    """A portion that was published stays so for weeks."""

    noted_at = 0

    def publish_blobs(
        self, series: str, number: int, portion: int, names: Sequence[str], now: Micros
    ) -> dict[str, int]:
        if now - self.noted_at > 86_400 * SECOND:
            self.published.clear()
        self.noted_at = now
        return super().publish_blobs(series, number, portion, names, now)


class ClaimReclaimsAHundred(Bug):
    """A claim ends all leases that are over, as many as it may take."""

    def reclaim_for_reserve(self, queue: str, now: Micros) -> None:
        self.reclaim_jobs(self.expired(now, queue)[:100], now=now)


class LongPayloadNotUpdated(Bug):
    """An update replaces a long payload, and by a long one."""

    def update_waiting(self, waiting: JobRecord, given: JobRecord, flags: UpdateFlags, now: Micros) -> None:
        payload = given.payload if len(given.payload) < 2**16 else waiting.payload
        super().update_waiting(waiting, replace(given, payload=payload), flags, now)


class ResultOfAKeyedJobLost(Bug):
    """A job with a key keeps its result too."""

    def ack(self, job: JobRecord, held: JobRecord, ack: Ack, now: Micros) -> None:
        super().ack(job, held, ack if job.key is None else replace(ack, result=None), now)
