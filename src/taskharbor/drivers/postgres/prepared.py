"""Statements that are prepared once on a connection, and run with as little in between as there can be.

A cursor of the library's works out for every call how each value is written, whether to prepare, and what to make of each
result: sixty steps of Python, which an idle worker pays between hearing of a job and claiming it. Our statements name the
types of their values, so all of them can be sent as text; and there is one result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, LiteralString, TypeAlias

import psycopg
from psycopg import AsyncConnection, generators, pq
from psycopg.adapt import Transformer

Row: TypeAlias = tuple[Any, ...]

_PLACE = re.compile(r"%(.)")
_TUPLES, _DONE = pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK


class Prepared:
    """The statements of one connection."""

    def __init__(self, connection: AsyncConnection[Row], *, is_shared: bool) -> None:
        self._connection = connection
        self._lock = connection.lock if is_shared else None
        """Where somebody else may use the connection at the same time."""
        self._names: dict[str, bytes] = {}
        self._encoding = connection.info.encoding
        self._reading = Transformer(connection)

    async def rows(self, statement: LiteralString, values: Sequence[Any]) -> list[Row]:
        connection = self._connection
        pgconn = connection.pgconn
        written = self._written(values)
        formats = _formats(statement)
        lock = self._lock
        if lock is not None:
            await lock.acquire()
        try:
            name = self._names.get(statement) or await self._prepare(statement)
            pgconn.send_query_prepared(name, written, param_formats=formats, result_format=pq.Format.BINARY)
            result = (await connection.wait(generators.execute(pgconn)))[-1]
        finally:
            if lock is not None:
                lock.release()
        if result.status == _TUPLES:
            self._reading.set_pgresult(result, set_loaders=True, format=pq.Format.BINARY)
            return self._reading.load_rows(0, result.ntuples, tuple)
        if result.status == _DONE:
            return []
        raise psycopg.errors.error_from_result(result, encoding=self._encoding)

    async def _prepare(self, statement: LiteralString) -> bytes:
        name = b"taskharbor_%d" % len(self._names)
        pgconn = self._connection.pgconn
        pgconn.send_prepare(name, _numbered(statement).encode(self._encoding))
        result = (await self._connection.wait(generators.execute(pgconn)))[-1]
        if result.status != _DONE:
            raise psycopg.errors.error_from_result(result, encoding=self._encoding)
        self._names[statement] = name
        return name

    def _written(self, values: Sequence[Any]) -> list[bytes | None]:
        encoding = self._encoding
        written: list[bytes | None] = []
        add = written.append
        for value in values:
            # Subclasses, an enumeration say, are written like what they are made of.
            if isinstance(value, str):
                text = value.encode(encoding)
                if 0 in text:
                    # It would end there.
                    raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
                add(text)
            elif value is None or isinstance(value, bytes):
                add(value)
            elif isinstance(value, bool):
                add(b"t" if value else b"f")
            elif isinstance(value, int):
                add(b"%d" % value)
            elif isinstance(value, float):
                # Where somebody counts microseconds in them.
                add(b"%d" % round(value))
            else:
                raise psycopg.ProgrammingError(f"values of type {type(value).__name__} cannot be sent")
        return written


@cache
def _formats(statement: LiteralString) -> Sequence[int]:
    """Of the statement's values: `%s` is text, `%b` is bytes as they are."""
    return [int(kind == "b") for kind in _PLACE.findall(statement) if kind != "%"]


@cache
def _numbered(statement: LiteralString) -> str:
    """The statement as the server wants it."""
    numbers = iter(range(1, len(_formats(statement)) + 1))
    return _PLACE.sub(lambda place: "%" if place[1] == "%" else f"${next(numbers)}", statement)
