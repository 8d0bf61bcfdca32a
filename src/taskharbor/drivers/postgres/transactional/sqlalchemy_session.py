"""Within the transaction of a SQLAlchemy session or connection, on any driver for PostgreSQL that SQLAlchemy has."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import count
from typing import Any, TypeAlias

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.orm import Session, scoped_session

from taskharbor.drivers.contract import Enqueued, JoinedAsyncTransaction, JoinedTransaction
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.transactional.statement import (
    EnqueueStatement,
    explaining,
    not_in_a_transaction,
)
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, Micros

_Sync: TypeAlias = Session | scoped_session[Any] | Connection

_PLACEHOLDER = re.compile(r"%([sb%])")
_LIKE_A_NAME = re.compile(r"(?<![:\w\\]):(?=\w)")
"""What SQLAlchemy would take for a parameter; here it can only be part of the schema's name."""


def join(transaction: object, options: Options) -> JoinedTransaction | JoinedAsyncTransaction | None:
    if isinstance(transaction, (Session, scoped_session, Connection)):
        return SQLAlchemyTransaction(transaction, options)
    # Not imported here: this part of SQLAlchemy wants greenlet, which a synchronous program need not have.
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")
    if asynchronous is None:
        return None
    if isinstance(transaction, asynchronous.async_scoped_session):
        transaction = transaction()
    if isinstance(transaction, (asynchronous.AsyncSession, asynchronous.AsyncConnection)):
        return SQLAlchemyAsyncTransaction(transaction, options)
    return None


class SQLAlchemyTransaction(JoinedTransaction):
    def __init__(self, transaction: _Sync, options: Options) -> None:
        self._transaction = transaction
        self._options = options

    def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]:
        return _enqueue(self._transaction, records, now, self._options)


class SQLAlchemyAsyncTransaction(JoinedAsyncTransaction):
    def __init__(self, transaction: Any, options: Options) -> None:
        self._transaction = transaction
        self._options = options

    async def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]:
        answers: list[Enqueued] = await self._transaction.run_sync(_enqueue, records, now, self._options)
        return answers


def _enqueue(
    transaction: _Sync, records: Sequence[JobRecord], now: Micros, options: Options
) -> list[Enqueued]:
    statement = EnqueueStatement(records, now, options)
    connection = transaction if isinstance(transaction, Connection) else transaction.connection()
    if connection.dialect.name != "postgresql":
        raise InvalidRequest(
            f"the transaction is on {connection.dialect.name}, the jobs are kept in PostgreSQL: they cannot commit together"
        )
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise not_in_a_transaction("use another isolation_level than AUTOCOMMIT")
    with explaining(options):
        result = connection.execute(as_text_clause(statement.text, statement.values))
        return statement.answers([tuple(row) for row in result])


def as_text_clause(statement: str, values: Sequence[Any]) -> TextClause:
    """A statement with `%s` and `%b` as one with bound parameters, whose types SQLAlchemy takes from the values."""
    numbers = count()
    # In parentheses, because a cast may follow: a name that is followed by a colon is not seen as one.
    named = _PLACEHOLDER.sub(
        lambda found: "%" if found[1] == "%" else f"(:v{next(numbers)})", _LIKE_A_NAME.sub(r"\:", statement)
    )
    return text(named).bindparams(**{f"v{number}": value for number, value in enumerate(values)})
