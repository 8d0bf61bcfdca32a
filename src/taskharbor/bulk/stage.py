"""Staging: tasks put the jobs of a bulk write down as blobs of the store, where no reader of a queue sees them.

`staging/<write>/<task>/<time>-<number>` holds jobs, `staging/<write>/<task>/<time>-end` lists what the task staged. Write and
task stand there as digests, so that every store can hold the name. The time is the writer's, and tells which blobs are abandoned.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from taskharbor.alike import AlikeJobs
from taskharbor.drivers.contract import DAY, Driver
from taskharbor.drivers.validation import check_records
from taskharbor.errors import InvalidRequest, TaskHarborError
from taskharbor.ids import new_id, new_ids
from taskharbor.jobs import JobRecord, Micros, UpdateFlags

FOLDER: Final = "staging"
KEEP_STAGED: Final[Micros] = 3 * DAY
BLOB_JOBS: Final = 10_000
"""Jobs of one blob. A blob costs a round trip, and on an object store money."""
BLOB_BYTES: Final = 4 * 1024 * 1024
SINGLE: Final = -1
"""The number of a write that belongs to no series."""

_END: Final = "end"
_OVERHEAD: Final = 150
"""Bytes of a stored job besides its payload, about."""


class StagingLost(TaskHarborError):
    """What tasks had staged is gone, so the write cannot be published. Nothing of it became a job: write it again."""


# -- names of writes ------------------------------------------------------------------------------------------


def new_write() -> str:
    """The name of a write of its own. A name is published at most once, however often somebody tries."""
    return f"write-{new_id()}"


def numbered_write(series: str, number: int) -> str:
    """The name of one batch of a stream. Of a series the store remembers the latest number that was published."""
    return f"{series}/{number}"


def series_of(write: str) -> tuple[str, int]:
    """(series, number) of a write; a write of its own is a series of one."""
    series, separator, number = write.rpartition("/")
    return (series, int(number)) if separator and number.isdecimal() and len(number) < 20 else (write, SINGLE)


# -- jobs as bytes --------------------------------------------------------------------------------------------

_Row: TypeAlias = tuple[
    str, str, str, bytes, str, dict[str, str], int, Micros, Micros, Micros,
    str | None, UpdateFlags | None, str | None, int, int, Micros, Micros,
]  # fmt: skip
_FIELDS: Final = (
    "id", "type", "queue", "payload", "codec", "headers", "priority", "run_at_us", "created_at_us", "timeout_us",
    "key", "update", "idempotency_key", "max_attempts", "max_stalls", "backoff_min_us", "backoff_max_us",
)  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Row]).decode
NOTHING: Final = _encode([])
"""A blob without jobs."""


def pack(jobs: Sequence[JobRecord]) -> bytes:
    """New jobs as bytes: the fields that an enqueue reads."""
    if isinstance(jobs, AlikeJobs):
        _, kind, queue, _, *rest = (getattr(jobs.template, name) for name in _FIELDS)
        ids = new_ids(len(jobs))
        return _encode([(i, kind, queue, p, *rest) for i, p in zip(ids, jobs.payloads, strict=True)])
    return _encode(
        [
            (
                job.id, job.type, job.queue, job.payload, job.codec, job.headers, job.priority, job.run_at_us,
                job.created_at_us, job.timeout_us, job.key, job.update, job.idempotency_key, job.max_attempts,
                job.max_stalls, job.backoff_min_us, job.backoff_max_us,
            )
            for job in jobs
        ]
    )  # fmt: skip


def unpack(data: bytes) -> list[JobRecord]:
    """Raises InvalidRequest for what is no such blob, or holds jobs that no driver stores."""
    try:
        rows = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"this blob holds no jobs: {error}") from None
    jobs = [
        JobRecord(
            id=row[0], type=row[1], queue=row[2], payload=row[3], codec=row[4], headers=row[5], priority=row[6],
            run_at_us=row[7], created_at_us=row[8], timeout_us=row[9], key=row[10], update=row[11],
            idempotency_key=row[12], max_attempts=row[13], max_stalls=row[14], backoff_min_us=row[15],
            backoff_max_us=row[16],
        )
        for row in rows
    ]  # fmt: skip
    check_records(jobs)
    return jobs


def chunked(batches: Iterable[Sequence[JobRecord]], jobs: int) -> Iterator[Sequence[JobRecord]]:
    """The same jobs in the same order, up to `jobs` and `BLOB_BYTES` at once. Small batches are joined; a single large job is a
    chunk of its own; `AlikeJobs` stay such. Raises InvalidRequest for a job that no driver stores."""
    joined: list[JobRecord] = []
    for batch in batches:
        check_records([replace(batch.template, id="new")] if isinstance(batch, AlikeJobs) else batch)
        if len(batch) >= jobs or isinstance(batch, AlikeJobs):
            yield from _split(joined, jobs)
            yield from _split(batch, jobs)
            joined = []
        else:
            joined += batch
            if len(joined) >= jobs or _size(joined) > BLOB_BYTES:
                yield from _split(joined, jobs)
                joined = []
    yield from _split(joined, jobs)


def _split(batch: Sequence[JobRecord], jobs: int) -> Iterator[Sequence[JobRecord]]:
    if len(batch) > jobs or (len(batch) > 1 and _size(batch) > BLOB_BYTES):
        middle = jobs if len(batch) > jobs else len(batch) // 2
        yield from _split(batch[:middle], jobs)
        yield from _split(batch[middle:], jobs)
    elif batch:
        yield batch


def _size(jobs: Sequence[JobRecord]) -> int:
    return sum(map(len, jobs.payloads if isinstance(jobs, AlikeJobs) else [job.payload for job in jobs]))


# -- staging --------------------------------------------------------------------------------------------------


class StagedBlob(msgspec.Struct, array_like=True, frozen=True):
    name: str
    jobs: int


class TaskEnd(msgspec.Struct, array_like=True):
    """All that one task staged."""

    blobs: list[StagedBlob]
    sizes: dict[str, int]
    """Bytes by queue, about what the jobs add to it."""


_decode_end = msgspec.msgpack.Decoder(TaskEnd).decode


def wall_clock() -> Micros:
    return time.time_ns() // 1000


def folder_of(write: str) -> str:
    return f"{FOLDER}/{_digest(write)}"


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


class TaskStaging:
    """One task's part of a write, on its way into the store."""

    def __init__(self, driver: Driver, write: str, task: str) -> None:
        self._driver = driver
        self._folder = f"{folder_of(write)}/{_digest(task)}"
        self._end = TaskEnd([], {})

    async def put(self, jobs: Sequence[JobRecord]) -> None:
        end = self._end
        name = f"{self._folder}/{wall_clock():015x}-{len(end.blobs):06d}"
        end.blobs.append(StagedBlob(name, len(jobs)))
        alike = (
            {jobs.template.queue: _size(jobs) + _OVERHEAD * len(jobs)}
            if isinstance(jobs, AlikeJobs)
            else None
        )
        for queue, size in (
            alike.items() if alike else [(job.queue, len(job.payload) + _OVERHEAD) for job in jobs]
        ):
            end.sizes[queue] = end.sizes.get(queue, 0) + size
        await self._driver.put_blob(name, pack(jobs))

    async def complete(self) -> int:
        await self._driver.put_blob(f"{self._folder}/{wall_clock():015x}-{_END}", _encode(self._end))
        return sum(one.jobs for one in self._end.blobs)

    async def drop(self) -> None:
        await self._driver.drop_blobs(await self._driver.list_blobs(self._folder))


