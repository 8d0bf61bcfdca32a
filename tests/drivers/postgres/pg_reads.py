"""What a call of the driver read, by the server's own counters.

The hot statements live in functions, where EXPLAIN does not reach. What a plan is good for can be counted instead: which
indexes were searched, how many entries they gave, and how many rows were read without one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from taskharbor.drivers.postgres import PostgresDriver

_COUNTERS = """
SELECT c.relkind::text, coalesce(p.relname, c.relname)::text,
       sum(pg_stat_get_numscans(c.oid))::bigint, sum(pg_stat_get_tuples_returned(c.oid))::bigint
FROM pg_class AS c LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid LEFT JOIN pg_class AS p ON p.oid = i.inhparent
WHERE c.relnamespace = $1::text::regnamespace AND c.relkind IN ('r', 'i')
GROUP BY 1, 2
"""


@dataclass
class Reads:
    """Entries that index searches gave, dead ones too, and rows of tables read from end to end. Partitions as one."""

    entries: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


def one_connection(url: str, **options: str) -> PostgresDriver:
    """A handle whose calls all run on one connection."""
    more = "".join(f"&{name}={value}" for name, value in options.items())
    driver = PostgresDriver.from_url(f"{url}&pool_size=1{more}")
    return driver


async def reads_of(driver: PostgresDriver, call: Callable[[], Awaitable[Any]]) -> Reads:
    """The driver has one connection, and nobody else uses the schema."""
    before = await _counters(driver)
    await call()
    after = await _counters(driver)
    reads = Reads()
    for (kind, name), (scans, rows) in after.items():
        scans_before, rows_before = before.get((kind, name), (0, 0))
        if scans > scans_before:
            (reads.entries if kind == "i" else reads.rows)[name] = rows - rows_before
    return reads


async def _counters(driver: PostgresDriver) -> dict[tuple[str, str], tuple[int, int]]:
    async def read(session: Any) -> list[tuple[Any, ...]]:
        if session.connection.info.server_version < 150_000:
            pytest.skip("PostgreSQL 14 cannot be made to tell its counters at once")
        await session.rows("SELECT pg_stat_force_next_flush()::text")
        rows: list[tuple[Any, ...]] = await session.rows(_COUNTERS, [f'"{driver.options.schema}"'])
        return rows

    return {(kind, name): (scans, rows) for kind, name, scans, rows in await driver._query(read)}
