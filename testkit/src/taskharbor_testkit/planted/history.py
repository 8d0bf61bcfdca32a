"""Bugs in the attempt log."""

from __future__ import annotations

from taskharbor.drivers.memory import MemoryStore
from taskharbor.drivers.memory.lines import Line
from taskharbor.drivers.memory.log import AttemptLog
from taskharbor.jobs import Attempt, Failure, JobRecord, JobState, Micros, Outcome
from taskharbor_testkit.planted.registry import planted


class _Selective(AttemptLog):
    """Writes the rows of one outcome so many times."""

    def __init__(self, outcome: Outcome, times: int) -> None:
        super().__init__()
        self._outcome = outcome
        self._times = times

    def append(
        self,
        line: Line,
        record: JobRecord,
        outcome: Outcome,
        state: JobState,
        error: Failure | None,
        now: Micros,
    ) -> None:
        for _ in range(self._times if outcome is self._outcome else 1):
            super().append(line, record, outcome, state, error, now)


class _Skipping(AttemptLog):
    def read(self, after: int, limit: int) -> tuple[list[Attempt], int]:
        rows, last = super().read(after, limit)
        return rows, last + 1 if len(rows) == limit else last


@planted
class ReleaseNotLogged(MemoryStore):
    """Every lease that ends leaves a row, a released one too."""

    def __init__(self) -> None:
        super().__init__()
        self.log = _Selective(Outcome.RELEASED, 0)


@planted
class MergeNotLogged(MemoryStore):
    """A merged job leaves a row."""

    def __init__(self) -> None:
        super().__init__()
        self.log = _Selective(Outcome.MERGED, 0)


@planted
class RetryLoggedTwice(MemoryStore):
    """Every lease that ends leaves one row, not two."""

    def __init__(self) -> None:
        super().__init__()
        self.log = _Selective(Outcome.RETRIED, 2)


@planted
class LogCursorSkipsARow(MemoryStore):
    """A reader that resumes from its cursor sees every row."""

    def __init__(self) -> None:
        super().__init__()
        self.log = _Skipping()
