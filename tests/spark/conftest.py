"""Tests of Spark run on one worker of pytest-xdist, so that they share the session of `tests/conftest.py`.

Those that start clusters of their own need no share of it, and run beside the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
OWN_CLUSTERS = {"test_cluster.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            group = "clusters" if item.path.name in OWN_CLUSTERS else "spark"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def compiled_spark(spark: SparkSession) -> Iterator[SparkSession]:
    """The session as users have it, queries compiled and adapted on the way: for many rows, and to show that both ways agree."""
    from taskharbor.demo.analysis import SMALL

    for name in SMALL.keys() - {"spark.sql.shuffle.partitions"}:
        spark.conf.unset(name)
    yield spark
    for name, value in SMALL.items():
        spark.conf.set(name, value)
