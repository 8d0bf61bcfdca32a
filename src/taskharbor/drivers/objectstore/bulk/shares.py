"""What tasks read: pieces of logs, dealt out so that each task gets about as many rows.

A segment is a piece of its own, and a large one is several: a task takes some of its blocks, without anybody having looked
into it before. What is in no segment yet is read from the queue's state, or from wherever it has gone by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from taskharbor.drivers.objectstore.bulk.attempts import NUMBER, rows_of_tail
from taskharbor.drivers.objectstore.bulk.logs import Log
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.locating import Place
from taskharbor.errors import InvalidRequest

ROWS_PER_PART = 20_000
"""A part of fewer rows costs more to start than to read."""
JOBS_PER_PART = 10_000

_PIECES_PER_PART = 4


class Portion(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A share of a segment's blocks: from one fraction to another."""

    first: int = 0
    end: int = 1
    of: int = 1

    def of_blocks(self, blocks: Sequence[T]) -> Sequence[T]:
        count = len(blocks)
        return blocks[count * self.first // self.of : count * self.end // self.of]


class RowPiece(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The rows of a log after one number up to and including another, as far as a segment has them."""

    queue: str
    shard: int
    after: int
    until: int
    is_strict: bool
    """Whether it is an error when retention has taken some of them."""
    entry: SegmentEntry | None = None
    """None: wherever they are."""
    portion: Portion = Portion()

    @property
    def place(self) -> Place:
        return self.queue, self.shard


class JobPiece(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Jobs of a queue that are in a segment, or (None) in its state."""

    queue: str
    shard: int
    entry: SegmentEntry | None
    portion: Portion = Portion()

    @property
    def place(self) -> Place:
        return self.queue, self.shard


T = TypeVar("T")
P = TypeVar("P", RowPiece, JobPiece)


class Pieces(Generic[P]):
    """How a share is written into a plan."""

    def __init__(self, kind: type[P]) -> None:
        self._decoder = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]

    def written(self, pieces: Sequence[P]) -> str:
        return msgspec.json.encode(pieces).decode()

    def parsed(self, text: object) -> list[P]:
        try:
            found: list[P] = self._decoder.decode(str(text))
        except msgspec.MsgspecError:
            raise InvalidRequest("these are no pieces of a log: pass on a part as it was planned") from None
        return found


ROWS = Pieces(RowPiece)
JOBS = Pieces(JobPiece)


class Range(msgspec.Struct, frozen=True):
    """The rows of a log after one number up to and including another."""

    log: Log
    after: int
    until: int
    is_strict: bool = False


# -- rows -----------------------------------------------------------------------------------------------------


def shared_rows(ranges: Sequence[Range], parallelism: int) -> list[list[RowPiece]]:
    """About `parallelism` shares of all ranges together. None where there are no rows."""
    total = sum(weight for one in ranges for _, weight in _row_pieces(one, None))
    count = max(1, min(parallelism, total // ROWS_PER_PART))
    most = None if count == 1 else max(1, total // (count * _PIECES_PER_PART))
    return _dealt([piece for one in ranges for piece in _row_pieces(one, most)], count)


def _row_pieces(one: Range, most: int | None) -> Iterator[tuple[RowPiece, int]]:
    """With how many rows each has at most, about. `most`: larger ones are cut."""
    log, after, until = one.log, one.after, one.until
    covered = after
    for entry in log.segments:
        covered = max(covered, entry.last_row)
        if entry.rows and entry.last_row > after and entry.first_row <= until:
            piece = RowPiece(log.queue, log.shard, after, until, one.is_strict, entry)
            for portion in _portions(entry.rows, most):
                yield msgspec.structs.replace(piece, portion=portion), entry.rows // portion.of
    numbers = [row[NUMBER] for row in rows_of_tail(log.tail, covered, until)]
    step = len(numbers) if most is None else most
    for start in range(0, len(numbers), max(1, step)):
        some = numbers[start : start + step]
        yield RowPiece(log.queue, log.shard, covered, some[-1], one.is_strict), len(some)
        covered = some[-1]


def _portions(count: int, most: int | None) -> list[Portion]:
    if most is None:
        return [Portion()]
    pieces = max(1, -(-count // most))
    return [Portion(number, number + 1, pieces) for number in range(pieces)]


# -- jobs -----------------------------------------------------------------------------------------------------


def shared_jobs(found: Sequence[tuple[JobPiece, int]], parallelism: int) -> list[list[JobPiece]]:
    """Shares of whole states and segments, each with how many jobs it has. One share or none: they are too few to share."""
    total = sum(count for _, count in found)
    shares = max(1, min(parallelism, total // JOBS_PER_PART))
    most = max(1, total // (shares * _PIECES_PER_PART))
    pieces: list[tuple[JobPiece, int]] = []
    for piece, count in found:
        portions = [Portion()] if piece.entry is None else _portions(count, most)
        pieces += [(msgspec.structs.replace(piece, portion=one), count // one.of) for one in portions]
    return _dealt(pieces, shares)


# -- dealing --------------------------------------------------------------------------------------------------


def _dealt(pieces: Sequence[tuple[P, int]], count: int) -> list[list[P]]:
    """In order, so that neighbours stay together where they can."""
    total = sum(weight for _, weight in pieces) or 1
    shares: list[list[P]] = [[] for _ in range(count)]
    done = 0
    for piece, weight in pieces:
        # By where its middle lies.
        share = shares[min(count - 1, (2 * done + weight) * count // (2 * total))]
        done += weight
        if share and (joined := _joined(share[-1], piece)) is not None:
            share[-1] = joined
        else:
            share.append(piece)
    return [share for share in shares if share]


def _joined(one: P, other: P) -> P | None:
    if one.place != other.place:
        return None
    if one.entry is not None and one.entry == other.entry:
        portion = msgspec.structs.replace(one.portion, end=other.portion.end)
        return msgspec.structs.replace(one, portion=portion)
    if isinstance(one, RowPiece) and isinstance(other, RowPiece) and one.entry is other.entry is None:
        return msgspec.structs.replace(one, until=other.until)
    return None
