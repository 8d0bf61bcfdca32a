"""Jobs as they are stored, straight into columns. Those in a state are read as of some moment, as everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from taskharbor.bulk.batches import fitted
from taskharbor.bulk.contract import Selection
from taskharbor.bulk.schemas import JOBS
from taskharbor.drivers.objectstore.archived import ARCHIVED_STATES
from taskharbor.drivers.objectstore.bulk.attempts import joined
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.segments import Block, Segment
from taskharbor.drivers.objectstore.stored_jobs import FIELDS, job_decoder
from taskharbor.jobs import JobState, Micros

Job: TypeAlias = tuple[Any, ...]
"""Number and record, in the order of `FIELDS`."""

_BATCH_JOBS = 10_000
_BATCH_BYTES = 16_000_000
_STEP = 1000
"""Jobs that become columns at once. Payloads may be large."""

_PLACE = {name: at for at, name in enumerate(FIELDS, 1)}
_NAMES = {"lease_expires_at": "expires_at_us"}
"""Columns that have another name in records; instants have theirs with an ending."""
_NUMBER = 0
_STATE, _TYPE, _RUN_AT, _CREATED_AT = (
    _PLACE[name] for name in ("state", "type", "run_at_us", "created_at_us")
)
_FINISHED_AT = _PLACE["finished_at_us"]
_SCHEDULED, _READY = JobState.SCHEDULED.value, JobState.READY.value

_decode_jobs: Callable[[memoryview | bytes], list[Job]] = msgspec.msgpack.Decoder(list[tuple]).decode  # type: ignore[type-arg]
_decode_pieces = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_encode_json = msgspec.json.Encoder().encode


def _stored_name(column: str, kind: pa.DataType) -> str:
    return _NAMES.get(column, f"{column}_us" if pa.types.is_timestamp(kind) else column)


_COLUMNS = [
    (
        _PLACE[_stored_name(field.name, field.type)],
        pa.int64() if pa.types.is_timestamp(field.type) else field.type,
    )
    for field in JOBS
]
_HEADERS = _PLACE["headers"]


def may_be_archived(selection: Selection) -> bool:
    return selection.state is None or selection.state in ARCHIVED_STATES


def count_of(jobs: memoryview) -> int:
    """How many a state has: `packing.array_head` wrote it."""
    return int.from_bytes(jobs[1:5], "big")


def jobs_of_state(jobs: memoryview, fields: Sequence[str], now: Micros, selection: Selection) -> list[Job]:
    found = [_as_read(job, now) for job in _decoded(jobs, fields)]
    return _chosen(found, selection)


def jobs_of_block(segment: Segment, block: Block, entry: SegmentEntry, selection: Selection) -> list[Job]:
    jobs = _decoded(zlib.decompress(segment.raw(block)), segment.header.fields)
    if entry.jobs_gone is not None or entry.jobs_purged:
        jobs = [job for job in jobs if entry.has_job(job[_FINISHED_AT], job[_NUMBER])]
    return _chosen(jobs, selection)


def _decoded(data: memoryview | bytes, fields: Sequence[str]) -> list[Job]:
    if tuple(fields) == FIELDS:
        return _decode_jobs(data)
    # Written by another version of TaskHarbor.
    decode = job_decoder(fields)
    jobs = (decode(piece) for piece in _decode_pieces(data))
    return [(number, *msgspec.structs.astuple(record)) for number, record in jobs]


def _as_read(job: Job, now: Micros) -> Job:
    """A scheduled job whose time has come reads as ready."""
    if job[_STATE] not in (_SCHEDULED, _READY):
        return job
    state = _SCHEDULED if job[_RUN_AT] > now else _READY
    return job if state == job[_STATE] else (*job[:_STATE], state, *job[_STATE + 1 :])


def _chosen(jobs: list[Job], selection: Selection) -> list[Job]:
    """The queue was chosen before."""
    if selection.type is not None:
        jobs = [job for job in jobs if job[_TYPE] == selection.type]
    if selection.state is not None:
        jobs = [job for job in jobs if job[_STATE] == selection.state]
    since, until = selection.since_us, selection.until_us
    if since is not None:
        jobs = [job for job in jobs if job[_CREATED_AT] >= since]
    if until is not None:
        jobs = [job for job in jobs if job[_CREATED_AT] < until]
    return jobs


class JobBatches:
    """Collects jobs into batches that are neither small nor too large for anybody's memory."""

    def __init__(self) -> None:
        self._collected: list[pa.RecordBatch] = []
        self._count = 0
        self._weight = 0

    def add(self, jobs: Sequence[Job]) -> Iterator[pa.RecordBatch]:
        """The batches that are full with these."""
        for start in range(0, len(jobs), _STEP):
            some = _batch(jobs[start : start + _STEP])
            self._collected.append(some)
            self._count += some.num_rows
            self._weight += some.nbytes
            if self._count >= _BATCH_JOBS or self._weight >= _BATCH_BYTES:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        collected, self._collected = self._collected, []
        self._count = self._weight = 0
        if collected:
            yield from joined(collected)


def _batch(jobs: Sequence[Job]) -> pa.RecordBatch:
    stored: list[Sequence[Any]] = list(zip(*jobs, strict=True))
    stored[_HEADERS] = [_encode_json(headers).decode() if headers else None for headers in stored[_HEADERS]]
    return fitted("jobs", [pa.array(stored[place], kind) for place, kind in _COLUMNS])
