"""The columns of every table, once: what bulk stores produce, what Spark is told, what the lake keeps.

Instants are microseconds in UTC. Order, types and nullability are binding: Spark takes Arrow batches as they are.
"""

from __future__ import annotations

import pyarrow as pa

from taskharbor.bulk.contract import Table

INSTANT = pa.timestamp("us", tz="UTC")


def _schema(*fields: tuple[str, pa.DataType, bool]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=nullable) for name, kind, nullable in fields])


ATTEMPTS = _schema(
    ("seq", pa.int64(), False),
    ("job_id", pa.string(), False),
    ("queue", pa.string(), False),
    ("type", pa.string(), False),
    ("key", pa.string(), True),
    ("priority", pa.int32(), False),
    ("fence", pa.int64(), False),
    ("worker", pa.string(), True),
    ("created_at", INSTANT, False),
    ("run_at", INSTANT, False),
    ("reserved_at", INSTANT, True),
    ("lease_expires_at", INSTANT, True),
    ("ended_at", INSTANT, False),
    ("outcome", pa.string(), False),
    ("state", pa.string(), False),
    ("error_type", pa.string(), True),
    ("error_message", pa.string(), True),
    ("payload_size", pa.int32(), False),
)

JOBS = _schema(
    ("id", pa.string(), False),
    ("queue", pa.string(), False),
    ("type", pa.string(), False),
    ("state", pa.string(), False),
    ("key", pa.string(), True),
    ("idempotency_key", pa.string(), True),
    ("priority", pa.int32(), False),
    ("run_at", INSTANT, False),
    ("created_at", INSTANT, False),
    ("attempts", pa.int32(), False),
    ("stalls", pa.int32(), False),
    ("fence", pa.int64(), False),
    ("max_attempts", pa.int32(), False),
    ("max_stalls", pa.int32(), False),
    ("worker", pa.string(), True),
    ("reserved_at", INSTANT, True),
    ("lease_expires_at", INSTANT, True),
    ("failed_at", INSTANT, True),
    ("finished_at", INSTANT, True),
    ("last_error", pa.string(), True),
    ("merged_into", pa.string(), True),
    ("codec", pa.string(), False),
    ("headers", pa.string(), True),  # JSON
    ("payload", pa.binary(), False),
    ("result", pa.binary(), True),
)

QUEUES = _schema(
    ("queue", pa.string(), False),
    ("scheduled", pa.int64(), False),
    ("ready", pa.int64(), False),
    ("blocked", pa.int64(), False),
    ("inflight", pa.int64(), False),
    ("done", pa.int64(), False),
    ("dead", pa.int64(), False),
    ("cancelled", pa.int64(), False),
    ("done_total", pa.int64(), False),
    ("dead_total", pa.int64(), False),
    ("cancelled_total", pa.int64(), False),
    ("head_run_at", INSTANT, True),
    ("paused", pa.bool_(), False),
    ("max_inflight", pa.int32(), True),
    ("failure_queue", pa.string(), True),
)

SCHEMAS: dict[Table, pa.Schema] = {"attempts": ATTEMPTS, "jobs": JOBS, "queues": QUEUES}
