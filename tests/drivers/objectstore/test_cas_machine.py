"""Nothing is lost, doubled or guessed: several handles on a compare-and-swap object in a storm, and planted bugs that the storm
must find. Hypothesis chooses the order of events.

Each run of each change adds a mark that nobody else has. The object only ever grows, so in the end its list of marks tells
everything. A caller that was told a place is there, at that place, with what that very run left, once. A caller that was told
nothing certain is there once or not at all. And whatever anybody ever saw is how the list once began.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from random import Random
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, note, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from drivers.objectstore.fake_blobs import STORM, Faults, FaultyBlobs, HeldBlobs, Weather
from drivers.objectstore.marks import NAME, FixedTerm, Marks, VirtualLoop, add_by_run, all_marks
from taskharbor.drivers.objectstore import blobs as backoff
from taskharbor.drivers.objectstore.cas import CasObject, Content, Deposed, Header, Outcome, Term, answer
from taskharbor.drivers.objectstore.leadership import raise_epochs
from taskharbor.errors import BackendUnavailable

CREW = 3


class Asked(msgspec.Struct, eq=False):
    """One call, and the answers of others before it began."""

    task: asyncio.Task[Any]
    who: int
    term: FixedTerm | None
    answered_before: set[str]
    epoch_before: int


class CasMachine(RuleBasedStateMachine):
    object_class: ClassVar[type[CasObject[Marks]]] = CasObject
    faults: ClassVar[Faults] = STORM

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.held = HeldBlobs()
        self.numbers = itertools.count()
        self.changes: dict[str, Asked] = {}
        self.looks: list[Asked] = []
        self.crew: list[CasObject[Marks]] = []
        self.terms: list[FixedTerm | None] = [None] * CREW
        self.epoch = 0

    @initialize(
        seed=st.integers(0, 2**32),
        strength=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        stale=st.booleans(),
    )
    def begin(self, seed: int, strength: float, stale: bool) -> None:
        backoff._random.seed(seed)
        likely = {fault: chance * strength for fault, chance in self.faults.items()}
        self.storm: Faults = {**likely, "stale": STORM["stale"] * stale}
        self.is_stale = stale
        self.weather = Weather(Random(seed), self.storm)
        self.blobs = FaultyBlobs(self.held, self.weather)
        self.crew = [self.new_object() for _ in range(CREW)]

    def new_object(self, term: Term | None = None) -> CasObject[Marks]:
        return self.object_class(self.blobs, NAME, Marks, term=term, give_up_after=5.0)

    def run(self, story: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(story)

    # -- what can happen ----------------------------------------------------------------------------------

    @rule(who=st.integers(0, CREW - 1), many=st.integers(1, 4))
    def change(self, who: int, many: int) -> None:
        async def start() -> None:
            for _ in range(many):
                mark = f"m{next(self.numbers)}"
                task = asyncio.ensure_future(self.crew[who].change(add_by_run(mark)))
                self.changes[mark] = self.asked(task, who)

        self.run(start())

    @rule(who=st.integers(0, CREW - 1), as_change=st.booleans())
    def look(self, who: int, as_change: bool) -> None:
        async def start() -> None:
            cas = self.crew[who]
            task = asyncio.ensure_future(cas.change(all_marks) if as_change else cas.look(all_marks))
            self.looks.append(self.asked(task, who))

        self.run(start())

    def asked(self, task: asyncio.Task[Any], who: int) -> Asked:
        term = self.terms[who]
        # A leader does not look for what others write past it, until it is told to.
        answered = {
            answer[1]
            for asked in self.changes.values()
            if (answer := answer_of(asked.task)) and (term is None or asked.term is not None)
        }
        return Asked(task, who, term, answered, self.epoch)

    @rule(turns=st.integers(1, 30))
    def go_on(self, turns: int) -> None:
        async def turn() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(turn())

    @rule(seconds=st.sampled_from([0.004, 0.03, 0.3, 3.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule()
    def land_a_late_write(self) -> None:
        self.run(self.weather.land())

    @rule(is_fine=st.booleans())
    def change_weather(self, is_fine: bool) -> None:
        self.weather.faults = {} if is_fine else self.storm

    @rule(who=st.integers(0, CREW - 1))
    def crash(self, who: int) -> None:
        """Whatever the handle had under way ends there; a new one begins with nothing."""

        async def end() -> None:
            passes = self.crew[who]._passes
            if passes is not None:
                passes.cancel()
                await asyncio.wait((passes,))

        self.run(end())
        self.crew[who] = self.new_object(self.terms[who])

    @precondition(lambda self: self.epoch < 5)
    @rule(who=st.integers(0, CREW - 1))
    def take_over(self, who: int) -> None:
        """As leadership does it: the old leader's term is over by then, whether it knows or not."""
        for term in self.terms:
            if term is not None:
                term.end()
        is_signed = False
        try:
            self.run(raise_epochs(self.blobs, [NAME], FixedTerm(self.epoch + 1)))
            is_signed = True
        except* BackendUnavailable:
            pass
        if not is_signed:
            return
        self.epoch += 1
        self.terms[who] = mine = FixedTerm(self.epoch)
        self.crew[who].lead(mine)

    # -- what must be true in the end ---------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if self.crew:
                self.run(self.settle_down())
        finally:
            self.runner.close()

    async def settle_down(self) -> None:
        self.weather.clear_up()
        everybody = [asked.task for asked in (*self.changes.values(), *self.looks)]
        while self.weather.late:
            await self.weather.land()
            await asyncio.sleep(self.weather.random.choice([0.0, 0.01]))
        if everybody:
            await asyncio.gather(*everybody, return_exceptions=True)
        for cas in self.crew:
            await cas.close()
        final: list[str] = await CasObject(self.held, NAME, Marks).look(all_marks)
        note(f"final: {final}; weather: {self.weather.met}")
        self.check_changes(final)
        self.check_looks(final)

    def check_changes(self, final: list[str]) -> None:
        made = [left.partition("#")[0] for left in final]
        assert len(made) == len(set(made)), "a change was made twice"
        assert set(made) <= set(self.changes)
        for mark, asked in self.changes.items():
            answer = answer_of(asked.task)
            if answer is None:
                continue
            place, left = answer
            assert mark in made, f"{mark} was answered and is not there"
            assert final[place : place + 1] == [left], f"{mark} was told another run's answer"
            self.check_not_deposed(asked, mark)

    def check_looks(self, final: list[str]) -> None:
        for asked in self.looks:
            if asked.task.exception() is not None:
                assert isinstance(asked.task.exception(), BackendUnavailable)
                continue
            seen = asked.task.result()
            assert seen == final[: len(seen)], "somebody saw what never landed"
            if not self.is_stale:
                missing = asked.answered_before - set(seen)
                assert not missing, f"an answer older than its question: {missing} had been answered before"

    def check_not_deposed(self, asked: Asked, mark: str) -> None:
        term = asked.term
        if term is not None and term is self.terms[asked.who]:
            assert term.epoch >= asked.epoch_before, f"{mark}: a leader wrote that had been deposed before"


