"""Enqueues within the caller's transaction, on a connection of psycopg, SQLAlchemy or Django.

The statement and the reading of its answer are the same for every library (`EnqueueStatement`). No library but psycopg is
imported unless an object of it is given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from psycopg import AsyncConnection, AsyncRawCursor, Connection, RawCursor, pq
from psycopg.rows import tuple_row

from taskharbor.drivers.contract import Enqueued, JoinedAsyncTransaction, JoinedTransaction
from taskharbor.drivers.postgres.connections import MISSING
from taskharbor.drivers.postgres.enqueue import batch_values, is_plain
from taskharbor.drivers.postgres.options import PostgresOptions
from taskharbor.drivers.postgres.rows import load, rule_values
from taskharbor.drivers.validation import check_records
from taskharbor.errors import InvalidRequest, SchemaMismatch
from taskharbor.jobs import JobRecord, Micros

Joined: TypeAlias = JoinedTransaction | JoinedAsyncTransaction
Rows: TypeAlias = list[tuple[Any, ...]]

ACCEPTED = (
    "a psycopg Connection or AsyncConnection, a SQLAlchemy Session, Connection, AsyncSession or AsyncConnection, "
    "or Django's connection"
)
_VALUE = re.compile(r"\$(\d+)")
_LIKE_A_NAME = re.compile(r"(?<![:\w\\]):(?=\w)")
"""Text that SQLAlchemy would take for a parameter. Here it can only be part of the schema's name."""


def join(transaction: Any, options: PostgresOptions) -> Joined:
    # By all base classes, because users derive their own sessions and connections.
    libraries = {base.__module__.partition(".")[0] for base in type(transaction).__mro__}
    if isinstance(transaction, Connection):
        return _Transaction(partial(_run_on_psycopg, transaction), options)
    if isinstance(transaction, AsyncConnection):
        return _AsyncTransaction(partial(_run_on_async_psycopg, transaction), options)
    if "sqlalchemy" in libraries and (joined := _join_sqlalchemy(transaction, options)) is not None:
        return joined
    # `connection` is a proxy for the thread's own, and so are the connections of wrapping backends. So it is asked, not tested by
    # type.
    vendor = getattr(transaction, "vendor", None) if "django" in libraries else None
    if isinstance(vendor, str) and hasattr(transaction, "in_atomic_block"):
        _check_is_postgresql(vendor)
        return _Transaction(partial(_run_on_django, transaction), options)
    kind = type(transaction)
    raise InvalidRequest(
        f"a job cannot be enqueued within a {kind.__module__}.{kind.__qualname__}: give {ACCEPTED}"
    )


class _Joined:
    """Runs a statement on the caller's connection."""

    def __init__(self, run: Callable[[str, list[Any]], Any], options: PostgresOptions) -> None:
        self._run = run
        self._options = options


class _Transaction(_Joined, JoinedTransaction):
    def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]:
        statement = EnqueueStatement(records, now, self._options)
        with _explaining(self._options):
            return statement.answers(self._run(statement.text, statement.values))


class _AsyncTransaction(_Joined, JoinedAsyncTransaction):
    async def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]:
        statement = EnqueueStatement(records, now, self._options)
        with _explaining(self._options):
            return statement.answers(await self._run(statement.text, statement.values))


class EnqueueStatement:
    """One statement for a batch of new records.

    Their ids were made a moment ago and are known to nobody, so the quick INSERT cannot fail for one that is: an error would
    cost the caller the whole transaction. It also needs no subtransaction per job, which a transaction that stays open for
    a while had better not have by the thousand.
    """

    def __init__(self, records: Sequence[JobRecord], now: Micros, options: PostgresOptions) -> None:
        check_records(records)
        self._records = records
        self._is_plain = is_plain(records)
        # PostgreSQL delivers at commit the notifications that are made here, and drops them at rollback.
        own = batch_values(records) if self._is_plain else rule_values(records)
        self.text = load("enqueue", options.schema)["plain" if self._is_plain else "by_rules"]
        # The last value: the ids are new; the jobs are not repeated.
        self.values = [*own, now, options.stir, self._is_plain]

    def answers(self, rows: Sequence[Sequence[Any]]) -> list[Enqueued]:
        if self._is_plain:
            return [Enqueued(record.id) for record in self._records]
        if not rows:
            raise InvalidRequest(
                "a job with a key cannot be enqueued within a REPEATABLE READ or SERIALIZABLE transaction, which does not "
                "see what others did to the key: use READ COMMITTED, an idempotency_key instead, or no key"
            )
        return [Enqueued(job_id, existed) for job_id, existed in rows]


