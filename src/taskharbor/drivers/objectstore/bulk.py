"""Bulk writing: blobs as objects, portions noted in the images of the queues they go to; and shares of the jobs for reading."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from itertools import pairwise

from taskharbor.bulk.stage import unpack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import JobShare
from taskharbor.drivers.engine import bulk as engine
from taskharbor.drivers.engine.statements import Transaction, load
from taskharbor.drivers.objectstore.blobs import Conflict, Unclear
from taskharbor.drivers.objectstore.enqueue import accept
from taskharbor.drivers.objectstore.image import SPREAD, take_numbers
from taskharbor.drivers.objectstore.log import edges, spread
from taskharbor.drivers.objectstore.segments import entries, holding_jobs
from taskharbor.drivers.objectstore.shard import Loaded, Shard
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import JobRecord

_TRIES = 6
_PAUSE = 0.05
_PLAIN, _ZLIB = b"\0", b"\1"
_SQL = load("image", __package__)


async def split_jobs(store: OpenStore, call: op.SplitJobs) -> list[JobShare]:
    """Queue by queue: a listing of several reads a page of each."""

    def step(transaction: Transaction) -> list[tuple[int, int]]:
        points = [(seq, 1) for (seq,) in transaction.connection.execute(_SQL["job_numbers"])]
        for entry in entries(transaction):
            points += spread(entry.first_job, entry.last_job, entry.jobs)
        return points

    queues = await store.catalog.queues() if call.queue is None else [call.queue]
    found: list[tuple[str, list[tuple[int, int]]]] = []
    for name in queues:
        parts_of = await asyncio.gather(*(shard.look(step) for shard in store.shards_of(name)))
        found.append((name, sorted(point for points in parts_of for point in points)))
    total = sum(count for _, points in found for _, count in points)
    shares: list[JobShare] = []
    for name, points in found:
        size = sum(count for _, count in points)
        inner = edges(points, max(1, round(call.parts * size / total))) if size else []
        cuts = [None, *(f"{number}:" for number in reversed(inner)), None]
        shares += [JobShare(queue=name, after=low, until=high) for low, high in pairwise(cuts)]
    return shares


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
        numbers.append(first + at * SPREAD)
    await store.catalog.add_queues(shard.queue for shard in parts)

    async def publish(shard: Shard, records: list[JobRecord], numbers: list[int]) -> int:
        def add(transaction: Transaction, loaded: Loaded) -> int:
            shard.refuse_when_full(sum(len(record.payload) for record in records))
            answers = accept(transaction, loaded, records, numbers, call.now)
            return sum(not answer.existed for answer in answers)

        ids = [record.id for record in records]
        return await shard.change_with(
            lambda transaction: holding_jobs(transaction, ids),
            lambda transaction, loaded: engine.publish_once(
                transaction, call, lambda: add(transaction, loaded)
            ),
        )

    totals = await asyncio.gather(*(publish(shard, *part) for shard, part in parts.items()))
    return {shard.name: total for shard, total in zip(parts, totals, strict=True)}
