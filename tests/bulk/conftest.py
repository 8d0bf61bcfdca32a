"""Every kind of bulk store: a driver's own, and the generic one over drivers that have or have not one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from taskharbor.bulk import BulkStore, open_store
from taskharbor.bulk.generic import GenericStore
from taskharbor.drivers.memory import MemoryDriver

FILES = {
    "files": "segment_rows=10000",
    "files, small segments": "segment_rows=3&merge=2",
}
KINDS = [
    "sqlite",
    "postgres",
    "redis",
    "files",
    "files, small segments",
    "memory",
    "generic over sqlite",
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if kind == "postgres":
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
def store(kind: str, url: str) -> Iterator[BulkStore]:
    make: Callable[[str], BulkStore] = GenericStore if kind.startswith("generic") else open_store
    with make(url) as store:
        yield store
