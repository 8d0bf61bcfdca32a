"""A fresh database file per test, and a look behind the driver's back."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from needing import Entered
from taskharbor.drivers.sqlite import SQLiteDriver

Query: TypeAlias = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def driver(path: Path) -> SQLiteDriver:
    return SQLiteDriver.from_url(f"sqlite:///{path}")


@pytest.fixture
def opened(driver: SQLiteDriver) -> Entered:
    """An open `SQLiteDriver`."""
    return Entered(driver)


@pytest.fixture
def query(path: Path) -> Query:
    """Run one statement on a connection of our own, with values for `?` or by name."""

    def run(sql: str, *values: Any, **named: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            return connection.execute(sql, named or values).fetchall()

    return run
