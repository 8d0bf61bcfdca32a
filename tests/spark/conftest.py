"""Tests of Spark run on one worker of pytest-xdist, so that they share the session of `tests/conftest.py`.

Those that start clusters of their own need no share of it, and run beside the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark.compiling import compiling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
OWN_CLUSTERS = {"test_cluster.py", "test_of_a_task_that_runs_twice_at_once_only_one_copy_counts"}
"""Files and tests."""


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist reads the groups.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            group = "spark" if OWN_CLUSTERS.isdisjoint((item.path.name, item.name)) else "clusters"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def compiled_spark(spark: SparkSession) -> Iterator[SparkSession]:
    """For many rows, for what Spark does only while it adapts a query, and to show that results are the same either way."""
    with compiling(spark):
        yield spark
