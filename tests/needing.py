"""What a test cannot do without: skips it on a laptop, fails it in CI, where nobody reads the skips."""

import os
from typing import NoReturn

import pytest


def need(what: str) -> NoReturn:
    """Something that the test cannot do without is not there."""
    if os.environ.get("CI"):
        pytest.fail(f"CI has to have it: {what}", pytrace=False)
    pytest.skip(what)
