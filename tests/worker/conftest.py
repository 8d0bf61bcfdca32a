"""Fixtures of the worker's tests."""

import pytest

from needing import Entered
from worker.stage import Trouble, stage, troubled_stage


@pytest.fixture
def here() -> Entered:
    """A `Stage`."""
    return Entered(stage())


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


@pytest.fixture
def troubled(trouble: Trouble) -> Entered:
    """A `Stage` whose workers have this trouble."""
    return Entered(troubled_stage(trouble))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For handlers that never stop: how long they are waited for after the grace period makes no difference to them."""
    monkeypatch.setattr("taskharbor.worker.backend_loop._ABORT_SECONDS", 0.2)
