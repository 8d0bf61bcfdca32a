"""The schema: what a store has, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from taskharbor.drivers.migrations import Migration, known_migrations, pending_of
from taskharbor.errors import SchemaMismatch

TABLE = "taskharbor_migrations"

_CREATE = "CREATE TABLE taskharbor_migrations (name TEXT PRIMARY KEY, breaks INTEGER NOT NULL) STRICT, WITHOUT ROWID"
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table'"
_APPLIED = "SELECT name, breaks FROM taskharbor_migrations"
_RECORD = "INSERT INTO taskharbor_migrations (name, breaks) VALUES (?, ?)"


def known() -> tuple[Migration, ...]:
    return known_migrations(__package__)


def pending(connection: Connection, path: object, known: Sequence[Migration]) -> list[Migration]:
    """The steps that are still to be applied, in order. Raises SchemaMismatch where this version must keep its hands off."""
    tables = {name for (name,) in connection.execute(_TABLES)}
    if TABLE not in tables:
        if tables & {"jobs", "queues", "attempts"}:
            raise SchemaMismatch(
                f"{path} already holds tables of another program (jobs, queues or attempts): give TaskHarbor a file of its own"
            )
        return list(known)
    applied = {name: bool(breaks) for name, breaks in connection.execute(_APPLIED)}
    return pending_of(known, applied, str(path))


def apply(connection: Connection, missing: Sequence[Migration]) -> None:
    """Take these steps, in the transaction that is open."""
    if missing and TABLE not in {name for (name,) in connection.execute(_TABLES)}:
        connection.execute(_CREATE)
    for migration in missing:
        for statement in _statements(migration.sql):
            connection.execute(statement)
        connection.execute(_RECORD, (migration.name, migration.breaks))


def _statements(script: str) -> list[str]:
    """Split at the semicolons that end a line. `executescript` would commit the transaction around us."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";\n") if part.strip().rstrip(";")]
