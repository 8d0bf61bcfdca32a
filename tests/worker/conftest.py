"""Fixtures of the worker's tests."""

import pytest


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For handlers that never stop: how long they are waited for after the grace period makes no difference to them."""
    monkeypatch.setattr("taskharbor.worker.engine._ABORT_SECONDS", 0.2)
