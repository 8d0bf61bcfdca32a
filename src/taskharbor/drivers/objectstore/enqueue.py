"""How jobs come in: each queue's part of a batch is one change of its image."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.engine import enqueue as engine
from taskharbor.drivers.engine.statements import Transaction, load
from taskharbor.drivers.objectstore.image import SPREAD, take_numbers
from taskharbor.drivers.objectstore.segments import holding_jobs
from taskharbor.drivers.objectstore.shard import Loaded, Shard, find_archived
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.jobs import JobRecord, Micros

_SQL = load("segments", __package__)


async def enqueue(
    store: OpenStore, records: Sequence[JobRecord], now: Micros, new_ids: bool
) -> list[Enqueued]:
    shards = [store.shard_of(record) for record in records]
    for shard in dict.fromkeys(shards):
        shard.refuse_when_full(
            sum(len(record.payload) for record, one in zip(records, shards, strict=True) if one is shard)
        )
    await store.catalog.add_queues(shard.queue for shard in shards)
    answers: list[Enqueued | None] = [None] * len(records)
    for run in _runs(records, shards):
        await _enqueue_run(store, records, shards, run, now, new_ids, answers)
    return [answer for answer in answers if answer is not None]


def _runs(records: Sequence[JobRecord], shards: list[Shard]) -> list[range]:
    """Nearly always one. An id that is given to two queues in one batch is known to the second, which must see it."""
    seen: dict[str, Shard] = {}
    runs: list[range] = []
    start = 0
    for at, (record, shard) in enumerate(zip(records, shards, strict=True)):
        if seen.setdefault(record.id, shard) is not shard:
            runs.append(range(start, at))
            start, seen = at, {record.id: shard}
    runs.append(range(start, len(records)))
    return runs


async def _enqueue_run(
    store: OpenStore,
    records: Sequence[JobRecord],
    shards: list[Shard],
    run: range,
    now: Micros,
    new_ids: bool,
    answers: list[Enqueued | None],
) -> None:
    elsewhere: dict[str, Shard] = {}
    if not new_ids or run.start > 0:
        elsewhere = await _known_elsewhere(store, [(records[at].id, shards[at]) for at in run])
    by_shard: dict[Shard, list[int]] = {}
    for at in run:
        if elsewhere.get(records[at].id, shards[at]) is shards[at]:
            by_shard.setdefault(shards[at], []).append(at)
        else:
            answers[at] = Enqueued(records[at].id, True)
    first = take_numbers(len(run)) - run.start * SPREAD
    parts = await asyncio.gather(
        *(
            enqueue_part(shard, [records[at] for at in part], [first + at * SPREAD for at in part], now)
            for shard, part in by_shard.items()
        )
    )
    for (shard, part), made in zip(by_shard.items(), parts, strict=True):
        store.whereabouts.note((one.id for one in made), shard)
        for at, answer in zip(part, made, strict=True):
            answers[at] = answer


async def _known_elsewhere(store: OpenStore, wanted: list[tuple[str, Shard]]) -> dict[str, Shard]:
    """An id is known wherever in the store it is."""
    targets = {shard for _, shard in wanted}
    shards = await store.all_shards()
    if len(targets) == 1:
        # Its own queue looks for itself.
        shards = [shard for shard in shards if shard not in targets]
    return await store.ask_who_has(list(dict.fromkeys(job_id for job_id, _ in wanted)), shards)


async def enqueue_part(
    shard: Shard, records: Sequence[JobRecord], numbers: Sequence[int], now: Micros
) -> list[Enqueued]:
    ids = [record.id for record in records]
    return await shard.change_with(
        lambda transaction: holding_jobs(transaction, ids),
        lambda transaction, loaded: accept(transaction, loaded, records, numbers, now),
    )


def accept(
    transaction: Transaction,
    loaded: Loaded,
    records: Sequence[JobRecord],
    numbers: Sequence[int],
    now: Micros,
) -> list[Enqueued]:
    """Jobs whose ids are known, here or in a segment, change nothing: a repeated try may come after its job has ended."""
    archived = find_archived(transaction, loaded, [record.id for record in records])
    new = [at for at, record in enumerate(records) if record.id not in archived]
    # No number is given out again, whatever the clock does: segments of a queue become one.
    (last,) = transaction.connection.execute(_SQL["last_archived"]).fetchone()
    made = engine.enqueue(
        transaction, [records[at] for at in new], now, [max(numbers[at], last + 1) for at in new]
    )
    answers = dict(zip(new, made, strict=True))
    return [answers.get(at) or Enqueued(record.id, True) for at, record in enumerate(records)]


async def deliver(store: OpenStore, notices: list[JobRecord]) -> None:
    """Bring each to its queue. One that is there already, or was there and has ended, changes nothing."""
    parts: dict[Shard, list[JobRecord]] = {}
    for notice in notices:
        parts.setdefault(store.shard_of(notice), []).append(notice)
    await store.catalog.add_queues(shard.queue for shard in parts)
    await asyncio.gather(
        *(
            enqueue_part(shard, part, [take_numbers(1) for _ in part], part[0].created_at_us)
            for shard, part in parts.items()
        )
    )
