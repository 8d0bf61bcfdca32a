"""Making segments: from a queue's tail, and from smaller segments. Nothing here waits, so it can run in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.rows import StoredRow
from taskharbor.drivers.objectstore.segments import ArchivedJob, Block, Segment, assembled, packed_block
from taskharbor.drivers.objectstore.stored_jobs import FIELDS, encode_job
from taskharbor.jobs import JobState

BLOCK_ITEMS = 1000
BLOCK_BYTES = 256 * 1024

RowPiece: TypeAlias = tuple[StoredRow, bytes]
JobPiece: TypeAlias = tuple[ArchivedJob, bytes]
Placed: TypeAlias = tuple[Block, bytes]

_encode = msgspec.msgpack.Encoder().encode


class Built(msgspec.Struct, frozen=True):
    """A segment that was made, and what a queue's state will say of it."""

    data: bytes
    entry: SegmentEntry


def segment_of(name: str, queue: str, rows: Sequence[RowPiece], jobs: Sequence[JobPiece]) -> Built:
    """Rows and jobs in the order of their numbers."""
    counts = _counted([job for job, _ in jobs])
    return _built(name, 0, queue, _row_blocks(rows), _job_blocks(jobs), counts)


def merged(name: str, queue: str, parts: Sequence[tuple[SegmentEntry, Segment]]) -> Built:
    """One segment of several, in their order, or of one, without what is gone. Blocks that are whole are taken as they are."""
    rows: list[Placed] = []
    jobs: list[Placed] = []
    done = cancelled = 0
    for entry, segment in parts:
        is_current = segment.header.fields == FIELDS
        for block in segment.header.row_blocks:
            if entry.rows_gone is None or block.oldest > entry.rows_gone[0]:
                rows.append((block, segment.raw(block)))
            else:
                left = [row for row in segment.rows_in(block) if entry.has_row(row.ended_at, row.number)]
                rows += _row_blocks([(row, _encode(row)) for row in left])
        for block in segment.header.job_blocks:
            if (
                is_current
                and not entry.jobs_purged
                and (entry.jobs_gone is None or block.oldest > entry.jobs_gone[0])
            ):
                jobs.append((block, segment.raw(block)))
            else:
                jobs += _job_blocks([(job, encode_job(*job)) for job in segment.jobs_left(entry, [block])])
        done += entry.done
        cancelled += entry.cancelled
    level = max(entry.level for entry, _ in parts) + (len(parts) > 1)
    return _built(name, level, queue, rows, jobs, (done, cancelled))


def _counted(jobs: Sequence[ArchivedJob]) -> tuple[int, int]:
    done = sum(record.state is JobState.DONE for _, record in jobs)
    return done, len(jobs) - done


def _portions(sizes: Sequence[int]) -> Iterator[slice]:
    start = size = 0
    for at, length in enumerate(sizes):
        if at > start and (at - start >= BLOCK_ITEMS or size + length > BLOCK_BYTES):
            yield slice(start, at)
            start, size = at, 0
        size += length
    if len(sizes) > start:
        yield slice(start, len(sizes))


def _row_blocks(rows: Sequence[RowPiece]) -> list[Placed]:
    blocks: list[Placed] = []
    for portion in _portions([len(piece) for _, piece in rows]):
        part = [row for row, _ in rows[portion]]
        data, raw = packed_block([piece for _, piece in rows[portion]])
        ids = [row.job_id for row in part]
        ends = [row.ended_at for row in part]
        block = Block(
            0, 0, raw, len(part), part[0].number, part[-1].number, min(ids), max(ids), min(ends), max(ends)
        )
        blocks.append((block, data))
    return blocks


def _job_blocks(jobs: Sequence[JobPiece]) -> list[Placed]:
    blocks: list[Placed] = []
    for portion in _portions([len(piece) for _, piece in jobs]):
        part = [job for job, _ in jobs[portion]]
        data, raw = packed_block([piece for _, piece in jobs[portion]])
        ids = [record.id for _, record in part]
        ends = [record.finished_at_us or 0 for _, record in part]
        block = Block(0, 0, raw, len(part), part[0][0], part[-1][0], min(ids), max(ids), min(ends), max(ends))
        blocks.append((block, data))
    return blocks


def _built(
    name: str, level: int, queue: str, rows: list[Placed], jobs: list[Placed], counts: tuple[int, int]
) -> Built:
    data = assembled(queue, FIELDS, rows, jobs)
    row_blocks = [block for block, _ in rows]
    job_blocks = [block for block, _ in jobs]
    entry = SegmentEntry(
        name=name,
        level=level,
        size=len(data),
        rows=sum(block.count for block in row_blocks),
        first_row=min((block.first for block in row_blocks), default=0),
        last_row=max((block.last for block in row_blocks), default=0),
        first_row_id=min((block.first_id for block in row_blocks), default=""),
        last_row_id=max((block.last_id for block in row_blocks), default=""),
        oldest_row=min((block.oldest for block in row_blocks), default=0),
        done=counts[0],
        cancelled=counts[1],
        first_job=min((block.first for block in job_blocks), default=0),
        last_job=max((block.last for block in job_blocks), default=0),
        first_job_id=min((block.first_id for block in job_blocks), default=""),
        last_job_id=max((block.last_id for block in job_blocks), default=""),
        oldest_job=min((block.oldest for block in job_blocks), default=0),
    )
    return Built(data, entry)
