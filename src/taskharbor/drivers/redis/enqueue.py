"""Storing new jobs: from producers, from bulk writes, and from jobs that died and are told of in a failure queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

import msgspec

from taskharbor.bulk.publish import KEEP_SERIES, KEEP_SINGLE
from taskharbor.bulk.stage import KEEP_STAGED, unpack
from taskharbor.drivers.contract import Enqueued, failure_record
from taskharbor.drivers.redis.library import LAYOUT, Call, Word
from taskharbor.drivers.redis.records import FRONT, READY, More, encode, record_from
from taskharbor.drivers.redis.store import Store, tag
from taskharbor.jobs import DEFAULT_BACKOFF_MAX, DEFAULT_BACKOFF_MIN, SECOND, JobRecord, Micros
from taskharbor.requests import new_token

_PORTION = 100
"""Deaths that are told of in one go."""
_PLACE = Struct(">HQ")
"""The client's part of PLACE."""
_LOWEST_PRIORITY: Final[int] = LAYOUT["LOWEST_PRIORITY"]
_NO_MORE = More()
_DEFAULT_BACKOFF = (DEFAULT_BACKOFF_MIN, DEFAULT_BACKOFF_MAX)


async def enqueue(
    store: Store, records: Sequence[JobRecord], now: Micros, new_ids: bool = False
) -> list[Enqueued]:
    queues = dict.fromkeys(record.queue for record in records)
    if len(queues) > 1 and len({(one.id, one.queue) for one in records}) > len({one.id for one in records}):
        # One id for two queues: only what became of the first of them tells whether the second knows it.
        return [(await enqueue(store, [record], now))[0] for record in records]
    if not queues.keys() <= store.numbers.keys():
        await store.register(queues)
    homes = {} if new_ids else await store.located([record.id for record in records])
    answers = [Enqueued(record.id) for record in records]
    groups: dict[str, list[int]] = {}
    for n, record in enumerate(records):
        # Of its own queue the function knows better.
        if homes.get(record.id, record.queue) == record.queue:
            groups.setdefault(record.queue, []).append(n)
        else:
            answers[n] = Enqueued(record.id, True)
    # Jobs of several queues are listed in the order they were given in, so they count from one number.
    base: Word = await store.time() if len(groups) > 1 else ""
    # Ids that were made for this call name it too.
    name = records[0].id if new_ids else new_token()
    words = [
        (encode(ns) if len(groups) > 1 else b"", *_words([records[n] for n in ns])) for ns in groups.values()
    ]

    def make(again: int) -> list[Call]:
        return [
            store.call("enqueue", queue, now, name, again, base, *jobs)
            for queue, jobs in zip(groups, words, strict=True)
        ]

    said = await store.run(make)
    for ns, (_, *known) in zip(groups.values(), said, strict=True):
        for n, job_id in zip(ns, known, strict=False):
            if job_id:
                answers[n] = Enqueued(job_id.decode(), True)
    firsts = [queue for queue, answer in zip(groups, said, strict=True) if answer[0]]
    if firsts:
        # A server that came back without its data has forgotten the names too.
        await store.register(firsts)
    return answers


def _words(records: Iterable[JobRecord]) -> list[Word]:
    """New jobs as `store` in `lua/enqueue.lua` takes them."""
    words: list[Word] = []
    kind, place = None, b""
    for record in records:
        # Most batches are of one kind.
        if kind != (kind := (record.type, record.priority, record.run_at_us)):
            name = record.type.encode()
            rank = _LOWEST_PRIORITY - record.priority
            place = len(name).to_bytes(2) + name + _PLACE.pack(rank, max(record.run_at_us, 0))
        words += (record.id, place, _new_job(record))
    return words


def _new_job(record: JobRecord) -> bytes:
    """A job that nothing has happened to, as it is stored in front of its number."""
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
        # An empty map would come back from Lua as an array.
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


class Notice(msgspec.Struct, array_like=True):
    """What stands in front of a dead job in the outbox."""

    id: str
    job_id: str
    queue: str
    now: Micros


_decode_notice = msgspec.msgpack.Decoder(Notice).decode


async def deliver(store: Store, queue: str) -> None:
    """Tell the failure queue what waits in a queue's outbox.

    The step that makes a job dead writes down what is to be told, under the id it will have. The failure queue may live on
    another server of a cluster, so that is told in a second step: by whoever made the job dead, or, if it died itself, by the
    next one who moves jobs of that queue. The id makes it once.
    """
    outbox = store.keys(queue)["outbox"]
    while entries := await store.command("LRANGE", outbox, 0, _PORTION - 1):
        by_time: dict[Micros, list[JobRecord]] = {}
        for entry in entries:
            end = 4 + int.from_bytes(entry[:4])
            notice = _decode_notice(entry[4:end])
            dead = record_from(notice.job_id, queue, entry[end:], notice.now)
            told = failure_record(dead, job_id=notice.id, queue=notice.queue, now=notice.now)
            by_time.setdefault(notice.now, []).append(told)
        for now, records in by_time.items():
            await enqueue(store, records, now)
        await store.commands([("LREM", outbox, 1, entry) for entry in entries])


# -- bulk writes: blobs as keys of their own, portions noted beside their jobs ---------------------------------

_BLOB_SECONDS = 2 * KEEP_STAGED // SECOND
"""Abandoned blobs are removed before; on a store that nobody writes to any more they go by themselves."""


def _index(store: Store) -> str:
    """No queue's keys are named like it."""
    return f"{store.prefix}{{taskharbor}}:blobs"


def _blob(store: Store, name: str) -> str:
    return f"{store.prefix}{{{tag(name)}}}:blob"


async def put_blob(store: Store, blob: str, data: bytes, swaps: bool, expected: bytes | None) -> bool:
    index, key = _index(store), _blob(store, blob)
    if swaps:
        args = (data,) if expected is None else (data, expected)
        (is_swapped,) = await store.ask_all((Call("swap", (key,), args),))
        return bool(is_swapped)
    # The name first: a blob that is not in the index is found by nobody.
    await store.commands([("SADD", index, blob), ("EXPIRE", index, _BLOB_SECONDS)])
    await store.command("SET", key, data, "EX", _BLOB_SECONDS)
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


async def publish_blobs(
    store: Store, series: str, number: int, portion: int, names: Sequence[str], now: Micros
) -> dict[str, int]:
    """In all queues at once on one server; in a cluster in each of them. Whether another queue knows an id is not looked at:
    writers make new ones."""
    queues: dict[str, list[JobRecord]] = {}
    for data in await read_blobs(store, names):
        for job in [] if data is None else unpack(data):
            queues.setdefault(job.queue, []).append(job)
    if not queues:
        return {}
    await store.register(queues)
    keep = (KEEP_SINGLE if number < 0 else KEEP_SERIES) // SECOND
    calls = [
        store.call("publish", queue, now, number, portion, keep, *_words(jobs))
        for queue, jobs in queues.items()
    ]
    noted = [store.keys(queue)[f"published:{series}"] for queue in queues]
    answers = await store.ask_all(
        [one._replace(keys=(*one.keys, note)) for one, note in zip(calls, noted, strict=True)]
    )
    return dict(zip(queues, answers, strict=True))
