"""Rows of the log as they lie in the stream, straight into rows of the table: nothing else is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from taskharbor.drivers.redis.log import QUEUES, ROW, place_of
from taskharbor.drivers.redis.stored import FRONT, INFLIGHT, LEASE, STATES, decode_head
from taskharbor.jobs import Outcome

_OUTCOME_NAMES = tuple(outcome.value for outcome in Outcome)
_STATE_NAMES = tuple(state.value for state in STATES)

_decode_error = msgspec.msgpack.Decoder(tuple[str, str]).decode

Row = tuple[Any, ...]


def rows_from(page: Iterable[Any], number: int, queue: str) -> list[Row]:
    """Entries of a queue's stream as rows of the table. `number`: the queue's own."""
    number %= QUEUES
    rows: list[Row] = []
    add = rows.append
    row_layout, front_layout, lease_layout = ROW.unpack_from, FRONT.unpack_from, LEASE.unpack_from
    id_at, front_size, lease_size = ROW.size, FRONT.size, LEASE.size
    for stream_id, (_, row) in page:
        ended_at, outcome, state, id_size, error_size = row_layout(row)
        error_at = id_at + id_size
        at = error_at + error_size
        error_type = error_message = None
        if error_size:
            error_type, error_message = _decode_error(row[error_at:at])
        _, head_size, state_before, _, fence, _, _ = front_layout(row, at)
        at += front_size
        worker = expires_at = reserved_at = None
        if state_before == INFLIGHT:
            expires_at, reserved_at, worker_size = lease_layout(row, at)
            at += lease_size + worker_size
            worker = row[at - worker_size : at].decode()
        head = decode_head(row[at : at + head_size])
        key = head.key
        add(
            (
                place_of(stream_id) * QUEUES + number, row[id_at:error_at].decode(), queue, head.type,
                None if key is False else key, head.priority, fence, worker, head.created_at, head.run_at, reserved_at,
                expires_at, ended_at, _OUTCOME_NAMES[outcome], _STATE_NAMES[state], error_type, error_message,
                head.payload_size,
            )
        )  # fmt: skip
    return rows
