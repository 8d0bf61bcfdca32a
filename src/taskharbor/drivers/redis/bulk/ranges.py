"""Ranges of the queues' streams, and how they are shared out among tasks.

A stream cannot say how many rows are between two of its ids. So long ones are cut at equal distances of time, a look at each
piece tells roughly how many rows it has, and pieces are put together to shares of about the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from taskharbor.drivers.redis.log import place_of
from taskharbor.drivers.redis.packing import Word
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import InvalidRequest

ROWS_PER_PART = 20_000
"""A part of fewer rows costs more to start than to read."""
_PIECES_PER_PART = 16
_LOOK = 500
"""Rows of a piece that are counted; a third of a millisecond's work for the server is twice as many."""


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
    asked: list[tuple[Word, ...]] = []
    for one in ranges:
        stream = store.keys(one.queue)["attempts"]
        asked += (("XLEN", stream), ("XRANGE", stream, f"({one.after}", one.until, "COUNT", 1))
    answers = await store.connections.commands(asked)
    whole: list[tuple[Range, int]] = []
    for one, length, first in zip(ranges, answers[::2], answers[1::2], strict=True):
        if first:
            whole.append((one, length))
    total = sum(length for _, length in whole)
    count = min(parallelism, total // ROWS_PER_PART)
    if count < 2:
        return [[one for one, _ in whole]] if whole else []
    return _dealt(await _pieces(store, whole, count), count)


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
    found = await store.connections.commands(
        [
            ("XRANGE", store.keys(one.queue)["attempts"], f"({one.after}", one.until, "COUNT", _LOOK)
            for one in pieces
        ]
    )
    rows = list(map(len, found))
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
    stream = store.keys(one.queue)["attempts"]
    first, last = await store.connections.commands(
        [
            ("XRANGE", stream, f"({one.after}", one.until, "COUNT", 1),
            ("XREVRANGE", stream, one.until, f"({one.after}", "COUNT", 1),
        ]
    )
    if not first:
        return [one.after, one.until]
    low, high = place_of(first[0][0]) - 1, place_of(last[0][0])
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
