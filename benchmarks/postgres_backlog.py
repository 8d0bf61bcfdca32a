"""Millions of jobs put straight into the driver's tables, because enqueueing and running that many would take hours.

The rows in `sql/fill_*.sql` are those that the driver itself would have written, counters included. They are written
against the tables of `drivers/postgres/schema/`: who changes those changes these.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psycopg

from taskharbor.client import AsyncClient
from taskharbor.drivers.postgres import PostgresDriver

SCHEMA = "taskharbor"
SQL = Path(__file__).parent / "sql"


async def fill_waiting(client: AsyncClient, count: int, types: Sequence[str]) -> None:
    """`count` jobs that can be claimed at once."""
    await _fill(client, count, types, "fill_waiting")


async def fill_ahead(client: AsyncClient, count: int, types: Sequence[str]) -> None:
    """`count` jobs of a type that no claim names. They are due before all jobs that are enqueued later."""
    await _fill(client, count, ["another"], "fill_waiting")


async def fill_scheduled(client: AsyncClient, count: int, types: Sequence[str]) -> None:
    """`count` jobs that will be due, none of them today."""
    await _fill(client, count, types, "fill_scheduled")


async def fill_history(client: AsyncClient, count: int, types: Sequence[str]) -> None:
    """`count` jobs that are done and `count` rows of the attempt log."""
    await _fill(client, count, types, "fill_history")


async def _fill(client: AsyncClient, count: int, types: Sequence[str], name: str) -> None:
    assert isinstance(client.driver, PostgresDriver)
    await client.now()  # Makes the tables.
    statements = (SQL / f"{name}.sql").read_bytes()
    with psycopg.connect(
        client.driver.options.conninfo,
        autocommit=True,
        options=f"-c search_path={SCHEMA}",
        # Several statements in one go, with parameters: only this kind of cursor sends them so.
        cursor_factory=psycopg.ClientCursor,
    ) as connection:
        with connection.transaction():
            connection.execute(statements, {"count": count, "types": list(types)})
            connection.execute("select fold(0)")
        connection.execute("vacuum analyze")
