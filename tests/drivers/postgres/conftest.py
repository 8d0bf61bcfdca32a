"""Stores of the PostgreSQL driver's tests: emptied and used again, unless a module asks for new ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.recycled_postgres import recycler
from drivers.postgres.pg_harness import Raw, line
from needing import Entered
from taskharbor.drivers.postgres import PostgresDriver


@pytest.fixture
def url() -> str:
    """An empty store. Its schema is there, and may have been used before."""
    return recycler().fresh_url()


@pytest.fixture
def driver(url: str) -> PostgresDriver:
    """Not open yet."""
    return PostgresDriver.from_url(url)


@pytest.fixture
def store(driver: PostgresDriver) -> Entered:
    return Entered(driver)


@pytest.fixture
def other(driver: PostgresDriver) -> Entered:
    """Another handle on the same store."""
    return Entered(driver.clone())


@pytest.fixture
def raw(driver: PostgresDriver) -> Iterator[Raw]:
    with Raw(driver.options) as raw:
        yield raw


@pytest.fixture
def here(url: str) -> Entered:
    """A line that can break, to an empty store."""
    return Entered(line(url))
