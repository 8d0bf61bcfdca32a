"""Staging: tasks put the jobs of a bulk write down as blobs of the store, where no reader of a queue sees them.

`staging/<write>/<task>/<time>-<number>` holds jobs, `staging/<write>/<task>/<time>-end` lists what the task staged. Write and
task stand there as digests, so that every store can hold the name. The time is the writer's, and tells which blobs are abandoned.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec.structs import asdict, replace

from taskharbor.drivers.contract import DAY, Driver
from taskharbor.drivers.operations import Enqueue
from taskharbor.drivers.validation import check_records, check_texts, given_fields
from taskharbor.errors import InvalidRequest, TaskHarborError
from taskharbor.jobs import JobRecord, Micros
from taskharbor.requests import AlikeJobs, new_id, new_ids

FOLDER: Final = "staging"
KEEP_STAGED: Final[Micros] = 3 * DAY
BLOB_JOBS: Final = 10_000
"""The most jobs of one blob. A blob costs a round trip, and on an object store money."""
BLOB_BYTES: Final = 4 * 1024 * 1024
SINGLE: Final = -1
"""The number of a write that belongs to no series."""

_END: Final = "end"


class StagingLost(TaskHarborError):
    """Staged jobs of a write are gone, so it cannot be published. None of them became a job: write it again."""


# -- names of writes ------------------------------------------------------------------------------------------


def new_write() -> str:
    """Return the name of a single write. A name is published at most once, however often it is tried."""
    return f"write-{new_id()}"


def numbered_write(series: str, number: int) -> str:
    """Return the name of one batch of a stream. The store remembers the latest published number of a series."""
    return f"{series}/{number}"


def series_of(write: str) -> tuple[str, int]:
    """Return series and number of a write; a single write is a series of one."""
    series, separator, number = write.rpartition("/")
    return (series, int(number)) if separator and number.isdecimal() and len(number) < 20 else (write, SINGLE)


# -- jobs as bytes --------------------------------------------------------------------------------------------

_FIELDS: Final = [(field.name, field.type) for field in given_fields(JobRecord)]
# A struct that the garbage collector ignores, unlike a tuple.
_Row: Any = msgspec.defstruct("_Row", _FIELDS, array_like=True, gc=False)
_values: Callable[[JobRecord], tuple[Any, ...]] = attrgetter(*(name for name, _ in _FIELDS))
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Row]).decode


def pack(jobs: Sequence[JobRecord]) -> bytes:
    """Pack new jobs into bytes: the fields that an enqueue reads."""
    if not isinstance(jobs, AlikeJobs):
        return _encode(list(map(_values, jobs)))
    _, kind, queue, _, *rest = _values(jobs.template)
    ids = new_ids(len(jobs))
    return _encode([_Row(i, kind, queue, p, *rest) for i, p in zip(ids, jobs.payloads, strict=True)])


def unpack(data: bytes) -> list[JobRecord]:
    """Unpack jobs. Raises InvalidRequest for another kind of blob, or for jobs that no driver stores."""
    try:
        jobs = [JobRecord(**asdict(row)) for row in _decode(data)]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"this blob holds no jobs: {error}") from None
    check_texts(Enqueue(jobs, 0))
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
    """The list of all that one task staged."""

    blobs: list[StagedBlob]
    sizes: dict[str, int]
    """Bytes by queue: about the size that the jobs add to it."""


_decode_end = msgspec.msgpack.Decoder(TaskEnd).decode


def wall_clock() -> Micros:
    return time.time_ns() // 1000


def folder_of(write: str) -> str:
    return f"{FOLDER}/{_digest(write)}"


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


class TaskStaging:
    """One task's part of a write, while it is staged."""

    def __init__(self, driver: Driver, write: str, task: str) -> None:
        self._driver = driver
        self._folder = f"{folder_of(write)}/{_digest(task)}"
        self._end = TaskEnd([], {})

    async def put(self, jobs: Sequence[JobRecord]) -> None:
        end, data = self._end, pack(jobs)
        name = f"{self._folder}/{wall_clock():015x}-{len(end.blobs):06d}"
        end.blobs.append(StagedBlob(name, len(jobs)))
        alike = {jobs.template.queue: len(jobs)} if isinstance(jobs, AlikeJobs) else None
        for queue, count in (alike or Counter(job.queue for job in jobs)).items():
            end.sizes[queue] = end.sizes.get(queue, 0) + len(data) * count // len(jobs)
        await self._driver.put_blob(name, data)

    async def complete(self) -> int:
        await self._driver.put_blob(f"{self._folder}/{wall_clock():015x}-{_END}", _encode(self._end))
        return sum(one.jobs for one in self._end.blobs)

    async def drop(self) -> None:
        await self._driver.drop_blobs(await self._driver.list_blobs(self._folder))


async def ends_of(driver: Driver, write: str, tasks: Sequence[str]) -> dict[str, TaskEnd]:
    """Return the lists of the tasks that finished and whose blobs are all there."""
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
    """Remove staged jobs of writes that nobody published. `kept`: writes that are being published."""
    folders: dict[str, list[str]] = {}
    for name in await driver.list_blobs(FOLDER):
        folders.setdefault("/".join(name.split("/")[:2]), []).append(name)
    for write in kept:
        folders.pop(folder_of(write), None)
    old = [names for names in folders.values() if max(map(_staged_at, names)) < now - KEEP_STAGED]
    if old:
        await driver.drop_blobs([name for names in old for name in names])


def _staged_at(name: str) -> Micros:
    """Return the time in a blob's name. A name without a time belongs to no write, so it counts as oldest."""
    try:
        return int(name.rpartition("/")[2].partition("-")[0], 16)
    except ValueError:
        return 0
