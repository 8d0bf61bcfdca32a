"""A row of the log while it is being made, and many of them as Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import pyarrow as pa

from taskharbor.bulk.schemas import ATTEMPTS
from taskharbor.jobs import JobState, Micros, Outcome


@dataclass(slots=True)
class Row:
    """The columns of `ATTEMPTS`, by the same names; instants in microseconds."""

    seq: int
    job_id: str
    queue: str
    type: str
    key: str | None
    priority: int
    fence: int
    worker: str | None
    created_at: Micros
    run_at: Micros
    reserved_at: Micros | None
    lease_expires_at: Micros | None
    ended_at: Micros
    outcome: str
    state: str
    error_type: str | None
    error_message: str | None
    payload_size: int

    @property
    def until(self) -> Micros:
        """Up to when the lease was valid."""
        assert self.lease_expires_at is not None
        return min(self.ended_at, self.lease_expires_at)


# Enum members as plain text: looking each up per row would cost more than all else about a row.
DONE, DEAD, CANCELLED = str(Outcome.DONE), str(Outcome.DEAD), str(Outcome.CANCELLED)
RETRIED, RELEASED, EXPIRED = str(Outcome.RETRIED), str(Outcome.RELEASED), str(Outcome.EXPIRED)
MERGED, REQUEUED = str(Outcome.MERGED), str(Outcome.REQUEUED)
READY, SCHEDULED = str(JobState.READY), str(JobState.SCHEDULED)


_columns_of = attrgetter(*ATTEMPTS.names)


def to_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = zip(*map(_columns_of, rows), strict=True) if rows else [()] * len(ATTEMPTS)
    arrays = [pa.array(column, type=field.type) for field, column in zip(ATTEMPTS, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ATTEMPTS)
