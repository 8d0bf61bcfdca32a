"""Within the transaction of a Django connection: `django.db.connection`, or one of `django.db.connections`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskharbor.drivers.contract import Enqueued, JoinedTransaction
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.transactional.statement import (
    EnqueueStatement,
    explaining,
    not_in_a_transaction,
)
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, Micros


def join(transaction: Any, options: Options) -> JoinedTransaction | None:
    # `connection` is a proxy for the thread's own, and so are the connections of wrapping backends: asked, not tested by type.
    vendor = getattr(transaction, "vendor", None)
    if not isinstance(vendor, str) or not hasattr(transaction, "in_atomic_block"):
        return None
    if vendor != "postgresql":
        raise InvalidRequest(
            f"the transaction is on {vendor}, the jobs are kept in PostgreSQL: they cannot commit together"
        )
    return DjangoTransaction(transaction, options)


class DjangoTransaction(JoinedTransaction):
    def __init__(self, connection: Any, options: Options) -> None:
        self._connection = connection
        self._options = options

    def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]:
        statement = EnqueueStatement(records, now, self._options)
        if not self._connection.in_atomic_block and self._connection.get_autocommit():
            raise not_in_a_transaction("use `with transaction.atomic():`")
        with explaining(self._options), self._connection.cursor() as cursor:
            # Django's cursors bind on the client's side, or are psycopg 2's: binary is for neither to ask.
            cursor.execute(statement.text.replace("%b", "%s"), statement.values)
            rows = cursor.fetchall()
        return statement.answers(rows)
