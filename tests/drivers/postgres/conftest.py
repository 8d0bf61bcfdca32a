"""A schema of its own per test, records for it, and a look behind the driver's back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from drivers.postgres.pg_harness import NOW, Raw
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor.jobs import JobRecord
from taskharbor.requests import new_id

MakeRecord = Callable[..., JobRecord]


@pytest.fixture
def now() -> int:
    return NOW


@pytest.fixture
def driver(postgres_url: str) -> PostgresDriver:
    return PostgresDriver.from_url(postgres_url)


@pytest.fixture
def record() -> MakeRecord:
    def make(**fields: Any) -> JobRecord:
        defaults = {"id": new_id(), "type": "mail", "queue": "q", "run_at_us": NOW, "created_at_us": NOW}
        return JobRecord(**(defaults | fields))

    return make


@pytest.fixture
def raw(postgres_url: str) -> Iterator[Raw]:
    """Somebody else's connection, whose search path is the store's schema."""
    options = PostgresDriver.from_url(postgres_url).options
    with psycopg.connect(options.conninfo, autocommit=True) as connection:
        yield Raw(connection, options.schema)
