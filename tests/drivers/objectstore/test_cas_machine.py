"""Nothing lost, doubled or guessed: a compare-and-swap object in a storm, and planted bugs that the storm must find."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from drivers.objectstore.cas_machine import CasMachine
from drivers.objectstore.marks import Marks
from taskharbor.drivers.objectstore.blobs import Conflict, Unclear
from taskharbor.drivers.objectstore.cas import CasObject, Header, answer

TestCasObject = CasMachine.TestCase
TestCasObject.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class _Planted(CasObject[Marks]):
    """Has a bug in what it does after a write that failed."""

    async def _write(self, held: Any, outcomes: Any) -> bool:
        error: list[Exception] = []
        blobs = self._blobs
        self._blobs = _Noting(blobs, error)  # type: ignore[assignment]
        try:
            has_landed = await super()._write(held, outcomes)
        finally:
            self._blobs = blobs
        if not has_landed:
            self._after(error[0], held, outcomes)
        return has_landed

    def _after(self, error: Exception, held: Any, outcomes: Any) -> None: ...


class _Noting:
    def __init__(self, inner: Any, error: list[Exception]) -> None:
        self._inner = inner
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def write(self, *args: Any) -> Any:
        try:
            return await self._inner.write(*args)
        except (Conflict, Unclear) as error:
            self._error.append(error)
            raise


class TakesUnclearForFailure(_Planted):
    def _after(self, error: Exception, held: Any, outcomes: Any) -> None:
        if isinstance(error, Unclear):
            self._attempts.pop()


class TakesRefusalForFailure(_Planted):
    def _after(self, error: Exception, held: Any, outcomes: Any) -> None:
        if isinstance(error, Conflict):
            self._attempts.pop()


class TakesUnclearForSuccess(_Planted):
    def _after(self, error: Exception, held: Any, outcomes: Any) -> None:
        if isinstance(error, Unclear):
            answer(self._attempts.pop().outcomes)


class KeepsStateOfFailedWrite(_Planted):
    def _after(self, error: Exception, held: Any, outcomes: Any) -> None:
        self._held = held


class AnswersFromMemory(CasObject[Marks]):
    """Without a term, and without a look."""

    def _is_believed(self) -> bool:
        return self._held is not None


class OverlooksNewEpochs(CasObject[Marks]):
    def _accept(self, held: Any) -> None:
        term, self._term = self._term, None
        try:
            super()._accept(held)
        finally:
            self._term = term


class AnswersWithTheLastRun(CasObject[Marks]):
    """Where an earlier write turns out to have landed, the answer must be of that one's run, not of a later one."""

    def _settle_attempts(self, header: Header) -> None:
        landed = any(header.fate(one.serial, one.commit).name == "LANDED" for one in self._attempts)
        if landed:
            answer(self._attempts[-1].outcomes)
        super()._settle_attempts(header)


@pytest.mark.parametrize(
    "planted",
    [
        TakesUnclearForFailure,
        TakesRefusalForFailure,
        TakesUnclearForSuccess,
        KeepsStateOfFailedWrite,
        AnswersFromMemory,
        OverlooksNewEpochs,
        AnswersWithTheLastRun,
    ],
)
def test_the_storm_finds_an_object_that(planted: type[CasObject[Marks]]) -> None:
    machine = type(f"{planted.__name__}Machine", (CasMachine,), {"object_class": planted})
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=1500,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )
