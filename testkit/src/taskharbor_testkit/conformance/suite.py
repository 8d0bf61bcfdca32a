"""The kit as pytest tests: an author's whole test file is one line, and every case is a test of its own name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskharbor_testkit.conformance.backend import Backend, Factory, as_backend
from taskharbor_testkit.conformance.case import CASES, Skip, run_case
from taskharbor_testkit.conformance.effort import Effort
from taskharbor_testkit.conformance.machine import run_machine


def conformance_tests(
    source: Backend | Factory | str, *, share: float = 1.0
) -> dict[str, Callable[..., Any]]:
    """Tests for a module's globals: `globals().update(conformance_tests(factory))`.

    The factory is called once per store with a fresh directory (or with nothing, if it takes no argument) and
    returns a driver or its URL. Returning a URL also runs the cases that kill a process. `share`: the part of the usual
    histories that the state machine tries, for a driver that is run against several servers.
    """
    backend = as_backend(source)

    @pytest.mark.parametrize("name", list(CASES))
    def test_conformance(name: str, tmp_path: Path) -> None:
        try:
            run_case(CASES[name], backend, tmp_path)
        except Skip as skip:
            pytest.skip(str(skip))

    def test_state_machine() -> None:
        run_machine(backend, Effort.from_environment(share))

    return {"test_conformance": test_conformance, "test_state_machine": test_state_machine}
