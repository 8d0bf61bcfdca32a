"""The tail of a queue's attempt log: the rows that are in no segment yet."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Protocol

import msgspec

from taskharbor.drivers.memory.lines import Line
from taskharbor.drivers.memory.log import AttemptLog
from taskharbor.drivers.objectstore.numbers import Numbering
from taskharbor.drivers.objectstore.rows import StoredRow, attempts_of, row_of
from taskharbor.jobs import Attempt, Failure, JobRecord, JobState, Micros, Outcome

_encode = msgspec.msgpack.Encoder().encode


class Owner(Protocol):
    touched: bool


class TailLog(AttemptLog):
    """Rows in the order of their numbers, and beside each the bytes it is written as."""

    def __init__(self, queue: str, owner: Owner, numbering: Numbering) -> None:
        self.queue = queue
        self.rows: list[StoredRow] = []
        self.pieces: list[bytes] = []
        self.size = 0
        """Bytes of all pieces."""
        self.numbering = numbering
        self.trimmed = 0
        """The greatest number of a row that retention removed, from here or from a segment."""
        self._owner = owner

    def append(
        self,
        line: Line,
        record: JobRecord,
        outcome: Outcome,
        state: JobState,
        error: Failure | None,
        now: Micros,
    ) -> None:
        row = row_of(self.numbering.next(), record, outcome, state, error, now)
        self.restore(row, _encode(row))
        self._owner.touched = True

    def restore(self, row: StoredRow, piece: bytes) -> None:
        self.rows.append(row)
        self.pieces.append(piece)
        self.size += len(piece)

    def after(self, number: int) -> list[StoredRow]:
        return self.rows[bisect_right(self.rows, number, key=_number) :]

    def of_job(self, job_id: str) -> list[Attempt]:
        return attempts_of(self.queue, (row for row in self.rows if row.job_id == job_id))

    def prune(self, line: Line, ended_by: Micros, limit: int) -> int:
        due = [row.number for row in self.rows if row.ended_at <= ended_by][: max(limit, 0)]
        self.note_trimmed(due)
        self.remove(due)
        return len(due)

    def note_trimmed(self, numbers: Iterable[int]) -> None:
        self.trimmed = max(self.trimmed, *numbers, 0)

    def remove_first(self, count: int) -> None:
        if count:
            del self.rows[:count]
            self.size -= sum(map(len, self.pieces[:count]))
            del self.pieces[:count]
            self._owner.touched = True

    def remove(self, numbers: Iterable[int]) -> None:
        gone = set(numbers)
        if not gone:
            return
        kept = [
            (row, piece) for row, piece in zip(self.rows, self.pieces, strict=True) if row.number not in gone
        ]
        self.rows = [row for row, _ in kept]
        self.pieces = [piece for _, piece in kept]
        self.size = sum(map(len, self.pieces))
        self._owner.touched = True


def _number(row: StoredRow) -> int:
    return row.number
