"""A compare-and-swap object (a cell): many callers, few writes, and no write that is guessed about.

Everything that arrives while a write is under way goes into the next one (group commit), and nobody is answered before the
write that holds their change has landed. A write that was refused, or of which nothing was heard, is settled by reading the
object: its ring of commit ids tells whether the write is part of it. State that was changed for a write that did not
land is thrown away, never undone.

Without a term, a cell is one of several writers: it works on what it has, and what it answers without a write it first compares
with the object. With a term, it is the only one that writes, and believes what it has as long as the term is valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers.objectstore.blobs import Blobs, Conflict, Unclear, pause, pauses
from taskharbor.drivers.objectstore.contents import MAX_BYTES, Codec, Contents, Fate, Header, Held, S
from taskharbor.errors import BackendUnavailable, TaskHarborError


class Outcome:
    """The result or the error of one run of a step."""

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
        """True where this content tells the fate of the write. Its callers have an answer then, or their calls run again."""
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


__all__ = ["MAX_BYTES", "Cell", "Codec", "Deposed", "Term"]

R = TypeVar("R")

_GATHER_SHARE = 0.5
"""Of the time that a pass took,"""
_GATHER_SECONDS = 0.05
"""and so much at most, callers may take to come back before the next one. Below a millisecond it is not worth it."""
_WORTH_GATHERING = 0.001


class Term(Protocol):
    """A leader's right to believe what it holds."""

    @property
    def epoch(self) -> int: ...

    def is_valid(self) -> bool:
        """False: somebody else may have taken over, so look before you answer."""


class Deposed(BackendUnavailable):
    """There is a newer leader. This one never writes again; ask the other."""


