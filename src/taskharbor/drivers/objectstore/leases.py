"""Reserving jobs, all that the holders of leases do, and what an operator does with single jobs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from taskharbor.drivers.contract import Extension, QueueSettings, Settlement
from taskharbor.drivers.engine import operate, tables
from taskharbor.drivers.engine import reserve as engine_reserve
from taskharbor.drivers.engine import settle as engine_settle
from taskharbor.drivers.engine.tables import STATE_NUMBERS, Transaction, load
from taskharbor.drivers.objectstore.shard import Shard
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import InvalidRequest, JobError, JobFinished, JobNotDead, JobNotFound, JobNotInflight
from taskharbor.jobs import JobRecord, JobState, Lease, Micros

A = TypeVar("A")
_SQL = load("image", __package__)


async def reserve(
    store: OpenStore,
    queue: str,
    limit: int,
    lease_for: Micros,
    now: Micros,
    worker: str,
    types: Sequence[str] | None,
) -> list[JobRecord]:
    shards = store.shards_of(queue)

    async def reserve_from(shard: Shard, limit: int) -> list[JobRecord]:
        place = shard.number, len(shards)
        jobs = await shard.change(
            lambda transaction: engine_reserve.reserve(
                transaction, queue, limit, lease_for, now, worker, types, place
            )
        )
        store.whereabouts.note((job.id for job in jobs), shard)
        return jobs

    if len(shards) == 1:
        return await reserve_from(shards[0], limit)
    # Beginning elsewhere each time, so that no shard is starved; what came together is handed out in the queue's order.
    store.turn += 1
    turn = store.turn % len(shards)
    first, *others = shards[turn:] + shards[:turn]
    found = await reserve_from(first, limit)
    if len(found) < limit:
        # Which of the others are worth a change is seen of all of them at the same time.
        looks = await asyncio.gather(
            *(shard.look(lambda transaction: _has_work(transaction, now)) for shard in others)
        )
        for shard in itertools.compress(others, looks):
            if len(found) < limit:
                found += await reserve_from(shard, limit - len(found))
    # Ids of one producer follow the order in which it made them; between producers nothing is promised here.
    return sorted(found, key=lambda job: (-job.priority, job.run_at_us, job.id))


def _has_work(transaction: Transaction, now: Micros) -> bool:
    return transaction.connection.execute(_SQL["has_work"], {"now": now}).fetchone() is not None


async def extend(
    store: OpenStore, extensions: Sequence[Extension], lease_for: Micros, now: Micros
) -> list[Lease | JobError]:
    return await _change_each(
        store,
        [extension.job_id for extension in extensions],
        lambda transaction, at: engine_settle.extend_lease(
            transaction, [extensions[one] for one in at], lease_for, now
        ),
        lambda at, job: JobNotInflight(job.id),
    )


async def settle(store: OpenStore, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
    # In the answers of all queues, None stands for "nobody has it".
    def step(transaction: Transaction, at: list[int]) -> list[JobError | bool]:
        answers = engine_settle.settle(transaction, [settlements[one] for one in at], now)
        return [answer or True for answer in answers]

    answers = await _change_each(
        store,
        [settlement.job_id for settlement in settlements],
        step,
        lambda at, job: engine_settle.settle_ended(settlements[at], STATE_NUMBERS[job.state]) or True,
    )
    return [answer if isinstance(answer, JobError) else None for answer in answers]


async def cancel(store: OpenStore, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    return await _change_each(
        store,
        job_ids,
        lambda transaction, at: operate.cancel(transaction, [job_ids[one] for one in at], now),
        lambda at, job: job.state if job.state is JobState.CANCELLED else JobFinished(job.id),
    )


async def requeue(store: OpenStore, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    return await _change_each(
        store,
        job_ids,
        lambda transaction, at: operate.requeue(transaction, [job_ids[one] for one in at], now),
        lambda at, job: JobNotDead(job.id),
    )


async def _change_each(
    store: OpenStore,
    job_ids: Sequence[str],
    step: Callable[[Transaction, list[int]], list[A]],
    answer_for: Callable[[int, JobRecord], A],
) -> list[A | JobNotFound]:
    """Change jobs where they are. `step` gets the positions of those that one shard has; `answer_for` answers for a job that
    has left for a segment, which never changes."""

    async def ask(shard: Shard, at: list[int]) -> list[A]:
        answers = await shard.change(lambda transaction: step(transaction, at))
        lost = {
            job_ids[one] for one, answer in zip(at, answers, strict=True) if isinstance(answer, JobNotFound)
        }
        archived = await shard.archived(list(lost)) if lost else {}
        return [
            answer_for(one, archived[job_ids[one]]) if job_ids[one] in archived else answer
            for one, answer in zip(at, answers, strict=True)
        ]

    found = await store.by_home(job_ids, ask, lambda answer: isinstance(answer, JobNotFound))
    return [JobNotFound(job_id) if one is None else one for job_id, one in zip(job_ids, found, strict=True)]


async def reclaim(store: OpenStore, now: Micros, queue: str | None, limit: int) -> int:
    ended = 0

    async def reclaim_shard(shard: Shard) -> None:
        nonlocal ended
        due, left = await shard.look(_next_expiry), limit - ended
        if due is not None and due <= now and left > 0:
            ended += await shard.change(
                lambda transaction: engine_settle.reclaim(transaction, now, None, left)
            )

    await store.for_each(await store.all_shards() if queue is None else store.shards_of(queue), reclaim_shard)
    return ended


def _next_expiry(transaction: Transaction) -> Micros | None:
    (due,) = transaction.connection.execute(_SQL["next_expiry"]).fetchone()
    return None if due is None else int(due)


async def configure(store: OpenStore, queue: str, settings: QueueSettings) -> None:
    shards = store.catalog.shards
    if settings.max_inflight is not None and 0 < settings.max_inflight < shards:
        raise InvalidRequest(
            f"max_inflight={settings.max_inflight} cannot be shared by {shards} shards, each of which needs one at least: "
            f"allow {shards} or more, or keep this queue in a store without shards"
        )
    await store.catalog.add_queues([queue])
    await asyncio.gather(
        *(
            shard.change(lambda transaction: tables.configure(transaction, queue, settings))
            for shard in store.shards_of(queue)
        )
    )
