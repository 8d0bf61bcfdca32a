"""What all checks mean by a lease, and how long it was valid."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

CLOCK_SLACK_SECONDS = 5
"""How far apart the clocks of two callers may be read where the log cannot tell which of two calls came first. Far more than
a sampled backend clock is off by, and far less than a lease."""


def is_leased() -> Column:
    """Rows of jobs that were cancelled or merged while waiting, or requeued, tell of no lease."""
    return F.col("reserved_at").isNotNull() & F.col("lease_expires_at").isNotNull()


def valid_until() -> Column:
    """A lease is valid from reserved_at up to, not including, this instant."""
    return F.least("ended_at", "lease_expires_at")


def clock_slack() -> Column:
    return F.expr(f"INTERVAL {CLOCK_SLACK_SECONDS} SECONDS")
