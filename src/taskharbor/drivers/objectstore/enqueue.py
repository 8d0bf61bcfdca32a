"""How jobs come in: each queue's part of a batch is one change of its image. Bulk writes stage blobs as objects first."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from taskharbor.bulk.stage import unpack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Enqueued
from taskharbor.drivers.engine import bulk
from taskharbor.drivers.engine import enqueue as engine
from taskharbor.drivers.engine.tables import Transaction, load
from taskharbor.drivers.objectstore.blobs import Conflict, Unclear
from taskharbor.drivers.objectstore.image import take_numbers
from taskharbor.drivers.objectstore.segments import holding_jobs
from taskharbor.drivers.objectstore.shard import Loaded, Shard, find_archived
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import JobRecord, Micros

_SQL = load("segments", __package__)
_TRIES = 6
_PAUSE = 0.05
_PLAIN, _ZLIB = b"\0", b"\1"


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
    first = take_numbers(len(run)) - run.start
    parts = await asyncio.gather(
        *(
            enqueue_part(shard, [records[at] for at in part], [first + at for at in part], now)
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
        transaction, [records[at] for at in new], now, numbers=[max(numbers[at], last + 1) for at in new]
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


async def put_blob(store: OpenStore, call: op.PutBlob) -> bool:
    blobs, name, data = store.blobs, call.blob, call.data
    stored = _ZLIB + await asyncio.to_thread(zlib.compress, data, 1) if blobs.is_remote else _PLAIN + data
    if not call.swaps:
        await blobs.put(name, stored)
        return True
    for tries in range(_TRIES):
        found = await blobs.read(name)
        held = None if found is None else _plain(found.data)
        if held != call.expected:
            # An earlier try of this loop may have landed.
            return tries > 0 and held == data
        try:
            if found is None:
                await blobs.create(name, stored)
            else:
                await blobs.replace(name, stored, found.version)
            return True
        except (Conflict, Unclear):
            await asyncio.sleep(_PAUSE * 2**tries)
    raise BackendUnavailable(f"{blobs.where(name)} could not be written: nothing certain was heard of it")


def _plain(stored: bytes) -> bytes:
    return zlib.decompress(memoryview(stored)[1:]) if stored[:1] == _ZLIB else stored[1:]


async def read_blobs(store: OpenStore, names: Sequence[str]) -> list[bytes | None]:
    found = await asyncio.gather(*map(store.blobs.read, names))
    return [None if blob is None else _plain(blob.data) for blob in found]


async def check_room(store: OpenStore, call: op.CheckRoom) -> None:
    for shard in store.shards_of(call.queue):
        await shard.look(lambda transaction: None)
        shard.refuse_when_full(call.size // store.catalog.shards)


async def publish_blobs(store: OpenStore, call: op.PublishBlobs) -> dict[str, int]:
    """One change of each queue's image, with the note that it was made: so a portion that is published again adds nothing, not
    even jobs that were merged into another by their key. Ids are made by the tasks that stage, so other queues are not asked."""
    jobs = [job for data in await read_blobs(store, call.names) if data is not None for job in unpack(data)]
    first = take_numbers(max(1, len(jobs)))
    parts: dict[Shard, tuple[list[JobRecord], list[int]]] = {}
    for at, job in enumerate(jobs):
        records, numbers = parts.setdefault(store.shard_of(job), ([], []))
        records.append(job)
        numbers.append(first + at)
    await store.catalog.add_queues(shard.queue for shard in parts)

    async def publish(shard: Shard, records: list[JobRecord], numbers: list[int]) -> int:
        def add(transaction: Transaction, loaded: Loaded) -> int:
            shard.refuse_when_full(sum(len(record.payload) for record in records))
            answers = accept(transaction, loaded, records, numbers, call.now)
            return sum(not answer.existed for answer in answers)

        ids = [record.id for record in records]
        return await shard.change_with(
            lambda transaction: holding_jobs(transaction, ids),
            lambda transaction, loaded: bulk.publish_once(
                transaction, call, lambda: add(transaction, loaded)
            ),
        )

    totals = await asyncio.gather(*(publish(shard, *part) for shard, part in parts.items()))
    return {shard.name: total for shard, total in zip(parts, totals, strict=True)}
