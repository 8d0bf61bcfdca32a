"""SQL from `sql/*.sql`: one file per family of operations, each statement under a `-- name:` line.

`$schema` stands for the schema that holds the tables: every name is qualified, because behind a pooler a session's
search path belongs to whoever used it last.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import LiteralString, cast

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def load(family: str, schema: str) -> dict[str, LiteralString]:
    """The statements of one file by name, for one schema."""
    text = (files(__package__) / "sql" / f"{family}.sql").read_text("utf-8")
    # Statements are always run with values, if only an empty list: so a per cent sign stands doubled.
    parts = _NAME.split(text.replace("$schema", quoted(schema).replace("%", "%%")))[1:]
    statements = {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}
    # Literal but for a schema name that was checked and quoted.
    return cast("dict[str, LiteralString]", statements)


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'
