"""Things that a test cannot do without. One that is missing skips the test on a laptop and fails it in CI, where nobody
reads the skips."""

import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

REDIS_VERSIONS = [pytest.param("7.0", marks=pytest.mark.installed), "newest"]
"""The oldest Redis that the driver works with, which no wheel brings, and the newest server to be had."""


class Entered(NamedTuple):
    """A fixture's value for an `async def` test, which gets what the manager gives on the test's own event loop."""

    manager: AbstractAsyncContextManager[Any]


class Certificate(NamedTuple):
    """Files: a certificate for 127.0.0.1, its key, and the authority that vouches for both."""

    chain: Path
    key: Path
    authority: Path


def need(what: str) -> NoReturn:
    """Skip or fail the test: this is missing."""
    if os.environ.get("CI"):
        pytest.fail(f"CI has to have it: {what}", pytrace=False)
    pytest.skip(what)
