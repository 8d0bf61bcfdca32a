"""The attempt log by its cursor: where it ends, how far a number of rows goes, which ranges lie between two cursors.

Within a log rows are numbered in the order they were written, and every write of its object follows another: what a state that
has landed says is the end of its log is one, nothing can appear before it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from taskharbor.bulk.contract import HistoryGone, Selection
from taskharbor.drivers.objectstore.bulk.attempts import NUMBER, row_blocks, rows_in, rows_of_tail
from taskharbor.drivers.objectstore.bulk.cursors import Cursor, cursor_at, parsed
from taskharbor.drivers.objectstore.bulk.logs import Log, Logs
from taskharbor.drivers.objectstore.bulk.shares import Range
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.locating import Place
from taskharbor.drivers.objectstore.segments import Block, Segment

_EVERYTHING = Selection()


async def latest(logs: Logs) -> str:
    ends = [((log.queue, log.shard), log.last) for log in await logs.all()]
    return str(cursor_at(logs.catalog.store_id, sorted(ends)))


async def ranges_between(logs: Logs, after: str, until: str) -> list[Range]:
    """What is to be read. Raises HistoryGone where some of it is gone."""
    first, last = _parsed(logs, after), _parsed(logs, until)
    ranges = _ahead(first, last, await logs.all())
    for one in ranges:
        check_history(logs, one.log, one.after, is_strict=one.is_strict)
    return ranges


def check_history(logs: Logs, log: Log, after: int, *, is_strict: bool) -> None:
    """Raises HistoryGone where retention removed rows that somebody has yet to read."""
    if is_strict and log.trimmed > after:
        raise HistoryGone(
            f"{logs.blobs.place}: rows of the attempt log of queue {log.queue!r} after {after} were removed by retention before "
            "this reader came to them. Keep the log longer (keep_attempts of the queues), or begin with a fresh checkpoint"
        )


def _parsed(logs: Logs, text: str) -> Cursor:
    return parsed(text, logs.catalog.store_id, logs.blobs.place)


def _ahead(first: Cursor, last: Cursor, logs: Iterable[Log]) -> list[Range]:
    return [
        Range(log, after, until, first.is_strict(place))
        for log in logs
        if (after := first.at(place := (log.queue, log.shard))) < (until := last.at(place))
    ]


# -- so many rows ---------------------------------------------------------------------------------------------


class _Item(NamedTuple):
    """Rows of a log that come one after the other: those of a segment, of one of its blocks, or a single one."""

    last: int
    """The number of the last one. What ends first is taken first, whatever its log."""
    place: Place
    rows: int | None
    """None: not known without a look into it."""
    after: int
    until: int
    entry: SegmentEntry | None = None
    segment: Segment | None = None
    block: Block | None = None


async def limited(logs: Logs, after: str, until: str, rows: int | None) -> str:
    first, last = _parsed(logs, after), _parsed(logs, until)
    ends = {place: max(first.at(place), last.at(place)) for place in (*first.logs(), *last.logs())}
    if rows is not None:
        ranges = _ahead(first, last, await logs.all())
        items = [item for one in ranges for item in _items(one)]
        if _could_be_more(ranges, rows):
            taken, is_all = await _taken(logs, items, rows)
            if not is_all:
                begun = {place: first.at(place) for place in ends}
                return str(cursor_at(first.store_id, sorted((begun | taken).items()), is_open=first.is_open))
    if all(number == last.at(place) for place, number in ends.items()):
        return until
    if all(number == first.at(place) for place, number in ends.items()):
        return after
    return str(cursor_at(last.store_id, sorted(ends.items()), is_open=last.is_open))


def _could_be_more(ranges: Sequence[Range], rows: int) -> bool:
    most = 0
    for one in ranges:
        entries = [entry for entry in one.log.segments if entry.last_row > one.after]
        most += sum(entry.rows for entry in entries)
        most += len(rows_of_tail(one.log.tail, one.after, one.until))
    return most > rows


def _items(one: Range) -> list[_Item]:
    log, after, until = one.log, one.after, one.until
    place = (log.queue, log.shard)
    items = []
    for entry in log.segments:
        if entry.rows and entry.last_row > after and entry.first_row <= until:
            is_whole = entry.first_row > after and entry.last_row <= until
            count = entry.rows if is_whole else None
            items.append(_Item(min(entry.last_row, until), place, count, after, until, entry))
    return items + _single_rows(place, [row[NUMBER] for row in rows_of_tail(log.tail, after, until)])


def _single_rows(place: Place, numbers: Iterable[int]) -> list[_Item]:
    return [_Item(number, place, 1, 0, 0) for number in numbers]


async def _taken(logs: Logs, items: list[_Item], rows: int) -> tuple[dict[Place, int], bool]:
    """The places after so many rows, about in the order of time, and whether that is all there are.

    Whole segments are counted without a look into them; only one that would be too much is read, down to its rows.
    """
    heap = [(item.last, at, item) for at, item in enumerate(items)]
    heapify(heap)
    serial = len(heap)
    taken: dict[Place, int] = {}
    left = rows
    while heap:
        _, _, item = heappop(heap)
        if item.rows is not None and item.rows <= left:
            taken[item.place] = item.last
            left -= item.rows
            continue
        if left == 0:
            return taken, False
        for inner in await _opened(logs, item):
            heappush(heap, (inner.last, serial, inner))
            serial += 1
    return taken, True


async def _opened(logs: Logs, item: _Item) -> list[_Item]:
    entry = item.entry
    assert entry is not None
    segment = item.segment
    if segment is None:
        segment = await logs.segment_of_rows(item.place, entry)
        blocks = row_blocks(segment.header.row_blocks, entry, item.after, item.until, _EVERYTHING)
        return [_block_item(item, segment, block) for block in blocks]
    assert item.block is not None
    rows = rows_in(segment, item.block, entry, item.after, item.until)
    return _single_rows(item.place, [row[NUMBER] for row in rows])


def _block_item(item: _Item, segment: Segment, block: Block) -> _Item:
    gone = item.entry.rows_gone if item.entry is not None else None
    is_whole = block.first > item.after and block.last <= item.until
    count = block.count if is_whole and (gone is None or block.oldest > gone[0]) else None
    last = min(block.last, item.until)
    return _Item(last, item.place, count, item.after, item.until, item.entry, segment, block)
