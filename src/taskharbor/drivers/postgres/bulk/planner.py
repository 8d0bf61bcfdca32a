"""The small questions that precede a large read, on one connection that is made again where it was lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from taskharbor.drivers.postgres.bulk.statements import named
from taskharbor.drivers.postgres.failures import is_lost, translated
from taskharbor.drivers.postgres.options import Options

Row = tuple[Any, ...]


class Planner:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._connection: psycopg.Connection[Row] | None = None

    def rows(self, name: str, values: Mapping[str, Any] | None = None) -> list[Row]:
        """The answer to a statement of `bulk_reading.sql`."""
        statement = named(name, self._options.schema)
        is_used = self._connection is not None
        try:
            try:
                return self._execute(statement, values or {})
            except psycopg.Error as error:
                # One that stood idle for a while may have been cut off; these statements only look, so look again.
                if not (is_used and is_lost(error)):
                    raise
                self.close()
                return self._execute(statement, values or {})
        except psycopg.Error as error:
            self.close()
            raise translated(error, self._options) from error

    def row(self, name: str, values: Mapping[str, Any] | None = None) -> Row:
        (row,) = self.rows(name, values)
        return row

    def _execute(self, statement: Any, values: Mapping[str, Any]) -> list[Row]:
        if self._connection is None:
            self._connection = psycopg.connect(
                self._options.conninfo, autocommit=True, prepare_threshold=None
            )
        return self._connection.execute(statement, values).fetchall()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
