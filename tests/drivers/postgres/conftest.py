"""Stores of the PostgreSQL driver's tests: emptied and used again, unless a module asks for new ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg import sql

from conformance.recycled_postgres import recycler
from drivers.postgres.harness import Heard, Raw, crash_proof_server, line
from needing import Entered
from taskharbor.drivers.postgres import PostgresDriver
from taskharbor_testkit.servers import PostgresServer


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
def heard(raw: Raw) -> Heard:
    """The queues that were notified of since the last look, in order."""
    raw(sql.SQL("LISTEN {}").format(sql.Identifier(raw.options.channel)))

    def look() -> list[str]:
        # A round trip: whatever was committed before is here now.
        raw("SELECT 1")
        return [notify.payload for notify in raw.connection.notifies(timeout=0)]

    return look


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of the module's own, which may be stopped."""
    with crash_proof_server() as server:
        yield server


@pytest.fixture
def here(url: str) -> Entered:
    """A line that can break, to an empty store."""
    return Entered(line(url))
