"""Tests of Spark run on one worker of pytest-xdist, so that they share the session of `tests/conftest.py`.

Those that start clusters of their own need no share of it, and run beside the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskharbor.client import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist reads the groups.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            group = "clusters" if item.path.name in ("test_cluster.py", "test_lake_kills.py") else "spark"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[SparkSession]:
    """So that a partition is many batches, and one that dies has staged some of them."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(name, "100")
    yield spark
    spark.conf.unset(name)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a file that is not there yet."""
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client
