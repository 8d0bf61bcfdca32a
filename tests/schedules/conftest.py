"""A store with a clock that is moved by hand: on memory and SQLite, and on the servers where the driver matters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from needing import Entered
from schedules.harness import Harness
from taskharbor.drivers.registry import connect

HERE = ["memory", "sqlite"]
EVERYWHERE = [*HERE, "postgres", "redis", "file"]


@pytest.fixture(params=HERE)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Entered:
    """A harness on the driver that the parameter names."""
    kind: str = request.param
    if kind in ("postgres", "redis"):
        url: str = request.getfixturevalue(f"{kind}_url")
    else:
        url = {
            "memory": "memory://",
            "sqlite": f"sqlite:///{tmp_path}/jobs.db",
            "file": f"file://{tmp_path}/s",
        }[kind]

    @asynccontextmanager
    async def entered() -> AsyncIterator[Any]:
        harness = Harness(connect(url))
        async with harness.client:
            yield harness

    return Entered(entered())
