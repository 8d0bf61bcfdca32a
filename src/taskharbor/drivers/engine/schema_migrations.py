"""The schema: what a store has, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from taskharbor.drivers.migrations import Migration, known_migrations, pending_of
from taskharbor.errors import SchemaMismatch

_CREATE = """CREATE TABLE IF NOT EXISTS taskharbor_migrations (name TEXT PRIMARY KEY, breaks INTEGER NOT NULL)
STRICT, WITHOUT ROWID"""


def known() -> tuple[Migration, ...]:
    return known_migrations(__package__)


def pending(connection: Connection, path: object, known: Sequence[Migration]) -> list[Migration]:
    """The steps that are still to be applied, in order. Raises SchemaMismatch where this version must keep its hands off."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "taskharbor_migrations" not in tables:
        if tables & {"jobs", "queues", "attempts"}:
            raise SchemaMismatch(
                f"{path} already holds tables of another program (jobs, queues or attempts): give TaskHarbor a file of its own"
            )
        return list(known)
    applied = connection.execute("SELECT name, breaks FROM taskharbor_migrations")
    return pending_of(known, {name: bool(breaks) for name, breaks in applied}, str(path))


def apply(connection: Connection, missing: Sequence[Migration]) -> None:
    """Take these steps, in the transaction that is open."""
    if missing:
        connection.execute(_CREATE)
    for step in missing:
        for statement in _statements(step.sql):
            connection.execute(statement)
        connection.execute("INSERT INTO taskharbor_migrations VALUES (?, ?)", (step.name, step.breaks))


def _statements(script: str) -> list[str]:
    """Split at the semicolons that end a line. `executescript` would commit the transaction around us."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";\n") if part.strip().rstrip(";")]
