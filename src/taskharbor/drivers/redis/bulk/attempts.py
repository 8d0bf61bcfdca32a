"""Rows of the log as they lie in the stream, straight into rows of the table: nothing else is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskharbor.drivers.redis.bulk.ranges import Range
from taskharbor.drivers.redis.log import QUEUES, entries_from
from taskharbor.drivers.redis.stored import STATES
from taskharbor.jobs import Outcome

_OUTCOME_NAMES = tuple(outcome.value for outcome in Outcome)
_STATE_NAMES = tuple(state.value for state in STATES)

Row = tuple[Any, ...]


def rows_from(page: Sequence[Any], number: int, one: Range) -> list[Row]:
    """A page of a queue's stream as rows of the table. `number`: the queue's own."""
    number %= QUEUES
    rows: list[Row] = []
    add = rows.append
    queue = one.queue
    for entry in entries_from(page):
        worker, expires_at, reserved_at, _ = entry.lease
        error_type, error_message = entry.error
        ended_at, outcome, state = entry.ended_at, _OUTCOME_NAMES[entry.outcome], _STATE_NAMES[entry.state]
        for place, job_id, fence, head in entry.rows():
            if one.after < place <= one.until:
                key = head.key
                add(
                    (
                        place * QUEUES + number, job_id, queue, head.type, None if key is False else key, head.priority,
                        fence, worker, head.created_at, head.run_at, reserved_at, expires_at, ended_at, outcome, state,
                        error_type, error_message, head.payload_size,
                    )
                )  # fmt: skip
    return rows
