"""What the PostgreSQL driver's tests say often."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import sql

from taskharbor.drivers.postgres.enqueue import rule_values
from taskharbor.drivers.postgres.options import NOTIFYING
from taskharbor.drivers.postgres.rows import load
from taskharbor.jobs import SECOND, JobRecord

NOW = 1_700_000_000 * SECOND
DAY = 86_400 * SECOND

_PATIENCE = 30.0


class Raw:
    """A connection that is not the driver's, for what the driver would not do."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self.connection = connection
        self.schema = schema
        self(sql.SQL("SET search_path TO {}").format(sql.Identifier(schema)))

    def __call__(self, statement: Any, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement, values or None)
        return cursor.fetchall() if cursor.description else []

    def one(self, statement: Any, *values: Any) -> Any:
        ((value,),) = self(statement, *values)
        return value

    @property
    def pid(self) -> int:
        return self.connection.info.backend_pid

    def another(self) -> Raw:
        """One more. It is closed by whoever asked for it: `with raw.another() as second`."""
        info = self.connection.info
        return Raw(psycopg.connect(info.dsn, password=info.password, autocommit=True), self.schema)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Ask until it is so; each time is a round trip. Nothing is asserted of how long that takes, but that it ends."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"


def enqueue_on(raw: Raw, records: Sequence[JobRecord], now: int) -> None:
    """As the driver does it, in whatever transaction the connection is in."""
    statement = load("enqueue", raw.schema)["by_rules"]
    with psycopg.RawCursor(raw.connection) as cursor:
        cursor.execute(statement.encode(), [*rule_values(records), now, NOTIFYING, False])


def fold(raw: Raw) -> None:
    """Fold every move that has been committed, however short a while ago. The first call only says how far the next may go."""
    raw("SELECT fold(0)")
    raw("SELECT fold(0)")


def is_waiting_for(waiter_of: Raw, holder: Raw) -> bool:
    """Whether somebody waits for a lock that `holder` has. Asked on another connection."""
    return bool(
        waiter_of.one("SELECT count(*) FROM pg_locks WHERE %s = ANY (pg_blocking_pids(pid))", holder.pid)
    )
