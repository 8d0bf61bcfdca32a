"""Jobs in chunks: large enough that what a chunk costs does not matter per job, small enough for any memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from taskharbor.alike import AlikeJobs
from taskharbor.drivers.validation import check_records
from taskharbor.jobs import JobRecord, Micros, UpdateFlags

CHUNK_JOBS = 1000
CHUNK_BYTES = 4 * 1024 * 1024

_Row: TypeAlias = tuple[
    str, str, str, bytes, str, dict[str, str], int, Micros, Micros, Micros,
    str | None, UpdateFlags | None, str | None, int, int, Micros, Micros,
]  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Row]).decode


def chunked(
    batches: Iterable[Sequence[JobRecord]], *, most_alike: int = CHUNK_JOBS
) -> Iterator[Sequence[JobRecord]]:
    """The same jobs in the same order, checked, never more than a chunk holds at once (a single large job is a chunk of its own).

    A store that knows `AlikeJobs` may take more of them at once: they come as such.
    """
    for batch in batches:
        if isinstance(batch, AlikeJobs):
            check_records([msgspec.structs.replace(batch.template, id="of each its own")])
        else:
            check_records(batch)
        most = most_alike if isinstance(batch, AlikeJobs) else CHUNK_JOBS
        for start in range(0, len(batch), most):
            yield from _split(batch[start : start + most])


def _split(jobs: Sequence[JobRecord]) -> Iterator[Sequence[JobRecord]]:
    if len(jobs) > 1 and _size(jobs) > CHUNK_BYTES:
        middle = len(jobs) // 2
        yield from _split(jobs[:middle])
        yield from _split(jobs[middle:])
    elif jobs:
        yield jobs


def _size(jobs: Sequence[JobRecord]) -> int:
    return sum(map(len, jobs.payloads if isinstance(jobs, AlikeJobs) else [job.payload for job in jobs]))


def pack(jobs: Sequence[JobRecord]) -> bytes:
    """New jobs as bytes: what an enqueue reads of a record, and nothing else."""
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
    return [
        JobRecord(
            id=row[0],
            type=row[1],
            queue=row[2],
            payload=row[3],
            codec=row[4],
            headers=row[5],
            priority=row[6],
            run_at_us=row[7],
            created_at_us=row[8],
            timeout_us=row[9],
            key=row[10],
            update=row[11],
            idempotency_key=row[12],
            max_attempts=row[13],
            max_stalls=row[14],
            backoff_min_us=row[15],
            backoff_max_us=row[16],
        )
        for row in _decode(data)
    ]
