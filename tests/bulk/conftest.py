"""Every kind of bulk store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bulk.bulk_history import KINDS
from taskharbor.bulk.store import BulkStore, DriverStore, open_store
from taskharbor.drivers.memory import MemoryDriver

FILES = {
    "files": "segment_rows=10000",
    "files, small segments": "segment_rows=3&merge=2",
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if kind.startswith("postgres"):
        yield request.getfixturevalue("postgres_url")
    elif kind == "redis":
        yield request.getfixturevalue("redis_url")
    elif kind in FILES:
        yield f"file://{tmp_path}/store?sync=off&{FILES[kind]}"
    elif kind == "memory":
        yield f"memory://{tmp_path.name}"
        MemoryDriver.drop(tmp_path.name)
    else:
        yield f"sqlite:///{tmp_path}/jobs.db?durability=normal"


@pytest.fixture
def store(url: str, kind: str) -> Iterator[BulkStore]:
    # As brokers and the command line write to PostgreSQL.
    with DriverStore(url) if kind.endswith("by the contract") else open_store(url) as store:
        yield store
