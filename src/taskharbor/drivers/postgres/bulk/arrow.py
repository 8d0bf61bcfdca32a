"""Results as Arrow, straight from the server's binary rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_postgresql import StatementOptions, dbapi

from taskharbor.bulk.cursors import HistoryGone
from taskharbor.bulk.tables import SCHEMAS, Table, fitted
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.rows import OUTCOMES, STATES
from taskharbor.errors import BackendUnavailable, TaskHarborError

_NAMES: dict[str, pa.Array] = {
    "state": pa.array([state.value for state in STATES]),
    "outcome": pa.array([outcome.value for outcome in OUTCOMES]),
}
_NO_SUCH_TABLE = "42P01"
_BATCH_BYTES = 2_000_000
"""About ten thousand attempts. With larger ones, who takes them waits longer for the first and then works alone on the last."""


def read(options: Options, table: Table, statements: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of some statements, one after the other, in batches that fit the table's schema.

    Each statement is a transaction of its own: between two of them nothing is held open on the server.
    """
    try:
        with closing(dbapi.connect(options.conninfo, autocommit=True)) as connection:
            for statement in statements:
                with closing(connection.cursor()) as cursor:
                    cursor.adbc_statement.set_options(
                        **{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
                    )
                    cursor.execute(statement)
                    for batch in cursor.fetch_record_batch():
                        if batch.num_rows:
                            yield _batch(table, batch)
    except dbapi.Error as error:
        raise _translated(error, options) from error


def _batch(table: Table, found: pa.RecordBatch) -> pa.RecordBatch:
    """By position: what the server calls its columns does not matter."""
    columns: list[Any] = []
    for field, column in zip(SCHEMAS[table], found.columns, strict=True):
        if field.name in _NAMES:
            columns.append(_NAMES[field.name].take(column))
        elif field.name == "priority":
            columns.append(pc.negate(column.cast(pa.int32())))
        else:
            columns.append(column)
    return fitted(table, columns)


def _translated(error: Exception, options: Options) -> Exception:
    text = " ".join(str(error).split())
    if getattr(error, "sqlstate", None) == _NO_SUCH_TABLE:
        return HistoryGone(
            f"{options.place}: a day of the history was removed by retention after this read was planned ({text}): read again"
        )
    if isinstance(error, (dbapi.OperationalError, dbapi.InterfaceError, dbapi.InternalError)):
        return BackendUnavailable(f"{options.place}: {text}")
    return TaskHarborError(f"{options.place}: {text}")
