"""Ranges of the queues' streams, and how they are shared out among tasks.

A stream cannot say how many rows are between two of its ids. So long ones are cut at equal distances of time, a look at each
piece tells roughly how many rows it has, and pieces are put together to shares of about the same size. Rows share entries of a
stream, so a cut may go through one; who reads a range leaves out the rows that are not of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from taskharbor.drivers.redis.log import entries_from, page_call
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import InvalidRequest

ROWS_PER_PART = 20_000
"""A part of fewer rows costs more to start than to read."""
_PIECES_PER_PART = 16
_LOOK = 500
"""Rows of a piece that are counted."""


class Range(msgspec.Struct, array_like=True, frozen=True):
    """The rows of a queue after one number up to and including another."""

    queue: str
    after: int
    until: int
    is_strict: bool
    """Whether it is an error when retention has taken some of them."""
    is_resumed: bool = False
    """Whether it begins behind a row that was there, and not somewhere in between."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Range]).decode


def written(ranges: Sequence[Range]) -> str:
    return _encode(ranges).decode()


def parsed(text: object) -> list[Range]:
    try:
        return _decode(str(text))
    except msgspec.MsgspecError:
        raise InvalidRequest(f"{str(text)[:60]!r} are no ranges: pass on a part as it was planned") from None


async def shared_out(store: Store, ranges: Sequence[Range], parallelism: int) -> list[list[Range]]:
    """About `parallelism` shares of all ranges together. None for a range without rows."""
    lengths = await store.connections.commands(
        [("XLEN", store.keys(one.queue)["attempts"]) for one in ranges]
    )
    begins = await _looks(store, ranges)
    whole: list[tuple[Range, int]] = []
    for one, length, (rows, entries) in zip(ranges, lengths, begins, strict=True):
        if rows:
            # As full as the first entries are, all of them may be.
            whole.append((one, rows if rows < _LOOK else length * rows // entries))
    total = sum(length for _, length in whole)
    count = min(parallelism, total // ROWS_PER_PART)
    if count < 2:
        return [[one for one, _ in whole]] if whole else []
    return _dealt(await _pieces(store, whole, count), count)


async def _looks(store: Store, ranges: Sequence[Range]) -> list[tuple[int, int]]:
    """How many rows each has, counted up to some hundred, and in how many entries."""
    pages = await store.ask_all([page_call(store, one.queue, one.after, one.until, _LOOK) for one in ranges])
    return [(_rows_of(page, one), len(page) // 2) for one, page in zip(ranges, pages, strict=True)]


def _rows_of(page: Sequence[Any], one: Range) -> int:
    return sum(min(entry.last, one.until) - max(entry.first - 1, one.after) for entry in entries_from(page))


async def _pieces(store: Store, whole: Sequence[tuple[Range, int]], count: int) -> list[tuple[Range, float]]:
    """Each with about how many rows it has."""
    total = sum(length for _, length in whole)
    pieces: list[Range] = []
    for one, length in whole:
        edges = await _edges(store, one, max(1, round(_PIECES_PER_PART * count * length / total)))
        pieces += [
            Range(one.queue, low, high, one.is_strict, one.is_resumed and low == one.after)
            for low, high in pairwise(edges)
        ]
    rows = [min(number, _LOOK) for number, _ in await _looks(store, pieces)]
    large = sum(number == _LOOK for number in rows) or 1
    # Nothing more is known of those than how many rows they have together, at most.
    rest = max(_LOOK, (total - sum(number for number in rows if number < _LOOK)) / large)
    return [
        (one, float(number) if number < _LOOK else rest)
        for one, number in zip(pieces, rows, strict=True)
        if number
    ]


async def _edges(store: Store, one: Range, pieces: int) -> list[int]:
    if pieces == 1:
        return [one.after, one.until]
    (page,) = await store.ask_all((page_call(store, one.queue, one.after, one.until, 1),))
    first = next(entries_from(page), None)
    if first is None:
        return [one.after, one.until]
    low, high = max(one.after, first.first - 1), one.until
    inner = {low + (high - low) * n // pieces for n in range(1, pieces)} - {one.after, one.until}
    return [one.after, *sorted(inner), one.until]


def _dealt(pieces: Sequence[tuple[Range, float]], count: int) -> list[list[Range]]:
    total = sum(weight for _, weight in pieces)
    shares: list[list[Range]] = [[] for _ in range(count)]
    done = 0.0
    for one, weight in pieces:
        # By where its middle lies.
        share = shares[min(count - 1, int((done + weight / 2) * count / total))]
        done += weight
        if share and share[-1].queue == one.queue and share[-1].until == one.after:
            share[-1] = msgspec.structs.replace(share[-1], until=one.until)
        else:
            share.append(one)
    return [share for share in shares if share]
