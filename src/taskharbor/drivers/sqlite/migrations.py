"""The SQLite schema: what is missing is applied in one transaction."""

from __future__ import annotations

from collections.abc import Sequence

from taskharbor.drivers.migrations import Migration, known_migrations, pending_of
from taskharbor.drivers.sqlite.connection import Connection, begin, open_connection, translated
from taskharbor.drivers.sqlite.options import Options
from taskharbor.errors import SchemaMismatch

TABLE = "taskharbor_migrations"

_CREATE = "CREATE TABLE taskharbor_migrations (name TEXT PRIMARY KEY, breaks INTEGER NOT NULL) STRICT, WITHOUT ROWID"
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table'"
_APPLIED = "SELECT name, breaks FROM taskharbor_migrations"
_RECORD = "INSERT INTO taskharbor_migrations (name, breaks) VALUES (?, ?)"


def pending(connection: Connection, path: object, known: Sequence[Migration]) -> list[Migration]:
    """What is still to be applied, in order. Raises SchemaMismatch where this version must keep its hands off."""
    tables = {name for (name,) in connection.execute(_TABLES)}
    if TABLE not in tables:
        if tables & {"jobs", "queues", "attempts"}:
            raise SchemaMismatch(
                f"{path} already holds tables of another program (jobs, queues or attempts): give TaskHarbor a file of its own"
            )
        return list(known)
    applied = {name: bool(breaks) for name, breaks in connection.execute(_APPLIED)}
    return pending_of(known, applied, str(path))


def apply_pending(
    connection: Connection, options: Options, known: Sequence[Migration] | None = None
) -> list[str]:
    """Apply what is missing; the names of the steps taken. Safe when several processes start at once."""
    steps = known_migrations(__package__) if known is None else known
    if not pending(connection, options.path, steps):
        return []
    begin(connection, options.busy_timeout)
    try:
        # Again under the lock: another process may have done it meanwhile.
        missing = pending(connection, options.path, steps)
        if missing and TABLE not in {name for (name,) in connection.execute(_TABLES)}:
            connection.execute(_CREATE)
        for migration in missing:
            for statement in _statements(migration.sql):
                connection.execute(statement)
            connection.execute(_RECORD, (migration.name, migration.breaks))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return [migration.name for migration in missing]


def migrate(options: Options, *, dry_run: bool) -> list[str]:
    """For `taskharbor migrate`: on a connection of its own, so that a dry run touches nothing."""
    if dry_run and not options.path.exists():
        return [migration.name for migration in known_migrations(__package__)]
    connection = open_connection(options, writing=not dry_run)
    try:
        if dry_run:
            return [
                migration.name
                for migration in pending(connection, options.path, known_migrations(__package__))
            ]
        return apply_pending(connection, options)
    except Exception as error:
        raise translated(error, options.path) from error
    finally:
        connection.close()


def _statements(script: str) -> list[str]:
    """Split at the semicolons that end a line. `executescript` would commit the transaction around us."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";\n") if part.strip().rstrip(";")]
