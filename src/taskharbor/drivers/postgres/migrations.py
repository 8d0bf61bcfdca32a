"""The PostgreSQL schema: each missing step in a transaction of its own.

Functions keep their names and parameters, so that processes of older versions keep working. A step that needs others makes
new ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import AsyncConnection

from taskharbor.drivers.migrations import Migration, known_migrations, pending_of
from taskharbor.drivers.postgres.failures import translated
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.prepared import Row
from taskharbor.drivers.postgres.statements import load, quoted
from taskharbor.errors import SchemaMismatch

MINIMUM_VERSION = 140_000
TABLES = {
    "jobs",
    "queues",
    "attempts",
    "finished",
    "dead",
    "idempotency",
    "moves",
    "totals",
    "epochs",
    "upkeep",
    "swept",
    "repeated",
}


async def make_ready(connection: AsyncConnection[Row], options: Options) -> None:
    """Bring the schema up to date, or refuse it, as the options say."""
    missing = await migrate(connection, options, dry_run=not options.migrate)
    if missing and not options.migrate:
        raise SchemaMismatch(
            f"{options.place}: the schema {options.schema!r} lacks {', '.join(missing)}: run `taskharbor migrate`"
        )


async def migrate(
    connection: AsyncConnection[Row],
    options: Options,
    *,
    dry_run: bool = False,
    known: Sequence[Migration] | None = None,
) -> list[str]:
    """Apply what is missing, each step in a transaction of its own; the names of the steps taken."""
    steps = known_migrations(__package__) if known is None else known
    try:
        if connection.info.server_version < MINIMUM_VERSION:
            raise SchemaMismatch(
                f"{options.place}: PostgreSQL {connection.info.server_version // 10_000} is too old: 14 or newer is needed"
            )
        await _check_isolation(connection, options)
        missing = await _pending(connection, options, steps)
        if not dry_run:
            for migration in missing:
                await _apply(connection, options, migration)
            await _tend(connection, options, is_new=bool(missing))
        return [migration.name for migration in missing]
    except psycopg.Error as error:
        raise translated(error, options) from error


async def _check_isolation(connection: AsyncConnection[Row], options: Options) -> None:
    """The functions look again after every lock they waited for, which a snapshot of the whole transaction forbids."""
    ((level,),) = await (
        await connection.execute(load("migrate", options.schema)["isolation"], ())
    ).fetchall()
    if level != "read committed":
        raise SchemaMismatch(
            f"{options.place}: default_transaction_isolation is {level!r} for this role; TaskHarbor needs read committed: "
            "ALTER ROLE ... SET default_transaction_isolation = 'read committed'"
        )


async def _pending(
    connection: AsyncConnection[Row], options: Options, known: Sequence[Migration]
) -> list[Migration]:
    sql = load("migrate", options.schema)
    values = {"schema": options.schema}
    tables = {name for (name,) in await (await connection.execute(sql["tables"], values)).fetchall()}
    if "migrations" not in tables:
        if tables & TABLES:
            raise _foreign(options, tables & TABLES)
        return list(known)
    try:
        rows = await (await connection.execute(sql["applied"], ())).fetchall()
    except psycopg.errors.UndefinedColumn:
        raise _foreign(options, {"migrations"}) from None
    return pending_of(known, dict(rows), f"{options.place}: the schema {options.schema!r}")


def _foreign(options: Options, tables: set[str]) -> SchemaMismatch:
    return SchemaMismatch(
        f"{options.place}: the schema {options.schema!r} already holds tables of another program "
        f"({', '.join(sorted(tables))}): give TaskHarbor one of its own with ?schema=name"
    )


async def _apply(connection: AsyncConnection[Row], options: Options, migration: Migration) -> None:
    sql = load("migrate", options.schema)
    async with connection.transaction():
        # One process at a time; the others find the step taken.
        await connection.execute(sql["lock"], {"schema": options.schema})
        await connection.execute(sql["prepare"], ())
        await connection.execute(sql["create_table"], ())
        found = await connection.execute(sql["is_applied"], {"name": migration.name})
        if await found.fetchone() is None:
            await connection.execute(f"SET LOCAL search_path TO {quoted(options.schema)}, pg_temp")
            await connection.execute(migration.sql.replace("$schema", quoted(options.schema)), prepare=False)
            await connection.execute(sql["record"], {"name": migration.name, "breaks": migration.breaks})


async def _tend(connection: AsyncConnection[Row], options: Options, *, is_new: bool) -> None:
    """What the tables need when they are new, have come to another cluster, or nobody worked here for a week."""
    sql = load("migrate", options.schema)
    ((has_moved, today, has_days),) = await (
        await connection.execute(sql["condition"], {"schema": options.schema})
    ).fetchall()
    if has_moved:
        await connection.execute(sql["begin_epoch"], ())
    if not has_days:
        try:
            await connection.execute(sql["add_days"], {"now": today})
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable):
            # Rows go to the rest until somebody who may adds the days.
            if is_new:
                raise
