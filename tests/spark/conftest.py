"""Tests of Spark run on one worker of pytest-xdist, so that they share the session of `tests/conftest.py`.

Those that start clusters of their own need no share of it, and run beside the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
OWN_CLUSTERS = {"test_cluster.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            group = "clusters" if item.path.name in OWN_CLUSTERS else "spark"
            item.add_marker(pytest.mark.xdist_group(group))
