"""A handle on a broker, by way of a fault proxy."""

from __future__ import annotations

import pytest

from drivers.http.http_line import line
from needing import Entered


@pytest.fixture
def here() -> Entered:
    """An open `Line`."""
    return Entered(line())
