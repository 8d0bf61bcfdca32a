"""A row of the log while it is being made, many of them as Arrow, and the errors they tell of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import pyarrow as pa

from taskharbor.bulk.tables import ATTEMPTS
from taskharbor.jobs import Micros


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


_columns_of = attrgetter(*ATTEMPTS.names)


def to_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = zip(*map(_columns_of, rows), strict=True) if rows else [()] * len(ATTEMPTS)
    arrays = [pa.array(column, type=field.type) for field, column in zip(ATTEMPTS, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ATTEMPTS)


def make_error(chance: random.Random, type: str) -> tuple[str, str]:
    """Type and message of an error, with the ids, numbers and addresses that real messages carry."""
    number = chance.randrange(10_000, 10_000_000)
    match chance.choices(range(5), (40, 25, 20, 10, 5))[0]:
        case 0:
            host = f"api-{chance.randrange(4)}.example.com"
            seconds = chance.choice((5, 10, 30))
            return "TimeoutError", f"https://{host}/v1/{type}/{number}: no answer within {seconds} s"
        case 1:
            address = f"10.0.{chance.randrange(4)}.{chance.randrange(2, 250)}:5432"
            return "ConnectionRefusedError", f"connection to {address} refused"
        case 2:
            seconds = chance.randrange(1, 60)
            return "ServiceUnavailable", f"503 for request {number:08x}, retry after {seconds} s"
        case 3:
            return "KeyError", "'customer_id'"
        case _:
            return "ValueError", f"order {number}: amount {chance.random() * 1000:.2f} is not allowed"
