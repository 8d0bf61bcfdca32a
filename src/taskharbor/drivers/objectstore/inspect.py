"""Looking at jobs and queues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from heapq import merge
from itertools import islice, takewhile

import msgspec

from taskharbor.drivers.contract import JobFilter, Page, QueueSettings, QueueStats
from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.queue_cell import QueueCell
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, JobState, Micros


async def get(store: OpenStore, job_ids: Sequence[str], now: Micros) -> list[JobRecord | None]:
    ids = list(job_ids)

    async def ask(cell: QueueCell, at: list[int]) -> list[JobRecord | None]:
        own = [ids[one] for one in at]

        def step(state: QueueState, brought: Brought) -> list[JobRecord | None]:
            state.recall(own, brought)
            return state.get(own, now)

        return await cell.look(step)

    return await store.by_home(ids, ask, lambda answer: answer is None)


async def list_jobs(
    store: OpenStore, selection: JobFilter, now: Micros, limit: int, cursor: str | None
) -> Page:
    """Numbers follow time between queues, so they are the order of the whole store; a cursor is the last one and whose it is."""
    before, behind = (None, None) if cursor is None else _parsed(cursor)
    cells = await store.all_cells() if selection.queue is None else store.shards_of(selection.queue)
    # Of jobs with the same number, which takes two machines and bad luck, the queue's name decides.
    cells.sort(key=_name, reverse=True)

    async def part(cell: QueueCell) -> list[tuple[tuple[int, str], JobRecord]]:
        is_later = before is not None and behind is not None and _name(cell) < behind
        limit_number = before + 1 if before is not None and is_later else before

        def step(state: QueueState, brought: Brought) -> list[tuple[int, JobRecord]]:
            # One more than asked for tells whether anything follows.
            return state.listed(selection, now, limit + 1, limit_number, brought)

        return [((number, _name(cell)), job) for number, job in await cell.look(step)]

    parts = await asyncio.gather(*map(part, cells))
    end = (0, "") if selection.until is None else _parsed(selection.until)
    merged = merge(*parts, key=lambda one: one[0], reverse=True)
    found = list(islice(takewhile(lambda one: one[0] >= end, merged), limit + 1))
    page = found[:limit]
    jobs = [job for _, job in page]
    if len(found) <= limit:
        return Page(jobs, None)
    (number, name), _ = page[-1]
    return Page(jobs, f"{number}:{name}")


def _name(cell: QueueCell) -> str:
    return f"{cell.shard}:{cell.queue}"


def _parsed(cursor: str) -> tuple[int, str]:
    number, separator, name = cursor.partition(":")
    if not number.isdecimal() or not separator:
        raise InvalidRequest(
            f"{cursor[:60]!r} is not a cursor of this store: pass on what the last page gave"
        )
    return int(number), name


async def stats(store: OpenStore, now: Micros, queue: str | None) -> list[QueueStats]:
    queues = sorted(await store.catalog.queues()) if queue is None else [queue]
    found = await asyncio.gather(*(_stats_of(store, name, now) for name in queues))
    if queue is not None and found[0] is None:
        return [QueueStats(queue=queue, counts=dict.fromkeys(JobState, 0))]
    return [one for one in found if one is not None]


async def _stats_of(store: OpenStore, queue: str, now: Micros) -> QueueStats | None:
    parts = await asyncio.gather(
        *(cell.look(lambda state, brought: state.stats_at(now)) for cell in store.shards_of(queue))
    )
    known = [part for part in parts if part is not None]
    return joined_stats(known) if known else None


def joined_stats(parts: Sequence[QueueStats]) -> QueueStats:
    """Of a queue, from those of its shards."""
    if len(parts) == 1:
        return parts[0]
    heads = [part.head_run_at_us for part in parts if part.head_run_at_us is not None]
    return msgspec.structs.replace(
        parts[0],
        counts={state: sum(part.counts[state] for part in parts) for state in JobState},
        done_total=sum(part.done_total for part in parts),
        dead_total=sum(part.dead_total for part in parts),
        cancelled_total=sum(part.cancelled_total for part in parts),
        head_run_at_us=min(heads, default=None),
    )


async def settings(store: OpenStore, queue: str) -> QueueSettings:
    return await store.cell(queue).look(lambda state, brought: state.settings(queue))
