"""Runs the kit, every case on a fresh store: as the tests of a pytest module, or by `check`, outside of pytest."""

from __future__ import annotations

import fnmatch
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from taskharbor_testkit.conformance.backend import Backend, Factory, as_backend
from taskharbor_testkit.conformance.case import CASES, Skip, run_case
from taskharbor_testkit.conformance.machine import Effort, run_machine

MACHINE = "machine.agrees_with_the_model"
"""Name under which the state machine appears among the cases."""


class Verdict(msgspec.Struct, frozen=True):
    """The result of one case."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    message: str = ""


class Report(msgspec.Struct, frozen=True):
    verdicts: list[Verdict]
    effort: Effort

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.outcome == "failed"]

    @property
    def ok(self) -> bool:
        return not self.failures

    def count(self, outcome: str) -> int:
        return sum(verdict.outcome == outcome for verdict in self.verdicts)


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


def check(
    source: Backend | Factory | str,
    *,
    only: str = "*",
    machine: bool = True,
    effort: Effort | None = None,
    fail_fast: bool = False,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Report:
    """Judge a driver: `source` is a factory, a URL (with `{fresh}`) or a Backend; `only` is a pattern of names."""
    backend = as_backend(source)
    effort = effort or Effort.from_environment()
    verdicts: list[Verdict] = []
    for name, judge in _judges(backend, machine, effort):
        if not fnmatch.fnmatchcase(name, only):
            continue
        verdict = _verdict(name, judge)
        verdicts.append(verdict)
        on_verdict(verdict)
        if fail_fast and verdict.outcome == "failed":
            break
    return Report(verdicts, effort)


def _judges(backend: Backend, machine: bool, effort: Effort) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for name, one in CASES.items():
        yield name, lambda directory, one=one: run_case(one, backend, directory)  # type: ignore[misc]
    if machine:
        yield MACHINE, lambda directory: run_machine(backend, effort)


def _verdict(name: str, judge: Callable[[Path], None]) -> Verdict:
    started = time.perf_counter()
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    message = ""
    with tempfile.TemporaryDirectory(prefix="taskharbor-conformance-") as directory:
        try:
            judge(Path(directory))
        except Skip as skip:
            outcome, message = "skipped", str(skip)
        except Exception as error:
            outcome, message = "failed", "".join(traceback.format_exception(error))
    return Verdict(name, outcome, round(time.perf_counter() - started, 4), message)
