"""Bulk reading and writing: a stream of the log per queue, blobs as keys of their own, portions noted beside their jobs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import chain, pairwise

from taskharbor.bulk.publish import KEEP_SERIES, KEEP_SINGLE
from taskharbor.bulk.stage import KEEP_STAGED, unpack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import JobShare, LogPage, LogState, LogStream
from taskharbor.drivers.redis.keys import tag
from taskharbor.drivers.redis.library import Call, Word
from taskharbor.drivers.redis.log import attempts_in, entries_from, page_call
from taskharbor.drivers.redis.records import STATES, place_in_line, stored_tail
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros

_LOOK = 500
"""Rows that are counted to tell how full the entries of a stream are."""
_CUT = 8
_PROBES = 256
"""Places that one call looks at."""
_MOST_PIECES = 512
_STAYS = 10
_BLOB_SECONDS = 2 * KEEP_STAGED // SECOND
"""Abandoned blobs are removed before; on a store that nobody writes to any more they go by themselves."""


# -- the attempt log ------------------------------------------------------------------------------------------


async def log_streams(store: Store) -> LogState:
    """The server writes one row after the other: a queue's counter is the end of its log."""
    key = f"{_control_prefix(store)}epoch"
    _, epoch = await store.client.commands([("SET", key, secrets.token_hex(4), "NX"), ("GET", key)])
    queues = list(await store.queues())
    marks = await store.client.commands(
        [("HMGET", store.keys(queue)["meta"], "row", "trimmed") for queue in queues]
    )
    streams = [
        LogStream(name=queue, queue=queue, last=int(last or 0), trimmed=int(trimmed or 0), is_dense=False)
        for queue, (last, trimmed) in zip(queues, marks, strict=True)
    ]
    return LogState(epoch.decode(), streams)


async def read_log(store: Store, call: op.ReadLog) -> LogPage:
    queue, after, until, limit = call.stream, call.after, call.until, call.limit
    number = store.numbers.get(queue)
    if number is None:
        number = (await store.queues()).get(queue, 0)
    (page,) = await store.ask_all((page_call(store, queue, after, until, limit),))
    found = [
        row
        for entry in entries_from(page)
        for row in attempts_in(entry, number, queue, after)
        if row[0] <= until
    ][:limit]
    return LogPage([attempt for _, _, attempt in found], found[-1][0] if len(found) == limit else until)