@contextmanager
def _explaining(options: PostgresOptions) -> Iterator[None]:
    """Explain one error of the caller's library. All others are left alone, because the caller's code knows them."""
    try:
        yield
    except Exception as error:
        if _sqlstate(error) not in MISSING:
            raise
        text = " ".join(str(error).split())
        raise SchemaMismatch(
            f"the database of this transaction has no schema {options.schema!r} of this version ({text}): give a connection "
            f"to the database that the store is in ({options.place}), or run `taskharbor migrate` on it"
        ) from error


def _sqlstate(error: BaseException) -> str | None:
    """Return the code of an error. SQLAlchemy and Django wrap the error of the library below them."""
    for one in (error, getattr(error, "orig", None), error.__cause__):
        for name in ("sqlstate", "pgcode"):
            state = getattr(one, name, None)
            if isinstance(state, str):
                return state
    return None


def _not_in_a_transaction(how: str) -> InvalidRequest:
    return InvalidRequest(
        f"the connection is in autocommit mode, so the job would be there at once, whatever happens next: {how}, or use "
        "an ordinary enqueue"
    )


def _check_is_postgresql(name: str) -> None:
    if name != "postgresql":
        raise InvalidRequest(
            f"the transaction is on {name}, the jobs are kept in PostgreSQL: they cannot commit together"
        )


# -- one statement on the connection of each library --------------------------------------------------------------


def _run_on_psycopg(connection: Connection[Any], statement: str, values: list[Any]) -> Rows:
    _check_transaction(connection)
    # Its own cursor: the caller may have set other row and cursor factories on the connection.
    with RawCursor(connection, row_factory=tuple_row) as cursor:
        return cursor.execute(statement.encode(), values).fetchall()


async def _run_on_async_psycopg(connection: AsyncConnection[Any], statement: str, values: list[Any]) -> Rows:
    _check_transaction(connection)
    async with AsyncRawCursor(connection, row_factory=tuple_row) as cursor:
        return await (await cursor.execute(statement.encode(), values)).fetchall()


def _check_transaction(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    if connection.autocommit and connection.info.transaction_status == pq.TransactionStatus.IDLE:
        raise _not_in_a_transaction("open a block with connection.transaction()")


def _run_on_django(connection: Any, statement: str, values: list[Any]) -> Rows:
    if not connection.in_atomic_block and connection.get_autocommit():
        raise _not_in_a_transaction("use `with transaction.atomic():`")
    with connection.cursor() as cursor:
        # Each value is in the statement once, in order.
        cursor.execute(_VALUE.sub("%s", statement.replace("%", "%%")), values)
        rows: Rows = cursor.fetchall()
    return rows


def _join_sqlalchemy(transaction: Any, options: PostgresOptions) -> Joined | None:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(transaction, (Session, scoped_session, Connection)):
        return _Transaction(partial(_run_on_sqlalchemy, transaction), options)
    # Not imported here: this part of SQLAlchemy needs greenlet, which a synchronous program need not have.
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")
    if asynchronous is None:
        return None
    if isinstance(transaction, asynchronous.async_scoped_session):
        transaction = transaction()
    if isinstance(transaction, (asynchronous.AsyncSession, asynchronous.AsyncConnection)):
        return _AsyncTransaction(partial(transaction.run_sync, _run_on_sqlalchemy), options)
    return None


def _run_on_sqlalchemy(transaction: Any, statement: str, values: list[Any]) -> Rows:
    """Run a statement on any driver for PostgreSQL that SQLAlchemy has."""
    from sqlalchemy import Connection

    connection = transaction if isinstance(transaction, Connection) else transaction.connection()
    _check_is_postgresql(connection.dialect.name)
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise _not_in_a_transaction("use another isolation_level than AUTOCOMMIT")
    return [tuple(row) for row in connection.execute(as_text_clause(statement, values))]


def as_text_clause(statement: str, values: Sequence[Any]) -> Any:
    """Make a statement with bound parameters. SQLAlchemy takes their types from the values."""
    from sqlalchemy import text

    # In parentheses, because a cast may follow: SQLAlchemy does not see a name that a colon follows.
    named = _VALUE.sub(r"(:v\1)", _LIKE_A_NAME.sub(r"\:", statement))
    return text(named).bindparams(**{f"v{number}": value for number, value in enumerate(values, 1)})
