"""Looking at jobs and queues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from heapq import merge
from itertools import accumulate, islice, takewhile

import msgspec

from taskharbor.drivers.contract import JobFilter, Page, QueueSettings, QueueStats
from taskharbor.drivers.engine import inspect as engine
from taskharbor.drivers.engine import queues
from taskharbor.drivers.engine.statements import Transaction
from taskharbor.drivers.objectstore.segments import Entry, entries
from taskharbor.drivers.objectstore.shard import Loaded, Shard
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, JobState, Micros


async def get(store: OpenStore, job_ids: Sequence[str], now: Micros) -> list[JobRecord | None]:
    async def ask(shard: Shard, at: list[int]) -> list[JobRecord | None]:
        own = [job_ids[one] for one in at]
        found = await shard.look(lambda transaction: engine.get(transaction, own, now))
        lost = [job_id for job_id, job in zip(own, found, strict=True) if job is None]
        archived = await shard.archived(lost) if lost else {}
        return [job or archived.get(job_id) for job_id, job in zip(own, found, strict=True)]

    return await store.by_home(job_ids, ask, lambda answer: answer is None)


async def list_jobs(
    store: OpenStore, selection: JobFilter, now: Micros, limit: int, cursor: str | None
) -> Page:
    """Numbers follow time between queues, so they are the order of the whole store; a cursor is the last one and whose it is."""
    before, behind = (engine.FOREVER, "") if cursor is None else _parsed(cursor)
    end = (0, "") if selection.until is None else _parsed(selection.until)
    shards = await store.all_shards() if selection.queue is None else store.shards_of(selection.queue)
    # Of jobs with the same number, which takes two machines and bad luck, the queue's name decides.
    shards.sort(key=lambda shard: shard.name, reverse=True)

    async def part(shard: Shard) -> list[tuple[tuple[int, str], JobRecord]]:
        is_later = cursor is not None and shard.name < behind
        found = await _list_shard(shard, selection, now, limit + 1, before + is_later)
        return [((number, shard.name), job) for number, job in found]

    parts = await asyncio.gather(*map(part, shards))
    merged = merge(*parts, key=lambda one: one[0], reverse=True)
    found = list(islice(takewhile(lambda one: one[0] >= end, merged), limit + 1))
    page = found[:limit]
    jobs = [job for _, job in page]
    if len(found) <= limit:
        return Page(jobs, None)
    (number, name), _ = page[-1]
    return Page(jobs, f"{number}:{name}")


async def _list_shard(
    shard: Shard, selection: JobFilter, now: Micros, limit: int, before: int
) -> list[tuple[int, JobRecord]]:
    """The newest accepted first. A segment is read when the page has come to its newest job, or may come to it soon."""
    is_archived = selection.states is None or bool(selection.states & {JobState.DONE, JobState.CANCELLED})
    wanted: set[str] = set()

    def needs(transaction: Transaction) -> list[Entry]:
        return [entry for entry in entries(transaction) if entry.name in wanted]

    def step(transaction: Transaction, loaded: Loaded) -> tuple[list[tuple[int, JobRecord]], list[str]]:
        """The page so far, and the segments that it lacks."""
        known = [one for one in entries(transaction) if one.jobs and one.first_job < before and is_archived]
        here = engine.find_jobs(transaction, selection, now, limit, before)
        there = [
            loaded[one.name].matching(one, selection, limit, before) for one in known if one.name in wanted
        ]
        found = list(islice(merge(here, *there, key=lambda job: job[0], reverse=True), limit))
        floor = found[-1][0] if len(found) == limit else 0
        lacking = [one for one in known if one.name not in wanted and one.last_job > floor]
        lacking.sort(key=lambda one: -one.last_job)
        enough = next(
            (at for at, jobs in enumerate(accumulate(one.jobs for one in lacking), 1) if jobs >= limit), None
        )
        return found, [one.name for one in lacking[:enough]]

    while True:
        found, lacking = await shard.look_with(needs, step)
        if not lacking:
            return found
        wanted.update(lacking)


def _parsed(cursor: str) -> tuple[int, str]:
    number, separator, name = cursor.partition(":")
    if not (number.isdecimal() and len(number) < 20 and int(number) < engine.FOREVER and separator):
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
    """None: nobody ever used the queue. Counters go on counting the jobs that have left for segments."""
    parts = await asyncio.gather(
        *(
            shard.look(lambda transaction: engine.stats(transaction, now, None))
            for shard in store.shards_of(queue)
        )
    )
    known = [one for part in parts for one in part]
    if len(known) < 2:
        return known[0] if known else None
    heads = [part.head_run_at_us for part in known if part.head_run_at_us is not None]
    return msgspec.structs.replace(
        known[0],
        counts={state: sum(part.counts[state] for part in known) for state in JobState},
        done_total=sum(part.done_total for part in known),
        dead_total=sum(part.dead_total for part in known),
        cancelled_total=sum(part.cancelled_total for part in known),
        head_run_at_us=min(heads, default=None),
    )


async def settings(store: OpenStore, queue: str) -> QueueSettings:
    return await store.shards_of(queue)[0].look(lambda transaction: queues.settings_of(transaction, queue))
