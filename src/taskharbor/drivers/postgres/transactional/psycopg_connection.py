"""Within the transaction of a psycopg 3 connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, pq
from psycopg.rows import tuple_row

from taskharbor.drivers.contract import Enqueued, JoinedAsyncTransaction, JoinedTransaction
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.transactional.statement import (
    EnqueueStatement,
    explaining,
    not_in_a_transaction,
)
from taskharbor.jobs import JobRecord, Micros

_Given: TypeAlias = Connection[Any] | AsyncConnection[Any]


def join(transaction: object, options: Options) -> JoinedTransaction | JoinedAsyncTransaction | None:
    if isinstance(transaction, Connection):
        return PsycopgTransaction(transaction, options)
    if isinstance(transaction, AsyncConnection):
        return PsycopgAsyncTransaction(transaction, options)
    return None


class PsycopgTransaction(JoinedTransaction):
    """Has cursors of its own: the connection's row and cursor factories are the caller's business."""

    def __init__(self, connection: Connection[Any], options: Options) -> None:
        self._connection = connection
        self._options = options

    def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]:
        statement = EnqueueStatement(records, now, self._options)
        _check_transaction(self._connection)
        with explaining(self._options), Cursor(self._connection, row_factory=tuple_row) as cursor:
            cursor.execute(statement.text, statement.values)
            rows = cursor.fetchall()
        return statement.answers(rows)


class PsycopgAsyncTransaction(JoinedAsyncTransaction):
    def __init__(self, connection: AsyncConnection[Any], options: Options) -> None:
        self._connection = connection
        self._options = options

    async def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]:
        statement = EnqueueStatement(records, now, self._options)
        _check_transaction(self._connection)
        with explaining(self._options):
            async with AsyncCursor(self._connection, row_factory=tuple_row) as cursor:
                await cursor.execute(statement.text, statement.values)
                rows = await cursor.fetchall()
        return statement.answers(rows)


def _check_transaction(connection: _Given) -> None:
    if connection.autocommit and connection.info.transaction_status == pq.TransactionStatus.IDLE:
        raise not_in_a_transaction("open a block with connection.transaction()")
