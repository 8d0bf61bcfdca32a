"""Stores new jobs: of producers, of bulk writes, and the jobs for failure queues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

import msgspec

from taskharbor.bulk.publish_staged import KEEP_SERIES, KEEP_SINGLE
from taskharbor.bulk.stage import KEEP_STAGED, unpack
from taskharbor.drivers.contract import Enqueued, failure_record
from taskharbor.drivers.redis.library import LAYOUT, RedisCall, Word
from taskharbor.drivers.redis.records import FRONT, READY, More, encode, record_from
from taskharbor.drivers.redis.store import RedisStore, tag
from taskharbor.jobs import DEFAULT_BACKOFF_MAX, DEFAULT_BACKOFF_MIN, SECOND, JobRecord, Micros
from taskharbor.requests import new_token

_PORTION = 100
"""Dead jobs that one call delivers to a failure queue."""
_PLACE = Struct(">HQ")
"""The part of PLACE that the client makes."""
_LOWEST_PRIORITY: Final[int] = LAYOUT["LOWEST_PRIORITY"]
_NO_MORE = More()
_DEFAULT_BACKOFF = (DEFAULT_BACKOFF_MIN, DEFAULT_BACKOFF_MAX)


async def enqueue(
    store: RedisStore, records: Sequence[JobRecord], now: Micros, new_ids: bool = False
) -> list[Enqueued]:
    queues = dict.fromkeys(record.queue for record in records)
    if len(queues) > 1 and len({(one.id, one.queue) for one in records}) > len({one.id for one in records}):
        # One id is given for two queues: the second enqueue depends on the result of the first.
        return [(await enqueue(store, [record], now))[0] for record in records]
    if not queues.keys() <= store.numbers.keys():
        await store.register(queues)
    homes = {} if new_ids else await store.located([record.id for record in records])
    answers = [Enqueued(record.id) for record in records]
    groups: dict[str, list[int]] = {}
    for n, record in enumerate(records):
        # The function itself checks the ids of its own queue.
        if homes.get(record.id, record.queue) == record.queue:
            groups.setdefault(record.queue, []).append(n)
        else:
            answers[n] = Enqueued(record.id, True)
    # Jobs of several queues are listed in the order in which they were given, so they count from one number.
    base: Word = await store.time() if len(groups) > 1 else ""
    # Ids that were made for this call also name it.
    name = records[0].id if new_ids else new_token()
    words = {
        queue: (name, base, encode(ns) if base else b"", *_words([records[n] for n in ns]))
        for queue, ns in groups.items()
    }
    said = await store.ask_queues("enqueue", now, words)
    for queue, (_, *known) in said.items():
        for n, job_id in zip(groups[queue], known, strict=False):
            if job_id:
                answers[n] = Enqueued(job_id.decode(), True)
    firsts = [queue for queue, answer in said.items() if answer[0]]
    if firsts:
        # A server that came back without its data has lost the names of the queues too.
        await store.register(firsts)
    return answers


def _words(records: Iterable[JobRecord]) -> list[Word]:
    """Return new jobs as arguments of `store` in `lua/enqueue.lua`."""
    words: list[Word] = []
    kind, place = None, b""
    for record in records:
        # Most batches are of one kind.
        if kind != (kind := (record.type, record.priority, record.run_at_us)):
            name = record.type.encode()
            rank = _LOWEST_PRIORITY - record.priority
            place = len(name).to_bytes(2) + name + _PLACE.pack(rank, record.run_at_us + 2**53)
        words += (record.id, place, _new_job(record))
    return words


def _new_job(record: JobRecord) -> bytes:
    """Return the stored form of a new job, without the number behind it."""
    body = b""
    if record.codec != "json" or record.headers or record.timeout_us:
        body = encode((record.codec, record.headers, record.timeout_us))
    payload, key = record.payload, record.key
    more: More | bool = False
    backoff = (record.backoff_min_us, record.backoff_max_us)
    if key is not None or record.idempotency_key is not None or backoff != _DEFAULT_BACKOFF:
        made = More(
            update=record.update,
            idempotency_key=record.idempotency_key,
            backoff_min_us=record.backoff_min_us,
            backoff_max_us=record.backoff_max_us,
        )
        # Lua would pack an empty map as an array.
        more = made != _NO_MORE and made
    head = encode(
        (
            record.run_at_us, record.priority, 0, 0, record.max_attempts, record.max_stalls, record.created_at_us,
            record.type, False if key is None else key, len(body), len(payload), more,
        )
    )  # fmt: skip
    is_plain = key is None and more is False
    return b"".join((FRONT.pack(READY, 0, 0, 0, len(head), is_plain), head, body, payload))


# -- failure queues -------------------------------------------------------------------------------------------


_decode_notice = msgspec.msgpack.Decoder(tuple[str, str, str, Micros]).decode
"""The header in front of a dead job in the outbox: id of the new job, id of the dead job, failure queue, instant."""


async def deliver(store: RedisStore, queue: str) -> None:
    """Deliver the dead jobs in a queue's outbox to its failure queue.

    The step that makes a job dead writes an entry into the outbox, with the id of the job for the failure queue. The failure
    queue may be on another server of a cluster, so the delivery is a second step. The caller that made the job dead takes it; if
    that caller dies, the next caller that moves jobs of the queue takes it. The id prevents a second delivery.
    """
    outbox = store.keys(queue)["outbox"]
    while entries := await store.command("LRANGE", outbox, 0, _PORTION - 1):
        by_time: dict[Micros, list[JobRecord]] = {}
        for entry in entries:
            end = 4 + int.from_bytes(entry[:4])
            new_id, dead_id, failure_queue, now = _decode_notice(entry[4:end])
            dead = record_from(dead_id, queue, entry[end:], now)
            told = failure_record(dead, job_id=new_id, queue=failure_queue, now=now)
            by_time.setdefault(now, []).append(told)
        for now, records in by_time.items():
            await enqueue(store, records, now)
        await store.commands([("LREM", outbox, 1, entry) for entry in entries])


# -- bulk writes: blobs as keys of their own, portions noted beside their jobs ---------------------------------

_BLOB_SECONDS = 2 * KEEP_STAGED // SECOND
"""Seconds that a blob lives. Abandoned blobs are removed earlier; this is for a store that nobody writes to any more."""


def _index(store: RedisStore) -> str:
    """Return the key of the index of blobs. No key of a queue has this name."""
    return f"{store.prefix}{{taskharbor}}:blobs"


def _blob(store: RedisStore, name: str) -> str:
    return f"{store.prefix}{{{tag(name)}}}:blob"


async def put_blob(store: RedisStore, blob: str, data: bytes, swaps: bool, expected: bytes | None) -> bool:
    index, key = _index(store), _blob(store, blob)
    if swaps:
        args = (data,) if expected is None else (data, expected)
        (is_swapped,) = await store.run([RedisCall("swap", (key,), args)])
        return bool(is_swapped)
    # The name comes first: a blob that is not in the index cannot be found.
    await store.commands([("SADD", index, blob), ("EXPIRE", index, _BLOB_SECONDS)])
    await store.command("SET", key, data, "EX", _BLOB_SECONDS)
    return True


async def read_blobs(store: RedisStore, names: Sequence[str]) -> list[bytes | None]:
    return await store.commands([("GET", _blob(store, name)) for name in names])


async def list_blobs(store: RedisStore, folder: str) -> list[str]:
    indexed = [name.decode() for name in await store.command("SMEMBERS", _index(store))]
    names = sorted(name for name in indexed if name.startswith(f"{folder}/"))
    are_there = await store.commands([("EXISTS", _blob(store, name)) for name in names])
    return [name for name, is_there in zip(names, are_there, strict=True) if is_there]


async def drop_blobs(store: RedisStore, names: Sequence[str]) -> list[None]:
    await store.commands([("UNLINK", _blob(store, name)) for name in names])
    await store.command("SREM", _index(store), *names)
    return [None] * len(names)


async def publish_blobs(
    store: RedisStore, series: str, number: int, portion: int, names: Sequence[str], now: Micros
) -> dict[str, int]:
    """Publish a portion of a bulk write: on one server in all queues at once, in a cluster queue by queue. Other queues are not
    searched for the ids, because writers make new ones."""
    queues: dict[str, list[JobRecord]] = {}
    for data in await read_blobs(store, names):
        for job in [] if data is None else unpack(data):
            queues.setdefault(job.queue, []).append(job)
    if not queues:
        return {}
    await store.register(queues)
    keep = (KEEP_SINGLE if number < 0 else KEEP_SERIES) // SECOND
    calls: list[RedisCall] = []
    for queue, jobs in queues.items():
        call = store.call("publish", queue, now, number, portion, keep, *_words(jobs))
        calls.append(call._replace(keys=(*call.keys, store.keys(queue)[f"published:{series}"])))
    return dict(zip(queues, await store.run(calls), strict=True))
