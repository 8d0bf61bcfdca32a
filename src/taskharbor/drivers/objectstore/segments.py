"""Segments: immutable objects with rows of the attempt log and with the jobs that ended.

A segment is `THS1`, the length of its header (4 bytes, big endian), the header, then blocks. A block is a msgpack array of rows
(`rows.StoredRow`) or jobs (`stored_jobs`), compressed by zlib; the header says of each where it is and what it covers, so a
reader takes only what it needs: all row blocks come before all job blocks. Rows are in the order of their numbers throughout.
Jobs are so within a block; blocks of jobs may overlap, since jobs do not end in the order in which they came.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.packing import packed_array
from taskharbor.drivers.objectstore.rows import StoredRow
from taskharbor.drivers.objectstore.stored_jobs import job_decoder
from taskharbor.errors import SchemaMismatch
from taskharbor.jobs import JobRecord, Micros

MAGIC = b"THS1"
FORMAT = 1
_LENGTH = 4

ArchivedJob: TypeAlias = tuple[int, JobRecord]


class Block(msgspec.Struct, array_like=True, frozen=True, gc=False):
    offset: int
    """From the end of the header."""
    size: int
    """Compressed."""
    raw: int
    """And not."""
    count: int
    first: int
    last: int
    """The least and the greatest number."""
    first_id: str
    last_id: str
    """The least and the greatest job id."""
    oldest: Micros
    newest: Micros
    """The first and the last end."""


class SegmentHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    format: int
    queue: str
    fields: tuple[str, ...]
    """Of the jobs' records, in order."""
    row_blocks: list[Block]
    job_blocks: list[Block]


_decode_header = msgspec.msgpack.Decoder(SegmentHeader).decode
_decode_rows = msgspec.msgpack.Decoder(list[StoredRow]).decode
_decode_pieces = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class Segment:
    """A segment that was read. Blocks are unpacked when somebody needs them, and then kept."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.header, self.start = read_header(data, where)
        self._rows: dict[int, list[StoredRow]] = {}
        self._jobs: dict[int, list[ArchivedJob]] = {}
        self._ids: dict[int, dict[str, list[ArchivedJob]]] = {}
        self._decode_job: Callable[[bytes], ArchivedJob] = job_decoder(self.header.fields)

    @property
    def weight(self) -> int:
        """About how much memory it takes once everything is unpacked."""
        blocks = self.header.row_blocks + self.header.job_blocks
        return len(self.data) + 4 * sum(block.raw for block in blocks)

    def raw(self, block: Block) -> bytes:
        """A block as it stands in the object."""
        start = self.start + block.offset
        return self.data[start : start + block.size]

    def rows_in(self, block: Block) -> list[StoredRow]:
        rows = self._rows.get(block.offset)
        if rows is None:
            rows = self._rows[block.offset] = _decode_rows(zlib.decompress(self.raw(block)))
        return rows

    def jobs_in(self, block: Block) -> list[ArchivedJob]:
        jobs = self._jobs.get(block.offset)
        if jobs is None:
            pieces = _decode_pieces(zlib.decompress(self.raw(block)))
            jobs = self._jobs[block.offset] = [self._decode_job(piece) for piece in pieces]
        return jobs

    def _by_id(self, block: Block) -> dict[str, list[ArchivedJob]]:
        """Who asks for one job of a block often asks for hundreds."""
        by_id = self._ids.get(block.offset)
        if by_id is None:
            by_id = self._ids[block.offset] = {}
            for job in self.jobs_in(block):
                by_id.setdefault(job[1].id, []).append(job)
        return by_id

    # -- what is left -------------------------------------------------------------------------------------

    def rows_after(self, entry: SegmentEntry, number: int, limit: int) -> list[StoredRow]:
        found: list[StoredRow] = []
        for block in self.header.row_blocks:
            if block.last > number:
                found += [
                    row
                    for row in self.rows_in(block)
                    if row.number > number and entry.has_row(row.ended_at, row.number)
                ]
                if len(found) >= limit:
                    break
        return found[:limit]

    def rows_of(self, entry: SegmentEntry, job_id: str) -> list[StoredRow]:
        return [
            row
            for block in self.header.row_blocks
            if block.first_id <= job_id <= block.last_id
            for row in self.rows_in(block)
            if row.job_id == job_id and entry.has_row(row.ended_at, row.number)
        ]

    def job(self, entry: SegmentEntry, job_id: str) -> ArchivedJob | None:
        found: ArchivedJob | None = None
        for block in self.header.job_blocks:
            if block.first_id <= job_id <= block.last_id:
                for number, record in self._by_id(block).get(job_id, ()):
                    # An id that was removed and accepted anew may be here twice: the later one counts.
                    if _is_left(entry, number, record):
                        found = max(found, (number, record), key=_number) if found else (number, record)
        return found

    def jobs_left(self, entry: SegmentEntry, blocks: Iterable[Block] | None = None) -> Iterator[ArchivedJob]:
        for block in self.header.job_blocks if blocks is None else blocks:
            for number, record in self.jobs_in(block):
                if _is_left(entry, number, record):
                    yield number, record


def _is_left(entry: SegmentEntry, number: int, record: JobRecord) -> bool:
    assert record.finished_at_us is not None
    return entry.has_job(record.finished_at_us, number)


def _number(job: ArchivedJob) -> int:
    return job[0]


def read_header(data: bytes, where: str) -> tuple[SegmentHeader, int]:
    """The header, and where the blocks begin. `data` may be just the beginning of the object."""
    start = len(MAGIC) + _LENGTH
    if data[: len(MAGIC)] != MAGIC:
        raise SchemaMismatch(f"{where} is not a segment of TaskHarbor's log")
    end = start + int.from_bytes(data[len(MAGIC) : start], "big")
    header = _decode_header(data[start:end])
    if header.format != FORMAT:
        raise SchemaMismatch(
            f"{where} has format {header.format}, this version of TaskHarbor reads {FORMAT}: use a newer one"
        )
    return header, end


def size_with_rows(data: bytes, where: str) -> int:
    """How much of the object has all its rows, as far as this beginning tells. More than that: read so much, and ask again."""
    end = len(MAGIC) + _LENGTH + int.from_bytes(data[len(MAGIC) : len(MAGIC) + _LENGTH], "big")
    if len(data) < end:
        return end
    header, _ = read_header(data, where)
    return end + max((block.offset + block.size for block in header.row_blocks), default=0)


def packed_block(pieces: Sequence[bytes]) -> tuple[bytes, int]:
    """The block's bytes, and how many they were before compression."""
    raw = packed_array(pieces)
    return zlib.compress(raw, 1), len(raw)


def assembled(
    queue: str,
    fields: Sequence[str],
    row_blocks: Sequence[tuple[Block, bytes]],
    job_blocks: Sequence[tuple[Block, bytes]],
) -> bytes:
    """The object, from blocks whose offsets are still open."""
    offset = 0
    placed: list[list[Block]] = []
    for blocks in (row_blocks, job_blocks):
        row: list[Block] = []
        for block, data in blocks:
            row.append(msgspec.structs.replace(block, offset=offset, size=len(data)))
            offset += len(data)
        placed.append(row)
    header = msgspec.msgpack.encode(SegmentHeader(FORMAT, queue, tuple(fields), placed[0], placed[1]))
    parts = [data for blocks in (row_blocks, job_blocks) for _, data in blocks]
    return b"".join((MAGIC, len(header).to_bytes(_LENGTH, "big"), header, *parts))