def answer_of(task: asyncio.Task[Any]) -> tuple[int, str] | None:
    """What the caller was told of its mark; None where that was nothing certain, or nothing yet."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    if error is None:
        place, left = task.result()
        return place, left
    assert isinstance(error, BackendUnavailable | Deposed), error
    return None


STORMY = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("examples", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_nothing_is_lost_doubled_or_guessed_in_a_storm(examples: int) -> None:
    stateful.run_state_machine_as_test(CasMachine, settings=settings(STORMY, max_examples=examples))


# -- planted bugs -----------------------------------------------------------------------------------------


class Planted(CasObject[Marks]):
    """Has a bug in what it does after a write that failed."""

    async def _write(self, held: Content[Marks], outcomes: list[Outcome]) -> bool:
        has_landed = await super()._write(held, outcomes)
        if not has_landed:
            self.after(held, is_unclear="no answer" in self._last_failure)
        return has_landed

    def after(self, held: Content[Marks], *, is_unclear: bool) -> None: ...


class TakesUnclearForFailure(Planted):
    def after(self, held: Content[Marks], *, is_unclear: bool) -> None:
        if is_unclear:
            self._attempts.pop()


class TakesRefusalForFailure(Planted):
    def after(self, held: Content[Marks], *, is_unclear: bool) -> None:
        if not is_unclear:
            self._attempts.pop()


class TakesUnclearForSuccess(Planted):
    def after(self, held: Content[Marks], *, is_unclear: bool) -> None:
        if is_unclear:
            answer(self._attempts.pop().outcomes)


class KeepsStateOfFailedWrite(Planted):
    def after(self, held: Content[Marks], *, is_unclear: bool) -> None:
        self._held = held


class AnswersFromMemory(CasObject[Marks]):
    """Without a term, and without a look."""

    def _is_believed(self) -> bool:
        return self._held is not None


class OverlooksNewEpochs(CasObject[Marks]):
    def _accept(self, found: Content[Marks]) -> None:
        term, self._term = self._term, None
        try:
            super()._accept(found)
        finally:
            self._term = term


class AnswersWithTheLastRun(CasObject[Marks]):
    """Where an earlier write turns out to have landed, the answer must be of that one's run, not of a later one."""

    def _settle_attempts(self, header: Header) -> None:
        if any(header.fate(one.serial, one.commit) == "landed" for one in self._attempts):
            answer(self._attempts[-1].outcomes)
        super()._settle_attempts(header)


@pytest.mark.parametrize(
    ("planted", "faults"),
    [
        (TakesUnclearForFailure, {"lost_after": 0.3}),
        (TakesRefusalForFailure, {"refused_after": 0.3}),
        (TakesUnclearForSuccess, {"lost_before": 0.3}),
        (KeepsStateOfFailedWrite, STORM),
        (AnswersFromMemory, STORM),
        (OverlooksNewEpochs, STORM),
        (AnswersWithTheLastRun, {"late": 0.3, "lost_before": 0.2}),
    ],
)
def test_the_storm_finds_an_object_that(planted: type[CasObject[Marks]], faults: Faults) -> None:
    machine = type(f"{planted.__name__}Machine", (CasMachine,), {"object_class": planted, "faults": faults})
    with pytest.raises((AssertionError, ExceptionGroup)):
        stateful.run_state_machine_as_test(
            machine,
            settings=settings(
                STORMY, max_examples=1500, derandomize=True, phases=[Phase.generate], database=None
            ),
        )
