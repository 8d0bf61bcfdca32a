"""Millions of jobs put straight into the driver's tables, because enqueueing and running that many would take hours.

The rows in `sql/fill_*.sql` are those that the driver itself would have written, counters included. They are written
against the tables of `drivers/postgres/migrations/`: who changes those changes these.
"""

from __future__ import annotations

from pathlib import Path

import psycopg

SCHEMA = "taskharbor"
SQL = Path(__file__).parent / "sql"


def fill_waiting(url: str, count: int) -> None:
    """`count` jobs that could be claimed at once."""
    _fill(url, count, "fill_waiting")


def fill_scheduled(url: str, count: int) -> None:
    """`count` jobs that will be due, none of them today."""
    _fill(url, count, "fill_scheduled")


def fill_history(url: str, count: int) -> None:
    """`count` jobs that are done and `count` rows of the attempt log."""
    _fill(url, count, "fill_history")


def _fill(url: str, count: int, name: str) -> None:
    """The tables must be there already: whoever opens the store makes them."""
    statements = (SQL / f"{name}.sql").read_bytes()
    with psycopg.connect(
        url,
        autocommit=True,
        options=f"-c search_path={SCHEMA}",
        # Several statements in one go, with parameters: only this kind of cursor sends them so.
        cursor_factory=psycopg.ClientCursor,
    ) as connection:
        with connection.transaction():
            connection.execute(statements, {"count": count})
            connection.execute("select fold(0)")
        connection.execute("vacuum analyze")
