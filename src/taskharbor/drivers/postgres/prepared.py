"""Statements that are prepared once on a connection, and run with as little in between as there can be.

A cursor of the library's works out for every call how each value is written, whether to prepare, and what to make of each
result: sixty steps of Python, which an idle worker pays between hearing of a job and claiming it. Our statements name the
types of their values, so all of them can be sent as text; and there is one result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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

    def __init__(self, connection: AsyncConnection[Row]) -> None:
        self._connection = connection
        self._names: dict[str, bytes] = {}
        self._encoding = connection.info.encoding
        self._reading = Transformer(connection)
        self._writers: dict[type, Callable[[Any], bytes]] = {
            str: self._text,
            int: b"%d".__mod__,
            bool: lambda value: b"t" if value else b"f",
            bytes: lambda value: value,
            # Where somebody counts microseconds in them.
            float: lambda value: b"%d" % round(value),
        }

    async def rows(self, statement: LiteralString, values: Sequence[Any]) -> list[Row]:
        connection = self._connection
        pgconn = connection.pgconn
        writers = self._writers
        try:
            written = [None if value is None else writers[type(value)](value) for value in values]
        except KeyError as unknown:
            self._learn(unknown.args[0])
            return await self.rows(statement, values)
        formats = _formats(statement)
        async with connection.lock:
            name = self._names.get(statement) or await self._prepare(statement)
            pgconn.send_query_prepared(name, written, param_formats=formats, result_format=pq.Format.BINARY)
            result = (await connection.wait(generators.execute(pgconn)))[-1]
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

    def _learn(self, kind: type) -> None:
        """An enumeration, say: it is written like what it is made of."""
        for known in (bool, int, str, bytes, float):
            if issubclass(kind, known):
                self._writers[kind] = self._writers[known]
                return
        raise psycopg.ProgrammingError(f"values of type {kind.__name__} cannot be sent")

    def _text(self, value: str) -> bytes:
        written = value.encode(self._encoding)
        if b"\0" in written:
            # It would end there.
            raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
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
