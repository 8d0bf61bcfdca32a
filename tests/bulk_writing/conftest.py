"""Every kind of bulk store, with a look behind its back."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from bulk_harness import NOW, Behind, MakeRecord
from psycopg import sql

from taskharbor.bulk import BulkStore, open_store
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.ids import new_id
from taskharbor.jobs import JobRecord


@pytest.fixture
def record() -> MakeRecord:
    def make(**fields: Any) -> JobRecord:
        defaults: dict[str, Any] = {
            "id": new_id(),
            "type": "mail",
            "queue": "q",
            "run_at_us": NOW,
            "created_at_us": NOW,
        }
        return JobRecord(**(defaults | fields))

    return make


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    given: str = request.getfixturevalue("postgres_url")
    return given


@pytest.fixture
def store(url: str) -> Iterator[BulkStore]:
    with open_store(url) as opened:
        yield opened


@pytest.fixture
def behind(url: str) -> Iterator[Behind]:
    """Rows of a statement on the tables themselves."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        yield lambda statement: connection.execute(statement).fetchall()
        connection.close()
    else:
        options = parse_url(url)
        with psycopg.connect(options.conninfo, autocommit=True) as session:
            session.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(options.schema)))
            yield lambda statement: _rows(session.execute(statement))


def _rows(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return cursor.fetchall() if cursor.description else []