async def ends_of(driver: Driver, write: str, tasks: Sequence[str]) -> dict[str, TaskEnd]:
    """What the tasks staged, of those that came to their end and whose blobs are all there."""
    there = await driver.list_blobs(folder_of(write))
    folders = {name.rpartition("/")[0]: name for name in there if name.endswith(f"-{_END}")}
    wanted = {task: f"{folder_of(write)}/{_digest(task)}" for task in tasks}
    names = {task: folders[folder] for task, folder in wanted.items() if folder in folders}
    found = {
        task: _decode_end(data)
        for task, data in zip(names, await driver.read_blobs(list(names.values())), strict=True)
        if data is not None
    }
    present = set(there)
    return {task: end for task, end in found.items() if all(one.name in present for one in end.blobs)}


async def drop_staged(driver: Driver, write: str) -> None:
    await driver.drop_blobs(await driver.list_blobs(folder_of(write)))


async def drop_abandoned(driver: Driver, kept: Iterable[str], now: Micros) -> None:
    """Remove what was staged for writes that nobody ever published. `kept`: writes that somebody is publishing."""
    folders: dict[str, list[str]] = {}
    for name in await driver.list_blobs(FOLDER):
        folders.setdefault("/".join(name.split("/")[:2]), []).append(name)
    for write in kept:
        folders.pop(folder_of(write), None)
    old = [names for names in folders.values() if max(map(_staged_at, names)) < now - KEEP_STAGED]
    if old:
        await driver.drop_blobs([name for names in old for name in names])


def _staged_at(name: str) -> Micros:
    """A name that tells no time is of nobody's write: it is as old as can be."""
    try:
        return int(name.rpartition("/")[2].partition("-")[0], 16)
    except ValueError:
        return 0
