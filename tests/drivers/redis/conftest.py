"""Stores of a test's own, on the server that all tests of the process share."""

from __future__ import annotations

import pytest

from drivers.redis.redis_shelf import line, shelf
from needing import Entered


@pytest.fixture
def on() -> Entered:
    return Entered(shelf())


@pytest.fixture
def here() -> Entered:
    return Entered(line())
