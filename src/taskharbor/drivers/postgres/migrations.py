"""The schema: numbered steps for the tables (`schema/`), each in its own transaction, and the functions (`functions/`).

Every file in `functions/` holds the present body of one function or view. They are installed together, after the steps, whenever
the store has others. They keep their names and parameters, so that processes of older versions keep working; a change of
parameters needs a new function. An older version leaves the functions of a newer one alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import psycopg

from taskharbor.drivers.migrations import Migration, known_migrations, pending_of
from taskharbor.drivers.postgres.connections import Session, connect, translated
from taskharbor.drivers.postgres.options import PostgresOptions
from taskharbor.drivers.postgres.rows import quoted
from taskharbor.errors import SchemaMismatch

FUNCTIONS_VERSION = 2
"""Raised by one with every release that changes a function."""
MINIMUM_VERSION = 140_000


@cache
def known_steps() -> tuple[Migration, ...]:
    """Return all steps of this version, the functions last."""
    steps = known_migrations(__package__, "schema")
    found = sorted((files(__package__) / "functions").iterdir(), key=lambda file: file.name)
    text = "\n".join(file.read_text("utf-8") for file in found)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    # One row records the installed functions.
    text += "\nDELETE FROM migrations WHERE starts_with(name, 'functions_');"
    return (*steps, Migration(f"functions_{FUNCTIONS_VERSION:04}_{digest}", text))


async def open_ready(options: PostgresOptions) -> Session:
    """Return a session on a store that is up to date. An old store is brought up to date or refused, according to the options."""
    session = Session(await connect(options), options)
    session.is_fresh = False
    try:
        missing = await migrate(session, options, dry_run=not options.migrate)
        if missing and not options.migrate:
            raise SchemaMismatch(
                f"{options.place}: the schema {options.schema!r} lacks {', '.join(missing)}: run `taskharbor migrate`"
            )
    except BaseException:
        await session.connection.close()
        raise
    return session


async def migrate(
    session: Session,
    options: PostgresOptions,
    *,
    dry_run: bool = False,
    known: Sequence[Migration] | None = None,
) -> list[str]:
    """Apply the missing steps, and return their names."""
    try:
        version = session.connection.info.server_version
        if version < MINIMUM_VERSION:
            raise SchemaMismatch(
                f"{options.place}: PostgreSQL {version // 10_000} is too old: 14 or newer is needed"
            )
        await _check_isolation(session, options)
        missing = await _pending(session, options, known_steps() if known is None else known)
        if not dry_run:
            for migration in missing:
                await _apply(session, migration)
            await _tend(session, is_new=bool(missing))
        return [migration.name for migration in missing]
    except psycopg.Error as error:
        raise translated(error, options) from error


async def _check_isolation(session: Session, options: PostgresOptions) -> None:
    """Refuse an isolation level other than READ COMMITTED. The functions read again after every lock that they waited for, and a
    snapshot of the whole transaction would hide the changes."""
    ((level,),) = await session.rows("SELECT current_setting('default_transaction_isolation')")
    if level != "read committed":
        raise SchemaMismatch(
            f"{options.place}: default_transaction_isolation is {level!r} for this role; TaskHarbor needs read committed: "
            "ALTER ROLE ... SET default_transaction_isolation = 'read committed'"
        )


async def _pending(session: Session, options: PostgresOptions, known: Sequence[Migration]) -> list[Migration]:
    place = f"{options.place}: the schema {options.schema!r}"
    first = known_steps()[0]
    tables = {name for (name,) in await session.named("migrate", "tables", session.schema)}
    others = tables & set(re.findall(r"^CREATE (?:UNLOGGED )?TABLE (\w+)", first.sql, re.MULTILINE))
    applied: dict[str, bool] = {}
    if "migrations" in tables:
        try:
            applied = dict(await session.named("migrate", "applied"))
        except psycopg.errors.UndefinedColumn:
            others = {"migrations"}
    if others and first.name not in applied:
        raise SchemaMismatch(
            f"{place} already holds tables of another program, or of a version from before the first release "
            f"({', '.join(sorted(others))}): give TaskHarbor one of its own with ?schema=name"
        )
    missing = pending_of(known, applied, place)
    return [
        step for step in missing if not applied or not await session.named("migrate", "is_applied", step.name)
    ]


async def _apply(session: Session, migration: Migration) -> None:
    schema = quoted(session.schema)
    connection = session.connection
    async with connection.transaction():
        # One process at a time; the others then find the step applied.
        await session.named("migrate", "lock", session.schema)
        await session.named("migrate", "create_schema")
        await session.named("migrate", "create_table")
        if not await session.named("migrate", "is_applied", migration.name):
            # Several statements in one call, which only the library can send.
            await connection.execute(f"SET LOCAL search_path TO {schema}, pg_temp")
            await connection.execute(migration.sql.replace("$schema", schema))
            await session.named("migrate", "record", migration.name, migration.breaks)


async def _tend(session: Session, *, is_new: bool) -> None:
    """Prepare the tables if they are new, have moved to another cluster, or nobody has worked here for a week."""
    ((has_moved, today, has_days),) = await session.named("migrate", "condition", session.schema)
    if has_moved:
        await session.call("begin_epoch")
    if not has_days:
        try:
            await session.call("add_days", today)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable):
            # Rows go to the rest until a user with the right to do so adds the days.
            if is_new:
                raise
