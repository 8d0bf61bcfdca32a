"""Calls that wait for a cell's answer, and writes that wait for the object's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

from taskharbor.drivers.objectstore.envelope import Fate, Header
from taskharbor.errors import BackendUnavailable


class Outcome:
    """What a step returned or raised, in one run of it."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value = value
        self.error = error


class Call:
    """A step, and whoever waits for its outcome."""

    __slots__ = ("deadline", "future", "is_look", "is_of_a_caller", "step")

    def __init__(
        self,
        step: Callable[[Any], Any],
        is_look: bool,
        is_of_a_caller: bool,
        future: asyncio.Future[Any],
        deadline: float,
    ) -> None:
        self.step = step
        self.is_look = is_look
        self.is_of_a_caller = is_of_a_caller
        """One who may come back with the next change as soon as this one is answered."""
        self.future = future
        self.deadline = deadline

    def run(self, state: Any) -> Outcome:
        try:
            return Outcome(self.step(state))
        except Exception as error:
            return Outcome(error=error)

    def answer(self, outcome: Outcome) -> None:
        if self.future.done():  # Its caller was cancelled, or has an answer already.
            return
        if outcome.error is not None:
            self.future.set_exception(outcome.error)
        else:
            self.future.set_result(outcome.value)

    def fail(self, error: Exception) -> None:
        self.answer(Outcome(error=error))


Outcomes: TypeAlias = list[tuple[Call, Outcome]]


def answer_all(outcomes: Outcomes) -> None:
    for call, outcome in outcomes:
        call.answer(outcome)


def keep_unanswered(calls: list[Call]) -> bool:
    """Drop the others; whether there are any."""
    calls[:] = [call for call in calls if not call.future.done()]
    return bool(calls)


class Attempt:
    """A write that has no good answer yet, and what to tell whom if it turns out to have landed."""

    __slots__ = ("commit", "outcomes", "serial")

    def __init__(self, serial: int, commit: bytes, outcomes: Outcomes) -> None:
        self.serial = serial
        self.commit = commit
        self.outcomes = outcomes

    def is_settled(self, header: Header, where: str) -> bool:
        """Whether this content says what became of it. Who is concerned has an answer then, or will be asked again."""
        match header.fate(self.serial, self.commit):
            case Fate.OPEN:
                return False
            case Fate.LANDED:
                answer_all(self.outcomes)
            case Fate.FORGOTTEN:
                for call, _ in self.outcomes:
                    call.fail(
                        BackendUnavailable(
                            f"{where}: so many others wrote meanwhile that it cannot be told whether this change was made; "
                            "repeating it is safe"
                        )
                    )
        return True
