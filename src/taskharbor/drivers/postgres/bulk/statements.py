"""Statements with their values written into them: PostgreSQL sends a whole result as binary rows only for such."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import LiteralString

from psycopg import sql

from taskharbor.bulk.tables import Selection, Table
from taskharbor.drivers.postgres.rows import STATE_NUMBERS
from taskharbor.drivers.postgres.statements import load

Value = str | int | None

_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")
_STATE_OF_JOB = "CASE WHEN j.state > 1 THEN j.state WHEN j.run_at > %(now)s THEN 0 ELSE 1 END"


@cache
def named(name: str, schema: str) -> LiteralString:
    """One statement of `bulk_reading.sql` with its columns."""
    statements = load("bulk_reading", schema)
    text = statements[name]
    for columns in ("attempt_columns", "live_columns", "ended_columns"):
        text = text.replace(f"/*{columns}*/", statements[columns])
    return text


def filters(table: Table, selection: Selection) -> LiteralString:
    """Conditions for what a selection restricts, and for nothing else: an index is of use only to a condition that is there."""
    row: LiteralString = "a" if table == "attempts" else "j"
    instant: LiteralString = "ended_at" if table == "attempts" else "created_at"
    state = "a.state" if table == "attempts" else _STATE_OF_JOB
    given: tuple[tuple[object, LiteralString], ...] = (
        (selection.queue, "q.name = %(queue)s"),
        (selection.type, f"{row}.type = %(type)s"),
        (selection.state, f"{state} = %(state)s"),
        (selection.since_us, f"{row}.{instant} >= %(since)s"),
        (selection.until_us, f"{row}.{instant} < %(before)s"),
    )
    conditions: list[LiteralString] = [condition for value, condition in given if value is not None]
    return "".join([f"AND {condition} " for condition in conditions])


def values(selection: Selection) -> dict[str, Value]:
    return {
        "queue": selection.queue,
        "type": selection.type,
        "state": None if selection.state is None else STATE_NUMBERS[selection.state],
        "since": selection.since_us,
        "before": selection.until_us,
    }


def composed(statement: str, given: Mapping[str, Value]) -> str:
    """The statement with every value as a literal, quoted by the client library."""

    def literal(match: re.Match[str]) -> str:
        return "%" if match[0] == "%%" else sql.Literal(given[match[1]]).as_string(None)

    return _PLACEHOLDER.sub(literal, statement)
