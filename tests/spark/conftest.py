"""One Spark session for all tests of a run: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from needing import need
from taskharbor.spark.session import SparkUnavailable, check, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All on one worker of pytest-xdist, so that they share the session."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    try:
        check()
    except SparkUnavailable as error:
        need(str(error))
    session = local_session("tests", master="local[2,4]", settings={"spark.sql.shuffle.partitions": "2"})
    yield session
    session.stop()
