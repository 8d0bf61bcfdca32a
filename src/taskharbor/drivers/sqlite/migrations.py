"""Bringing a database file's schema up to date, among processes that start at once."""

from __future__ import annotations

from collections.abc import Sequence

from taskharbor.drivers.engine import schema
from taskharbor.drivers.migrations import Migration
from taskharbor.drivers.sqlite.connection import Connection, begin, open_connection, translated
from taskharbor.drivers.sqlite.options import Options


def apply_pending(
    connection: Connection, options: Options, known: Sequence[Migration] | None = None
) -> list[str]:
    """Apply what is missing; the names of the steps taken. Safe when several processes start at once."""
    steps = schema.known() if known is None else known
    if not schema.pending(connection, options.path, steps):
        return []
    begin(connection, options.busy_timeout)
    try:
        # Again under the lock: another process may have done it meanwhile.
        missing = schema.pending(connection, options.path, steps)
        schema.apply(connection, missing)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return [migration.name for migration in missing]


def migrate(options: Options, *, dry_run: bool) -> list[str]:
    """For `taskharbor migrate`: on a connection of its own, so that a dry run touches nothing."""
    steps = schema.known()
    if dry_run and not options.path.exists():
        return [migration.name for migration in steps]
    connection = open_connection(options, writing=not dry_run)
    try:
        if dry_run:
            return [migration.name for migration in schema.pending(connection, options.path, steps)]
        return apply_pending(connection, options)
    except Exception as error:
        raise translated(error, options.path) from error
    finally:
        connection.close()
