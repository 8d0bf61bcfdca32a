"""The schema, in numbered steps that only ever add.

A process of an older version keeps working beside a newer one: it ignores steps it does not know, unless one of
them says `-- breaks: older versions` in its first line; then the older version refuses to open the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import msgspec

from taskharbor.drivers.sqlite.connection import Connection, begin, open_connection, translated
from taskharbor.drivers.sqlite.options import Options
from taskharbor.errors import SchemaMismatch

TABLE = "taskharbor_migrations"
BREAKS = "-- breaks: older versions"

_CREATE = "CREATE TABLE taskharbor_migrations (name TEXT PRIMARY KEY, breaks INTEGER NOT NULL) STRICT, WITHOUT ROWID"
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table'"
_APPLIED = "SELECT name, breaks FROM taskharbor_migrations"
_RECORD = "INSERT INTO taskharbor_migrations (name, breaks) VALUES (?, ?)"


class Migration(msgspec.Struct, frozen=True):
    name: str
    sql: str

    @property
    def breaks(self) -> bool:
        return self.sql.startswith(BREAKS)


@cache
def known_migrations() -> tuple[Migration, ...]:
    folder = files(__package__) / "migrations"
    found = [
        (entry.name, entry.read_text("utf-8")) for entry in folder.iterdir() if entry.name.endswith(".sql")
    ]
    return tuple(Migration(name.removesuffix(".sql"), sql) for name, sql in sorted(found))


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
    names = {migration.name for migration in known}
    foreign = sorted(name for name, breaks in applied.items() if breaks and name not in names)
    if foreign:
        raise SchemaMismatch(
            f"{path} was changed by a newer TaskHarbor in a way this version cannot work with "
            f"({', '.join(foreign)}): upgrade this process"
        )
    return [migration for migration in known if migration.name not in applied]


def apply_pending(
    connection: Connection, options: Options, known: Sequence[Migration] | None = None
) -> list[str]:
    """Apply what is missing; the names of the steps taken. Safe when several processes start at once."""
    steps = known_migrations() if known is None else known
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
        return [migration.name for migration in known_migrations()]
    connection = open_connection(options, writing=not dry_run)
    try:
        if dry_run:
            return [migration.name for migration in pending(connection, options.path, known_migrations())]
        return apply_pending(connection, options)
    except Exception as error:
        raise translated(error, options.path) from error
    finally:
        connection.close()


def _statements(script: str) -> list[str]:
    """Split at the semicolons that end a line. `executescript` would commit the transaction around us."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";\n") if part.strip().rstrip(";")]
