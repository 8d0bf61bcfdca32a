"""What an operator does: cancel, requeue, clean up, change settings."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.folding import wall_clock
from taskharbor.drivers.objectstore.queue_cell import QueueCell
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import InvalidRequest, JobError, JobNotFound
from taskharbor.jobs import JobState, Micros


async def cancel(store: OpenStore, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    return await _by_id(store, job_ids, lambda state, ids: state.cancel(ids, now))


async def requeue(store: OpenStore, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    return await _by_id(store, job_ids, lambda state, ids: state.requeue(ids, now))


async def _by_id(
    store: OpenStore,
    job_ids: Sequence[str],
    act: Callable[[QueueState, list[str]], list[JobState | JobError]],
) -> list[JobState | JobError]:
    ids = list(job_ids)

    async def ask(cell: QueueCell, at: list[int]) -> list[JobState | JobError]:
        own = [ids[one] for one in at]

        def step(state: QueueState, brought: Brought) -> list[JobState | JobError]:
            state.recall(own, brought)
            return act(state, own)

        return await cell.change(step)

    answers = await store.by_home(ids, ask, lambda answer: isinstance(answer, JobNotFound))
    return [JobNotFound(job_id) if one is None else one for job_id, one in zip(ids, answers, strict=True)]


async def purge(store: OpenStore, selection: JobFilter, limit: int) -> int:
    cells = await store.all_cells() if selection.queue is None else store.shards_of(selection.queue)
    removed = 0
    for cell in cells:
        left = limit - removed
        if left < 1:
            break

        def step(state: QueueState, brought: Brought, left: int = left) -> int:
            return state.purge_all(selection, left, wall_clock(), brought)

        removed += await cell.change(step)
    return removed


async def prune(store: OpenStore, now: Micros, limit: int) -> int:
    jobs = rows = 0
    cells = await store.all_cells()
    dues = await asyncio.gather(*(cell.look(lambda state, brought: state.has_due(now)) for cell in cells))
    for cell in itertools.compress(cells, dues):
        left = (limit - jobs, limit - rows)

        def step(state: QueueState, brought: Brought, left: tuple[int, int] = left) -> tuple[int, int]:
            return state.prune_all(now, *left, wall_clock(), brought)

        some_jobs, some_rows = await cell.change(step)
        jobs += some_jobs
        rows += some_rows
    return jobs + rows


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
            cell.change(lambda state, brought: state.configure(queue, settings))
            for cell in store.shards_of(queue)
        )
    )
