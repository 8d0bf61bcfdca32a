"""Which rows and jobs of a segment retention takes next: the oldest, in the order of (end, number).

Only blocks that can hold one of them are unpacked. Things end nearly in the order in which they are stored, so of a large
segment that is one or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from taskharbor.drivers.objectstore.entries import Mark, SegmentEntry
from taskharbor.drivers.objectstore.rows import StoredRow
from taskharbor.drivers.objectstore.segments import ArchivedJob, Block, Segment
from taskharbor.jobs import Micros

T = TypeVar("T")


class Due(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    gone: Mark | None
    """Everything up to here is gone once these are."""
    oldest: Micros
    """The first end among what is left then; 0 where nothing is."""


def due_rows(entry: SegmentEntry, segment: Segment, ended_by: Micros, limit: int) -> Due[StoredRow]:
    def left(block: Block) -> Iterable[tuple[Mark, StoredRow]]:
        for row in segment.rows_in(block):
            if entry.has_row(row.ended_at, row.number):
                yield (row.ended_at, row.number), row

    return _due(segment.header.row_blocks, entry.rows_gone, left, ended_by, limit)


def due_jobs(entry: SegmentEntry, segment: Segment, finished_by: Micros, limit: int) -> Due[ArchivedJob]:
    def left(block: Block) -> Iterable[tuple[Mark, ArchivedJob]]:
        for number, record in segment.jobs_left(entry, [block]):
            yield (record.finished_at_us or 0, number), (number, record)

    return _due(segment.header.job_blocks, entry.jobs_gone, left, finished_by, limit)


def _due(
    blocks: Sequence[Block],
    gone: Mark | None,
    left_in: Callable[[Block], Iterable[tuple[Mark, T]]],
    by: Micros,
    limit: int,
) -> Due[T]:
    waiting = sorted((block for block in blocks if gone is None or block.newest >= gone[0]), key=_oldest)
    waiting.reverse()
    found: list[tuple[Mark, T]] = []
    while waiting and waiting[-1].oldest <= by:
        if len(found) > limit and found[limit][0][0] < waiting[-1].oldest:
            break
        found += left_in(waiting.pop())
        found.sort(key=_mark)
    items = [pair for pair in found if pair[0][0] <= by][:limit]
    rest = [pair[0][0] for pair in found[len(items) : len(items) + 1]]
    rest += [block.oldest for block in waiting[-1:]]
    return Due([item for _, item in items], items[-1][0] if items else gone, min(rest, default=0))


def _oldest(block: Block) -> Micros:
    return block.oldest


def _mark(pair: tuple[Mark, T]) -> Mark:
    return pair[0]
