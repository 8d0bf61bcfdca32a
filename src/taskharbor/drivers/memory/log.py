"""The attempt log: compact rows, made into `Attempt` only when somebody reads them.

A row is written for every lease that ends, which is as hot as a path gets; a reader comes by now and then.
"""

from __future__ import annotations

from itertools import islice
from typing import TypeAlias

from taskharbor.drivers.memory.lines import Ledger, Line
from taskharbor.jobs import Attempt, Failure, JobRecord, JobState, Micros, Outcome

Row: TypeAlias = tuple[
    Micros,  # ended_at first, then seq: a row is its own item in its queue's line, in the order retention takes it
    int,
    str,  # outcome and state by their plain values: a row of nothing but atoms is none of the garbage collector's business
    str,
    Failure | None,
    str,
    str,
    str,
    str | None,
    int,
    int,
    str | None,
    Micros,
    Micros,
    Micros | None,
    Micros | None,
    int,
]


class AttemptLog:
    """All rows in the order of their commits, and each job's own."""

    def __init__(self) -> None:
        self._rows: Ledger[Row] = Ledger()
        self._by_job: dict[str, Row | list[Row]] = {}
        """Nearly every job has one row only, which then needs no list around it."""
        self._next_seq = 1
        self.trimmed = 0
        """The highest number of a row that retention removed."""

    @property
    def last(self) -> int:
        return self._next_seq - 1

    def append(
        self,
        line: Line,
        record: JobRecord,
        outcome: Outcome,
        state: JobState,
        error: Failure | None,
        now: Micros,
    ) -> None:
        """Log what ends now with the record as it is before the change. `line` holds the rows of its queue."""
        seq, job_id = self._next_seq, record.id
        row = (
            now,
            seq,
            outcome._value_,
            state._value_,
            error,
            job_id,
            record.queue,
            record.type,
            record.key,
            record.priority,
            record.fence,
            record.worker,
            record.created_at_us,
            record.run_at_us,
            record.reserved_at_us,
            record.expires_at_us,
            len(record.payload),
        )
        self._next_seq = seq + 1
        self._rows.append(row)
        line.push(row)
        own = self._by_job.setdefault(job_id, row)
        if own is not row:
            if isinstance(own, list):
                own.append(row)
            else:
                self._by_job[job_id] = [own, row]

    def read(self, after: int, limit: int) -> tuple[list[Attempt], int]:
        """Up to `limit` rows behind number `after`, and the number to go on from."""
        rows = list(islice(self._rows.after(after), limit))
        return [_attempt(row) for row in rows], rows[-1][1] if rows else after

    def of_job(self, job_id: str) -> list[Attempt]:
        return [_attempt(row) for row in _listed(self._by_job.get(job_id))]

    def prune(self, line: Line, ended_by: Micros, limit: int) -> int:
        """Remove up to `limit` rows of one queue that ended at `ended_by` or before."""
        removed = 0
        while removed < limit:
            row = line.head()
            if row is None or row[0] > ended_by:
                break
            line.pop()
            self._rows.remove(row[1])
            self.trimmed = max(self.trimmed, row[1])
            rest = [own for own in _listed(self._by_job.pop(row[5])) if own is not row]
            if rest:
                self._by_job[row[5]] = rest
            removed += 1
        return removed


def _listed(rows: Row | list[Row] | None) -> list[Row]:
    if rows is None:
        return []
    return rows if isinstance(rows, list) else [rows]


def _attempt(row: Row) -> Attempt:
    error = row[4]
    return Attempt(
        ended_at_us=row[0],
        seq=row[1],
        outcome=Outcome(row[2]),
        state=JobState(row[3]),
        error_type=None if error is None else error.type,
        error_message=None if error is None else error.message,
        job_id=row[5],
        queue=row[6],
        type=row[7],
        key=row[8],
        priority=row[9],
        fence=row[10],
        worker=row[11],
        created_at_us=row[12],
        run_at_us=row[13],
        reserved_at_us=row[14],
        lease_expires_at_us=row[15],
        payload_size=row[16],
    )
