"""Rows of the log as they are stored, straight into columns: no object is made for a row."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from taskharbor.bulk.batches import fitted
from taskharbor.bulk.contract import Selection
from taskharbor.bulk.schemas import ATTEMPTS
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.rows import StoredRow
from taskharbor.drivers.objectstore.segments import Block, Segment

Row: TypeAlias = tuple[Any, ...]
"""In the order of `StoredRow`."""

_BATCH_ROWS = 10_000

_decode_rows: Callable[[bytes], list[Row]] = msgspec.msgpack.Decoder(list[tuple]).decode  # type: ignore[type-arg]

_STORED = StoredRow.__struct_fields__
NUMBER, _ENDED_AT = _STORED.index("number"), _STORED.index("ended_at")
_NAMES = {"seq": "number"}
_QUEUE = ATTEMPTS.get_field_index("queue")
_PLACES = [_STORED.index(_NAMES.get(field.name, field.name)) for field in ATTEMPTS if field.name != "queue"]
_KINDS = [pa.int64() if pa.types.is_timestamp(field.type) else field.type for field in ATTEMPTS]
del _KINDS[_QUEUE]


def rows_of_tail(tail: bytes, after: int, until: int) -> list[Row]:
    return [row for row in _decode_rows(tail) if after < row[NUMBER] <= until]


def row_blocks(
    blocks: Iterable[Block], entry: SegmentEntry, after: int, until: int, selection: Selection
) -> list[Block]:
    """Those that may hold wanted rows: all in one range of numbers, by their ends some can be left out."""
    gone = entry.rows_gone
    since, before = selection.since_us, selection.until_us
    return [
        block
        for block in blocks
        if block.last > after
        and block.first <= until
        and (gone is None or block.newest >= gone[0])
        and (since is None or block.newest >= since)
        and (before is None or block.oldest < before)
    ]


def rows_in(segment: Segment, block: Block, entry: SegmentEntry, after: int, until: int) -> list[Row]:
    rows = _decode_rows(zlib.decompress(segment.raw(block)))
    if block.first <= after or block.last > until:
        rows = [row for row in rows if after < row[NUMBER] <= until]
    gone = entry.rows_gone
    if gone is not None and block.oldest <= gone[0]:
        rows = [row for row in rows if entry.has_row(row[_ENDED_AT], row[NUMBER])]
    return rows


class AttemptBatches:
    """Collects rows into batches. They become columns at once: a thousand rows that live on would be the collector's work."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._collected: list[pa.RecordBatch] = []
        self._count = 0

    def add(self, queue: str, rows: list[Row]) -> Iterator[pa.RecordBatch]:
        """The batch that is full with these, if one is."""
        for start in range(0, len(rows), _BATCH_ROWS):
            chosen = _chosen(_batch(queue, rows[start : start + _BATCH_ROWS]), self._selection)
            self._collected.append(chosen)
            self._count += chosen.num_rows
            if self._count >= _BATCH_ROWS:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        collected, count = self._collected, self._count
        self._collected, self._count = [], 0
        if count:
            yield from joined(collected)


def joined(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """All of them as one."""
    if len(batches) == 1:
        yield batches[0]
    else:
        yield from pa.Table.from_batches(batches).combine_chunks().to_batches()


def _batch(queue: str, rows: list[Row]) -> pa.RecordBatch:
    stored = list(zip(*rows, strict=True))
    columns = [pa.array(stored[place], kind) for place, kind in zip(_PLACES, _KINDS, strict=True)]
    columns.insert(_QUEUE, pa.repeat(pa.scalar(queue, pa.string()), len(rows)))
    return fitted("attempts", columns)


def _chosen(batch: pa.RecordBatch, selection: Selection) -> pa.RecordBatch:
    """The queue was chosen before."""
    ended = batch.column("ended_at").cast(pa.int64())
    conditions = []
    if selection.type is not None:
        conditions.append(pc.equal(batch.column("type"), selection.type))
    if selection.state is not None:
        conditions.append(pc.equal(batch.column("state"), selection.state.value))
    if selection.since_us is not None:
        conditions.append(pc.greater_equal(ended, selection.since_us))
    if selection.until_us is not None:
        conditions.append(pc.less(ended, selection.until_us))
    for condition in conditions[1:]:
        conditions[0] = pc.and_(conditions[0], condition)
    return batch.filter(conditions[0]) if conditions else batch
