"""What a drain costs the server beyond its time: commits, write-ahead log and dead row versions, per job.

Throughput on an idle machine does not show them, and they are what other users of the same server feel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import psycopg

_READ = """
    select (select xact_commit from pg_stat_database where datname = current_database()),
           pg_current_wal_insert_lsn() - '0/0'::pg_lsn,
           (select coalesce(sum(n_tup_upd + n_tup_del), 0) from pg_stat_user_tables),
           (select coalesce(sum(n_dead_tup), 0) from pg_stat_user_tables)
"""
_REPORTED_WITHIN = 0.5
"""Backends that have ended have reported their counts; this is for the system to notice."""


class Costs(msgspec.Struct):
    """Per job."""

    commits: float = 0.0
    wal_bytes: float = 0.0
    dead_made: float = 0.0
    """Row versions that an update or a delete left behind."""
    dead_left: float = 0.0
    """Those of them that vacuum had not removed in the end."""

    def __str__(self) -> str:
        return (
            f"{self.commits:.4f} commits, {self.wal_bytes:,.0f} B of WAL, {self.dead_made:.2f} dead rows made and "
            f"{self.dead_left:.2f} left per job"
        )


@contextmanager
def costs_of(url: str, count: int) -> Iterator[Costs]:
    """Filled in when the block ends. Whoever worked in it must have disconnected by then."""
    costs = Costs()
    before = _read(url)
    yield costs
    after = _read(url)
    costs.commits, costs.wal_bytes, costs.dead_made = (
        (now - then) / count for now, then in zip(after[:3], before[:3], strict=True)
    )
    costs.dead_left = after[3] / count


def _read(url: str) -> list[float]:
    time.sleep(_REPORTED_WITHIN)
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(_READ).fetchone()
        assert row is not None
        return [float(value) for value in row]