class Cell(Generic[S]):
    """Used from one event loop."""

    def __init__(
        self,
        blobs: Blobs,
        name: str,
        codec: Codec[S],
        *,
        term: Term | None = None,
        every_pass: Callable[[S], object] | None = None,
        on_news: Callable[[S], None] | None = None,
        patience: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """`every_pass` may change the state before the steps of a pass; `on_news` sees each state that has landed, ours or
        another writer's. Neither may raise. A call is given up after `patience` seconds without a certain answer."""
        self.name = name
        self._contents = Contents(blobs, name, codec, SystemClock() if clock is None else clock)
        self._term = term
        self._every_pass = every_pass
        self._on_news = on_news
        self._patience = patience
        self._waiting: list[Call] = []
        self._passes: asyncio.Task[None] | None = None
        self._held: Held[S] | None = None
        self._attempts: list[Attempt] = []
        self._trouble = ""
        """What was last heard of a write that failed."""
        self._must_reload = False
        self._must_compare = False
        self._deposed = False
        self._closed = False
        self._assembled: asyncio.Future[None] | None = None
        """While a pass is put off until so many callers are there:"""
        self._expected = 0

    @property
    def where(self) -> str:
        return self._contents.where

    @property
    def size(self) -> int:
        """Bytes of the state as last written or read, before compression."""
        return self._contents.size

    @property
    def epoch(self) -> int:
        """As the object last said."""
        newest = self._contents.newest
        return 0 if newest is None else newest.epoch

    # -- asking -------------------------------------------------------------------------------------------

    async def change(self, step: Callable[[S], R], *, is_housekeeping: bool = False) -> R:
        """Run a step that may change the state; its result, once that has landed. A step may be run several times, on
        different states: only the run that landed is answered. One that raises must have changed nothing."""
        return cast(R, await self._enter(step, is_look=False, is_of_a_caller=not is_housekeeping))

    async def look(self, step: Callable[[S], R]) -> R:
        """Run a step that changes nothing, on landed state."""
        return cast(R, await self._enter(step, is_look=True, is_of_a_caller=False))

    async def refresh(self) -> None:
        """Take notice of what other writers did, whatever the term says. `on_news` hears of it."""
        self.must_compare()
        await self.look(_nothing)

    def must_compare(self) -> None:
        """The next pass compares with the object before it answers."""
        self._must_compare = True

    def lead(self, term: Term | None) -> None:
        """From the next pass on write under this term, after reading anew; None: as one of several writers."""
        self._term = term
        self._deposed = False
        self._must_reload = True

    async def close(self) -> None:
        """Answers what has arrived, and takes nothing more."""
        self._closed = True
        while self._passes is not None:
            await asyncio.wait((self._passes,))

    def _enter(self, step: Callable[[S], Any], *, is_look: bool, is_of_a_caller: bool) -> asyncio.Future[Any]:
        if self._closed:
            raise BackendUnavailable(f"{self.where} was closed")
        loop = asyncio.get_running_loop()
        call = Call(step, is_look, is_of_a_caller, loop.create_future(), loop.time() + self._patience)
        self._waiting.append(call)
        self._note_arrival()
        if self._passes is None:
            self._passes = loop.create_task(self._pass_until_answered(), name=f"taskharbor cell {self.name}")
        return call.future

    # -- passes -------------------------------------------------------------------------------------------

    async def _pass_until_answered(self) -> None:
        calls: list[Call] = []
        try:
            while self._waiting:
                calls, self._waiting = self._waiting, []
                callers, began = _callers(calls), asyncio.get_running_loop().time()
                try:
                    await self._settle(calls)
                except Exception as error:
                    self._fail_all(calls, error)
                if callers > 1:
                    await self._gather(callers, asyncio.get_running_loop().time() - began)
        except BaseException:
            self._fail_all(calls, BackendUnavailable(f"{self.where} was closed"))
            raise
        finally:
            self._passes = None

    async def _gather(self, callers: int, spent: float) -> None:
        """Those who were answered just now mostly come back at once. A pass that began without them would make each of their
        calls wait for two writes; so it begins when as many are there again, or a little later. One who comes alone never
        waits for others."""
        longest = min(spent * _GATHER_SHARE, _GATHER_SECONDS)
        if longest < _WORTH_GATHERING or self._closed:
            return
        loop = asyncio.get_running_loop()
        # Those who came meanwhile are waiting, and count beside those who come back.
        self._assembled, self._expected = loop.create_future(), callers + _callers(self._waiting)
        timer = loop.call_later(longest, _assemble, self._assembled)
        try:
            self._note_arrival()
            await self._assembled
        finally:
            timer.cancel()
            self._assembled = None

    def _note_arrival(self) -> None:
        if self._assembled is not None and _callers(self._waiting) >= self._expected:
            _assemble(self._assembled)

    def _fail_all(self, calls: list[Call], error: Exception) -> None:
        # Nothing is known of what is in memory now.
        self._held = None
        for call in calls + self._waiting:
            call.fail(error)
        self._waiting.clear()

    async def _settle(self, calls: list[Call]) -> None:
        """Until each of the calls has its answer. What arrives meanwhile joins them when they have to be run again."""
        waits = pauses(first=0.005, most=0.5, tries=1_000_000)
        failures = 0
        self._attempts.clear()
        try:
            while True:
                # At once after a write that failed: the ring forgets, so whether it landed is asked before anything else.
                is_fresh = await self._make_ready()
                if failures > 1 and keep_unanswered(calls):
                    await pause(next(waits))
                    self._give_up_late(calls)
                    await self._reread()
                    is_fresh = True
                if not keep_unanswered(calls) or await self._run(calls, is_fresh=is_fresh):
                    return
                failures += 1
                calls += self._waiting
                self._waiting.clear()
        except TaskHarborError as error:
            if self._attempts and not isinstance(error, BackendUnavailable):
                # Other errors promise that nothing was changed, and a write of ours may still land.
                raise BackendUnavailable(str(error)) from error
            raise

    async def _make_ready(self) -> bool:
        """Have a state to work on; whether it was read just now."""
        if self._deposed:
            raise self._is_deposed()
        if self._must_reload:
            self._held, self._must_reload = None, False
        if self._held is not None:
            return False
        self._must_compare = False
        self._accept(await self._contents.read())
        return True

    async def _run(self, calls: list[Call], *, is_fresh: bool) -> bool:
        """One pass over the calls. True: all are answered. False: run them again, on what is there by then."""
        looks = [call for call in calls if call.is_look]
        changes = [call for call in calls if not call.is_look]
        if looks and not is_fresh and not self._is_believed():
            await self._reread()
            is_fresh = True
        for call in looks:
            call.answer(call.run(self._hold().state))
        while True:
            held = self._hold()
            outcomes = self._run_changes(held.state, changes)
            if outcomes is None:
                self._held = None
                return False
            if held.state.touched:
                return await self._write(held, outcomes)
            # An answer that needs no write must not be older than its question.
            if not outcomes or is_fresh or self._is_believed() or not await self._reread():
                answer_all(outcomes)
                return True
            is_fresh = True

    def _run_changes(self, state: S, changes: list[Call]) -> Outcomes | None:
        state.touched = False
        if self._every_pass is not None:
            self._every_pass(state)
        outcomes: Outcomes = []
        for call in changes:
            touched_before = state.touched
            outcome = call.run(state)
            if outcome.error is not None and state.touched and not touched_before:
                # It broke its promise, and this state is of no use to the others: they start over without it.
                call.answer(outcome)
                return None
            outcomes.append((call, outcome))
        return outcomes

    def _hold(self) -> Held[S]:
        assert self._held is not None
        return self._held

    def _is_believed(self) -> bool:
        """Whether what we hold is what is there, without a look."""
        term, held = self._term, self._held
        if term is None or held is None or self._must_compare:
            return False
        # An object that does not carry our epoch yet can still be written by the leader before us.
        is_ours = held.version is None or held.header.epoch == term.epoch
        return is_ours and term.is_valid()

    def _give_up_late(self, calls: list[Call]) -> None:
        now = asyncio.get_running_loop().time()
        for call in calls:
            if call.deadline <= now:
                call.fail(
                    BackendUnavailable(
                        f"{self.where}: no write got a certain answer in {self._patience:g} s ({self._trouble}); whether "
                        "this change was made is not known, and repeating it is safe"
                    )
                )

    # -- writing ------------------------------------------------------------------------------------------

    async def _write(self, held: Held[S], outcomes: Outcomes) -> bool:
        sealed = await self._contents.seal(held, None if self._term is None else self._term.epoch)
        # Until the write has landed, this state is a wish.
        self._held = None
        try:
            self._held = landed = await self._contents.write(held, sealed)
        except (Conflict, Unclear) as trouble:
            self._trouble = str(trouble)
            self._attempts.append(Attempt(sealed.header.serial, sealed.commit, outcomes))
            return False
        answer_all(outcomes)
        self._tell(landed)
        return True

    def _settle_attempts(self, header: Header) -> None:
        """What the object says of the writes that nobody answered for."""
        self._attempts = [one for one in self._attempts if not one.is_settled(header, self.where)]

    # -- reading ------------------------------------------------------------------------------------------

    async def _reread(self) -> bool:
        """Compare with the object; whether there was something else, which is what we hold now."""
        self._must_compare = False
        newer = await self._contents.read_if_newer(self._hold())
        if newer is None:
            return False
        self._accept(newer)
        return True

    def _accept(self, held: Held[S]) -> None:
        """This is what is there now."""
        self._held = held
        self._settle_attempts(held.header)
        if self._term is not None and held.header.epoch > self._term.epoch:
            self._deposed = True
            raise self._is_deposed()
        self._tell(held)

    def _tell(self, held: Held[S]) -> None:
        if self._on_news is not None:
            self._on_news(held.state)

    def _is_deposed(self) -> Deposed:
        return Deposed(f"{self.where}: another broker leads now; this one has stopped writing")


def _nothing(state: object) -> None:
    pass


def _assemble(assembled: asyncio.Future[None]) -> None:
    if not assembled.done():
        assembled.set_result(None)


def _callers(calls: list[Call]) -> int:
    return sum(call.is_of_a_caller for call in calls)
