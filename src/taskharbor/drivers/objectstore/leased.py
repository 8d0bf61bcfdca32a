"""Reserving jobs, and all that the holders of leases do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from taskharbor.drivers.contract import Extension, Settlement
from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.queue_cell import QueueCell
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import JobRecord, Lease, Micros


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
    if len(shards) == 1:
        return await _reserve_from(store, shards[0], limit, lease_for, now, worker, types)
    # Beginning elsewhere each time, so that no shard is starved; what came together is handed out in the queue's order.
    store.turn += 1
    turn = store.turn % len(shards)
    first, *others = shards[turn:] + shards[:turn]
    found = await _reserve_from(store, first, limit, lease_for, now, worker, types)
    if len(found) < limit:
        # Which of the others are worth a change is seen of all of them at the same time.
        looks = await asyncio.gather(
            *(cell.look(lambda state, brought: state.has_work(now)) for cell in others)
        )
        for cell in itertools.compress(others, looks):
            if len(found) < limit:
                found += await _reserve_from(store, cell, limit - len(found), lease_for, now, worker, types)
    return sorted(found, key=_in_order)


async def _reserve_from(
    store: OpenStore,
    cell: QueueCell,
    limit: int,
    lease_for: Micros,
    now: Micros,
    worker: str,
    types: Sequence[str] | None,
) -> list[JobRecord]:
    def step(state: QueueState, brought: Brought) -> list[JobRecord]:
        return state.reserve(cell.queue, limit, lease_for, now, worker, types)

    jobs = await cell.change(step)
    store.whereabouts.note((job.id for job in jobs), (cell.queue, cell.shard))
    return jobs


def _in_order(job: JobRecord) -> tuple[int, Micros, str]:
    """Ids of one producer follow the order in which it made them; between producers nothing is promised here."""
    return -job.priority, job.run_at_us, job.id


async def extend(
    store: OpenStore, extensions: Sequence[Extension], lease_for: Micros, now: Micros
) -> list[Lease | JobError]:
    # Whatever is no extension is found out before the first change.
    ids = [extension.job_id for extension in extensions if (extension.token, extension.progress)]

    async def ask(cell: QueueCell, at: list[int]) -> list[Lease | JobError]:
        batch = [extensions[one] for one in at]

        def step(state: QueueState, brought: Brought) -> list[Lease | JobError]:
            state.recall((extension.job_id for extension in batch), brought)
            return state.extend(batch, lease_for, now)

        return await cell.change(step)

    answers = await store.by_home(ids, ask, _is_not_found)
    return [JobNotFound(job_id) if one is None else one for job_id, one in zip(ids, answers, strict=True)]


async def settle(store: OpenStore, settlements: Sequence[Settlement], now: Micros) -> list[JobError | None]:
    ids = [settlement.job_id for settlement in settlements]

    async def ask(cell: QueueCell, at: list[int]) -> list[JobError | bool]:
        batch = [settlements[one] for one in at]

        def step(state: QueueState, brought: Brought) -> list[JobError | bool]:
            state.recall((settlement.job_id for settlement in batch), brought)
            # In the answers of all queues, None stands for "nobody has it".
            return [True if error is None else error for error in state.settle(batch, now)]

        return await cell.change(step)

    answers = await store.by_home(ids, ask, _is_not_found)
    return [
        JobNotFound(job_id) if one is None else one if isinstance(one, JobError) else None
        for job_id, one in zip(ids, answers, strict=True)
    ]


async def reclaim(store: OpenStore, now: Micros, queue: str | None, limit: int) -> int:
    cells = await store.all_cells() if queue is None else store.shards_of(queue)
    dues = await asyncio.gather(*(cell.look(_next_due) for cell in cells))
    ended = 0
    for cell, due in zip(cells, dues, strict=True):
        if due is not None and due <= now and ended < limit:
            left = limit - ended

            def step(state: QueueState, brought: Brought, left: int = left) -> int:
                return state.reclaim(now, None, left)

            ended += await cell.change(step)
    return ended


def _next_due(state: QueueState, brought: Brought) -> Micros | None:
    return state.next_expiry()


def _is_not_found(answer: object) -> bool:
    return isinstance(answer, JobNotFound)