async def split_log(store: Store, call: op.SplitLog) -> list[int]:
    """A stream cannot say how many rows are between two of its ids. So it is cut at equal distances of time, again and again, and
    pieces without rows are left out; those that remain count alike."""
    queue, after, until = call.stream, call.after, call.until
    (page,) = await store.ask_all((page_call(store, queue, after, until, _LOOK),))
    entries = list(entries_from(page))
    found = sum(min(one.last, until) - max(one.first - 1, after) for one in entries)
    if found >= _LOOK:
        found = found * await store.client.command("XLEN", store.keys(queue)["attempts"]) // len(entries)
    wanted = min(_MOST_PIECES, found // call.rows)
    if wanted < 2:
        return []
    pieces = [(max(after, entries[0].first - 1), until)]
    while len(pieces) < 2 * wanted and pieces[0][1] - pieces[0][0] > _CUT:
        finer = [cut for low, high in pieces for cut in pairwise(_cut(low, high))]
        pieces = [
            piece for piece, is_used in zip(finer, await _used(store, queue, finer), strict=True) if is_used
        ]
    return sorted({pieces[len(pieces) * n // wanted][0] for n in range(1, wanted)} - {after})


def _cut(low: int, high: int) -> list[int]:
    return [low + (high - low) * n // _CUT for n in range(_CUT + 1)]


async def _used(store: Store, queue: str, pieces: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether there are rows in each."""
    found: list[int] = []
    for start in range(0, len(pieces), _PROBES):
        places = [low for low, _ in pieces[start : start + _PROBES]]
        found += await store.ask("log_probe", queue, 0, *places)
    return [
        last > 0 and first <= high
        for (_, high), first, last in zip(pieces, found[::2], found[1::2], strict=True)
    ]


# -- jobs -----------------------------------------------------------------------------------------------------


async def split_jobs(store: Store, call: op.SplitJobs) -> list[JobShare]:
    queues = {name: n for name, n in (await store.queues()).items() if call.queue in (None, name)}
    sizes = await store.client.commands([("ZCARD", store.keys(name)["jobs"]) for name in queues])
    total = sum(sizes)
    shares: list[JobShare] = []
    for (name, number), size in zip(queues.items(), sizes, strict=True):
        cuts = max(1, round(call.parts * size / total)) if size else 0
        found = await store.client.commands(
            [
                ("ZRANGE", store.keys(name)["jobs"], -rank, -rank, "WITHSCORES")
                for rank in sorted({size * n // cuts for n in range(1, cuts)} - {0})
            ]
        )
        edges = [None, *(f"{int(pair[1])}.{number}" for pair in found if pair), None]
        if size:
            shares += [JobShare(queue=name, after=low, until=high) for low, high in pairwise(edges)]
    return shares


async def remove(store: Store, job_ids: Sequence[str], now: Micros) -> list[JobState | JobError]:
    homes = await store.located(job_ids)
    groups: dict[str, list[str]] = {}
    for job_id, queue in homes.items():
        groups.setdefault(queue, []).append(job_id)
    answers = await store.ask_all([store.call("remove", queue, now, *ids) for queue, ids in groups.items()])
    found: dict[str, int] = {}
    for ids, codes in zip(groups.values(), answers, strict=True):
        found.update(zip(ids, codes, strict=True))
    return [_removed(job_id, found.get(job_id, -1)) for job_id in job_ids]


def _removed(job_id: str, code: int) -> JobState | JobError:
    if code < 0:
        return JobNotFound(job_id)
    if code >= _STAYS:
        return JobError(job_id, f"the job is {STATES[code - _STAYS]} and has not ended: cancel it first")
    return STATES[code]


# -- blobs ----------------------------------------------------------------------------------------------------


def _control_prefix(store: Store) -> str:
    """Of the keys that belong to no queue. They share a slot, and no queue's keys are named like them."""
    return f"{store.prefix}{{taskharbor}}:"


def _index(store: Store) -> str:
    return f"{_control_prefix(store)}blobs"


def _blob(store: Store, name: str) -> str:
    return f"{store.prefix}{{{tag(name)}}}:blob"


async def put_blob(store: Store, call: op.PutBlob) -> bool:
    index, key = _index(store), _blob(store, call.blob)
    if call.swaps:
        args = (call.data,) if call.expected is None else (call.data, call.expected)
        (is_swapped,) = await store.ask_all((Call("swap", (key,), args),))
        return bool(is_swapped)
    # The name first: a blob that is not in the index is found by nobody.
    await store.client.commands([("SADD", index, call.blob), ("EXPIRE", index, _BLOB_SECONDS)])
    await store.client.command("SET", key, call.data, "EX", _BLOB_SECONDS)
    return True


async def read_blobs(store: Store, names: Sequence[str]) -> list[bytes | None]:
    return await store.client.commands([("GET", _blob(store, name)) for name in names])


async def list_blobs(store: Store, folder: str) -> list[str]:
    indexed = [name.decode() for name in await store.client.command("SMEMBERS", _index(store))]
    names = sorted(name for name in indexed if name.startswith(f"{folder}/"))
    are_there = await store.client.commands([("EXISTS", _blob(store, name)) for name in names])
    return [name for name, is_there in zip(names, are_there, strict=True) if is_there]


async def drop_blobs(store: Store, names: Sequence[str]) -> list[None]:
    await store.client.commands([("UNLINK", _blob(store, name)) for name in names])
    await store.client.command("SREM", _index(store), *names)
    return [None] * len(names)


async def publish_blobs(store: Store, call: op.PublishBlobs) -> dict[str, int]:
    """In all queues at once on one server; in a cluster in each of them. Whether another queue knows an id is not looked at:
    writers make new ones."""
    queues: dict[str, dict[str, tuple[Word, ...]]] = {}
    for data in await read_blobs(store, call.names):
        for job in [] if data is None else unpack(data):
            queues.setdefault(job.queue, {}).setdefault(job.id, _words(job))
    if not queues:
        return {}
    await store.register(queues)
    keep = (KEEP_SINGLE if call.number < 0 else KEEP_SERIES) // SECOND
    portion = (call.number, call.portion, keep)
    calls = [
        store.call("publish", queue, call.now, *portion, *chain.from_iterable(jobs.values()))
        for queue, jobs in queues.items()
    ]
    noted = [store.keys(queue)[f"published:{call.series}"] for queue in queues]
    answers = await store.ask_all(
        [one._replace(keys=(*one.keys, note)) for one, note in zip(calls, noted, strict=True)]
    )
    return dict(zip(queues, answers, strict=True))


def _words(job: JobRecord) -> tuple[Word, ...]:
    """A job as `lua/publish.lua` takes it."""
    place = place_in_line(job) if job.key is None else ""
    return job.id, job.idempotency_key or "", place, max(job.run_at_us, 1), stored_tail(job)
