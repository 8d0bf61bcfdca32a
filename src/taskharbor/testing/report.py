"""What a drain did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from taskharbor.jobs import Outcome
from taskharbor.testing.execution import Executed


class DrainReport:
    """Executions in order, counted by how they ended. An execution that was retried counts, and so does its retry."""

    def __init__(self, executed: Sequence[Executed]) -> None:
        self.executed = list(executed)
        self.counts: Counter[Outcome] = Counter(one.outcome for one in executed)

    @property
    def total(self) -> int:
        return len(self.executed)

    @property
    def done(self) -> int:
        return self.counts[Outcome.DONE]

    @property
    def retried(self) -> int:
        """Failed, and waiting for another try."""
        return self.counts[Outcome.RETRIED]

    @property
    def dead(self) -> int:
        return self.counts[Outcome.DEAD]

    @property
    def cancelled(self) -> int:
        return self.counts[Outcome.CANCELLED]

    @property
    def released(self) -> int:
        """Snoozed."""
        return self.counts[Outcome.RELEASED]

    @property
    def errors(self) -> list[BaseException]:
        """What handlers raised, with their tracebacks."""
        return [one.error for one in self.executed if one.error is not None]

    def raise_errors(self) -> None:
        """Raise what handlers raised: the exception itself, or a group where there are several."""
        errors = self.errors
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} executions failed", errors)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items()))
        lines = [f"<DrainReport {counts or 'nothing to do'}>"]
        lines += [f"  {one}" for one in self.executed if one.error is not None]
        return "\n".join(lines)
