"""Transactions, and the SQL that runs in them: a file of `sql/` per family of operations, each statement under a `-- name:` line.

`/*rows: n*/` in a statement stands for row values of n columns. Such a statement takes many rows in one step, because
Python gives up the GIL at every step and a busy handler thread may keep it for milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from sqlite3 import Connection
from typing import Any

from taskharbor.jobs import JobRecord

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_ROWS = re.compile(r"/\*rows: (\d+)\*/")
_CHUNKS = (50, 10, 1)
"""Rows per step: a few sizes, so that every one of them is a statement prepared once."""


class Transaction:
    """A connection in a transaction. `notifies` says that waiters are to be woken once it is committed."""

    __slots__ = ("connection", "notifies", "outbox")

    def __init__(self, connection: Connection, outbox: list[JobRecord] | None = None) -> None:
        """`outbox`: takes the jobs for failure queues, where those are kept in other databases."""
        self.connection = connection
        self.notifies = False
        self.outbox = outbox


@cache
def load(family: str, package: str = __package__) -> dict[str, str]:
    """The statements of one file of a package's folder `sql`, by name."""
    text = (files(package) / "sql" / f"{family}.sql").read_text("utf-8")
    parts = _NAME.split(text)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


@cache
def _for_rows(statement: str, count: int) -> str:
    def placeholders(match: re.Match[str]) -> str:
        return ", ".join([f"({', '.join('?' * int(match[1]))})"] * count)

    return _ROWS.sub(placeholders, statement)


def insert_rows(connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> int:
    """Run a `/*rows*/` statement over all rows; how many rows it changed."""
    changed = 0
    for chunk in _chunks(rows):
        values = [value for row in chunk for value in row]
        changed += connection.execute(_for_rows(statement, len(chunk)), values).rowcount
    return changed


def _chunks(rows: Sequence[tuple[Any, ...]]) -> Iterator[Sequence[tuple[Any, ...]]]:
    start = 0
    for size in _CHUNKS:
        while len(rows) - start >= size:
            yield rows[start : start + size]
            start += size
