"""Tables cut into ranges of blocks: every row is read by exactly one part, in the order it lies on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from taskharbor.errors import InvalidRequest

_BLOCKS_PER_PART = 256
"""Two megabytes: less costs more to start than to read."""
_BLOCKS_PER_STATEMENT = 16_384
"""A few seconds' worth: while a statement runs, the server keeps all dead rows that it might still see, those of the
queue's busiest table among them, and claims have to step over them."""


class Blocks(msgspec.Struct, frozen=True):
    table: str
    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.table}:{self.first}:{self.end}"


def shared_out(sizes: Sequence[tuple[str, int]], parallelism: int) -> list[list[Blocks]]:
    """About `parallelism` shares of all tables together. A large table is cut up; small ones share a part."""
    shares = []
    for low, high in spans(0, sum(size for _, size in sizes), parallelism, _BLOCKS_PER_PART):
        share, offset = [], 0
        for table, size in sizes:
            first, end = max(low - offset, 0), min(high - offset, size)
            if first < end:
                share.append(Blocks(table, first, end))
            offset += size
        shares.append(share)
    return shares


def in_steps(share: Iterable[Blocks]) -> Iterator[Blocks]:
    """The same blocks in pieces that are read by one statement each."""
    for whole in share:
        for first in range(whole.first, whole.end, _BLOCKS_PER_STATEMENT):
            yield Blocks(whole.table, first, min(first + _BLOCKS_PER_STATEMENT, whole.end))


def spans(after: int, until: int, parts: int, least: int) -> list[tuple[int, int]]:
    """The numbers above `after` up to `until`, in at most `parts` shares of at least `least` where there are so many."""
    size = until - after
    if size <= 0:
        return []
    count = max(1, min(parts, size // least))
    return list(pairwise([after + size * n // count for n in range(count + 1)]))


def written(share: Iterable[Blocks]) -> str:
    return ",".join(map(str, share))


def parsed(text: str) -> list[Blocks]:
    share = []
    for item in text.split(",") if text else []:
        match item.rsplit(":", 2):
            case [table, first, end] if first.isdecimal() and end.isdecimal():
                share.append(Blocks(table, int(first), int(end)))
            case _:
                raise InvalidRequest(f"{item!r} is not a range of blocks: pass on a part as it was planned")
    return share
