"""Bulk writing: blobs as keys of their own, portions noted beside their jobs."""

from __future__ import annotations

from collections.abc import Sequence

from taskharbor.bulk.publish import KEEP_SERIES, KEEP_SINGLE
from taskharbor.bulk.stage import KEEP_STAGED, unpack
from taskharbor.drivers.operations import PublishBlobs, PutBlob
from taskharbor.drivers.redis.library import Call
from taskharbor.drivers.redis.records import job_words
from taskharbor.drivers.redis.store import Store, tag
from taskharbor.jobs import SECOND, JobRecord

_BLOB_SECONDS = 2 * KEEP_STAGED // SECOND
"""Abandoned blobs are removed before; on a store that nobody writes to any more they go by themselves."""


def _index(store: Store) -> str:
    """No queue's keys are named like it."""
    return f"{store.prefix}{{taskharbor}}:blobs"


def _blob(store: Store, name: str) -> str:
    return f"{store.prefix}{{{tag(name)}}}:blob"


async def put_blob(store: Store, call: PutBlob) -> bool:
    index, key = _index(store), _blob(store, call.blob)
    if call.swaps:
        args = (call.data,) if call.expected is None else (call.data, call.expected)
        (is_swapped,) = await store.ask_all((Call("swap", (key,), args),))
        return bool(is_swapped)
    # The name first: a blob that is not in the index is found by nobody.
    await store.commands([("SADD", index, call.blob), ("EXPIRE", index, _BLOB_SECONDS)])
    await store.command("SET", key, call.data, "EX", _BLOB_SECONDS)
    return True


async def read_blobs(store: Store, names: Sequence[str]) -> list[bytes | None]:
    return await store.commands([("GET", _blob(store, name)) for name in names])


async def list_blobs(store: Store, folder: str) -> list[str]:
    indexed = [name.decode() for name in await store.command("SMEMBERS", _index(store))]
    names = sorted(name for name in indexed if name.startswith(f"{folder}/"))
    are_there = await store.commands([("EXISTS", _blob(store, name)) for name in names])
    return [name for name, is_there in zip(names, are_there, strict=True) if is_there]


async def drop_blobs(store: Store, names: Sequence[str]) -> list[None]:
    await store.commands([("UNLINK", _blob(store, name)) for name in names])
    await store.command("SREM", _index(store), *names)
    return [None] * len(names)


async def publish_blobs(store: Store, call: PublishBlobs) -> dict[str, int]:
    """In all queues at once on one server; in a cluster in each of them. Whether another queue knows an id is not looked at:
    writers make new ones."""
    queues: dict[str, list[JobRecord]] = {}
    for data in await read_blobs(store, call.names):
        for job in [] if data is None else unpack(data):
            queues.setdefault(job.queue, []).append(job)
    if not queues:
        return {}
    await store.register(queues)
    keep = (KEEP_SINGLE if call.number < 0 else KEEP_SERIES) // SECOND
    calls = [
        store.call("publish", queue, call.now, call.number, call.portion, keep, *job_words(jobs))
        for queue, jobs in queues.items()
    ]
    noted = [store.keys(queue)[f"published:{call.series}"] for queue in queues]
    answers = await store.ask_all(
        [one._replace(keys=(*one.keys, note)) for one, note in zip(calls, noted, strict=True)]
    )
    return dict(zip(queues, answers, strict=True))
