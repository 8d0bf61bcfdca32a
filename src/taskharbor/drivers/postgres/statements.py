"""SQL from `sql/*.sql`: one file per family of operations, each statement under a `-- name:` line. Values are `$1`, `$2`, ...

`$schema` stands for the schema that holds the tables: every name is qualified, because behind a pooler a session's
search path belongs to whoever used it last. `/*name*/` stands for a list of columns that `rows` makes.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from taskharbor.drivers.postgres.rows import ATTEMPT_COLUMNS, CLAIMED_COLUMNS, JOB_COLUMNS

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_LISTS = {
    "attempt": ATTEMPT_COLUMNS,
    "claimed": CLAIMED_COLUMNS,
    "job": JOB_COLUMNS,
    # The fields of a `job_batch`, the first values of a statement.
    "batch": ", ".join(f"${n}" for n in range(1, 23)),
}


@cache
def load(family: str, schema: str) -> dict[str, str]:
    """The statements of one file by name, for one schema."""
    text = (
        (files(__package__) / "sql" / f"{family}.sql").read_text("utf-8").replace("$schema", quoted(schema))
    )
    for name, columns in _LISTS.items():
        text = text.replace(f"/*{name}*/", columns)
    parts = _NAME.split(text)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


@cache
def call(function: str, schema: str, count: int) -> str:
    """A call of a function of the store with so many values. Their types are those of its parameters."""
    values = ", ".join(f"${n}" for n in range(1, count + 1))
    return f"SELECT * FROM {quoted(schema)}.{function}({values})"  # noqa: S608


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


@cache
def channel(schema: str) -> str:
    """What those who wait listen to."""
    return f"taskharbor:{schema}"
