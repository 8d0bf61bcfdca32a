"""Every kind of bulk store, with a look behind its back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bulk_writing.behind_the_store import Behind, behind_the_store
from taskharbor.bulk.store import BulkStore, open_store


@pytest.fixture(params=["sqlite", "postgres", "redis", "files", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "files":
        return f"file://{tmp_path}/store?sync=off"
    given: str = request.getfixturevalue(f"{request.param}_url")
    return given


@pytest.fixture
def store(url: str) -> Iterator[BulkStore]:
    with open_store(url) as opened:
        yield opened


@pytest.fixture
def behind(url: str) -> Iterator[Behind]:
    with behind_the_store(url) as opened:
        yield opened
