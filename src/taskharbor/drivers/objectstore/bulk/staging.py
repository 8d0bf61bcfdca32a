"""What tasks put down for a write: objects with some of their jobs each, and one more when all are there.

`staging/<write>/<task>/<when>-<number>-<jobs>` holds jobs, `staging/<write>/<task>/<when>-end` says what the task staged. The
time in a name is that of whoever wrote it, and only tells what was forgotten long ago.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from taskharbor.alike import AlikeJobs
from taskharbor.bulk.chunks import chunked, pack, unpack
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.bulk.logs import together
from taskharbor.drivers.objectstore.bulk.writes import Staged
from taskharbor.drivers.objectstore.folding import wall_clock
from taskharbor.drivers.objectstore.naming import escaped
from taskharbor.ids import new_ids
from taskharbor.jobs import SECOND, JobRecord, Micros

FOLDER: Final = "staging"
KEEP_STAGED: Final[Micros] = 3 * 86_400 * SECOND
PORTION: Final = 10_000
"""Jobs that are put down, and published, at once: each time a queue's whole state is written,"""
PORTION_BYTES: Final = 8 * 1024 * 1024
"""and a state is written and read in one piece."""
OVERHEAD: Final = 150
"""Bytes of a job in a state besides its payload, about."""

_END = "end"
_PLAIN, _ZLIB = b"\0", b"\1"

_encode = msgspec.msgpack.Encoder().encode
_decode_chunks = msgspec.msgpack.Decoder(list[bytes]).decode


class TaskEnd(msgspec.Struct, array_like=True):
    """All that a task staged."""

    staged: list[Staged]
    sizes: dict[str, int]
    """Bytes by queue, about what they will add to its state."""


_decode_end = msgspec.msgpack.Decoder(TaskEnd).decode


def folder_of(write: str) -> str:
    return f"{FOLDER}/{escaped(write)}"


class Load:
    """What becomes one object: chunks of jobs, each with its id."""

    def __init__(self) -> None:
        self.jobs = 0
        self.chunks: list[bytes] = []
        self.sizes: dict[str, int] = {}
        """Bytes by queue, about what they will add to its state."""

    def add(self, jobs: Sequence[JobRecord]) -> None:
        self.jobs += len(jobs)
        if isinstance(jobs, AlikeJobs):
            self.chunks.append(_packed_alike(jobs))
            payloads = sum(map(len, jobs.payloads))
            self._weigh(jobs.template.queue, payloads + OVERHEAD * len(jobs))
        else:
            self.chunks.append(pack(jobs))
            for job in jobs:
                self._weigh(job.queue, len(job.payload) + OVERHEAD)

    def _weigh(self, queue: str, size: int) -> None:
        self.sizes[queue] = self.sizes.get(queue, 0) + size

    @property
    def is_full(self) -> bool:
        return self.jobs >= PORTION or sum(self.sizes.values()) >= PORTION_BYTES


def loads(batches: Iterable[Sequence[JobRecord]]) -> Iterator[Load]:
    load = Load()
    for chunk in chunked(batches, most_alike=PORTION):
        load.add(chunk)
        if load.is_full:
            yield load
            load = Load()
    if load.jobs:
        yield load


def _packed_alike(jobs: AlikeJobs) -> bytes:
    one, payloads = jobs.template, jobs.payloads
    return _encode(
        [
            (
                job_id, one.type, one.queue, payload, one.codec, one.headers, one.priority, one.run_at_us,
                one.created_at_us, one.timeout_us, one.key, one.update, one.idempotency_key, one.max_attempts,
                one.max_stalls, one.backoff_min_us, one.backoff_max_us,
            )
            for job_id, payload in zip(new_ids(len(payloads)), payloads, strict=True)
        ]
    )  # fmt: skip


class TaskStaging:
    """One task's part of a write, on its way in."""

    def __init__(self, blobs: Blobs, write: str, task: str) -> None:
        self._blobs = blobs
        self._folder = f"{folder_of(write)}/{escaped(task)}"
        self._end = TaskEnd([], {})

    async def put(self, load: Load) -> None:
        end = self._end
        name = f"{self._folder}/{wall_clock():015x}-{len(end.staged):06d}-{load.jobs}"
        end.staged.append(Staged(name, load.jobs))
        for queue, size in load.sizes.items():
            end.sizes[queue] = end.sizes.get(queue, 0) + size
        packed = _encode(load.chunks)
        if self._blobs.is_remote:
            data = await asyncio.to_thread(lambda: _ZLIB + zlib.compress(packed, 1))
        else:
            data = _PLAIN + packed
        await self._blobs.put(name, data)

    async def complete(self) -> int:
        await self._blobs.put(f"{self._folder}/{wall_clock():015x}-{_END}", _encode(self._end))
        return sum(one.jobs for one in self._end.staged)

    async def drop(self) -> None:
        await self._blobs.delete(await self._blobs.names(self._folder))


# -- the other end ----------------------------------------------------------------------------------------------


async def ends_of(blobs: Blobs, write: str, tasks: Sequence[str]) -> dict[str, TaskEnd]:
    """What the tasks staged, of those that came to their end and whose jobs are all there."""
    there = await blobs.names(folder_of(write))
    present = set(there)
    ends: dict[str, str] = {}
    for name in there:
        _, _, task, last = name.split("/")
        if last.endswith(f"-{_END}"):
            ends[task] = name
    wanted = {task: ends[escaped(task)] for task in tasks if escaped(task) in ends}
    blobs_read = await together(wanted.values(), blobs.read)
    found: dict[str, TaskEnd] = {}
    for task, blob in zip(wanted, blobs_read, strict=True):
        if blob is not None:
            end = _decode_end(blob.data)
            if all(one.name in present for one in end.staged):
                found[task] = end
    return found


async def staged_jobs(blobs: Blobs, name: str) -> list[JobRecord] | None:
    blob = await blobs.read(name)
    if blob is None:
        return None
    packed = memoryview(blob.data)[1:]
    chunks = _decode_chunks(zlib.decompress(packed) if blob.data[:1] == _ZLIB else packed)
    return [job for chunk in chunks for job in unpack(chunk)]


async def forget_staged(blobs: Blobs, write: str) -> None:
    await blobs.delete(await blobs.names(folder_of(write)))


async def sweep(blobs: Blobs, kept: Sequence[str], now: Micros) -> None:
    """Remove what was staged for writes that nobody ever published. `kept`: writes that somebody is publishing."""
    folders: dict[str, list[str]] = {}
    for name in await blobs.names(FOLDER):
        folders.setdefault("/".join(name.split("/")[:2]), []).append(name)
    for write in kept:
        folders.pop(folder_of(write), None)
    old = [names for names in folders.values() if max(map(_made_at, names)) < now - KEEP_STAGED]
    await blobs.delete([name for names in old for name in names])


def _made_at(name: str) -> Micros:
    try:
        return int(name.rpartition("/")[2].partition("-")[0], 16)
    except ValueError:
        # Nothing of ours.
        return 2**63
