"""The simulated backend: one store on true time, and a record of every call in the step in which it takes effect."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, ClassVar, TypeVar

from taskharbor.clock import Clock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import TERMINAL_STATES, Driver, Extension, JobFilter, Settlement
from taskharbor.errors import JobError
from taskharbor.jobs import JobRecord, JobState, Lease, Micros
from taskharbor_testkit.model import Model, ModelDriver
from taskharbor_testkit.simulation.ledger import Claim, Ledger, Trace, brief
from taskharbor_testkit.simulation.scheduler import Scheduler

T = TypeVar("T")

_SILENT = {"time", "stats", "get"}

_UNENDED = JobFilter(states=frozenset(JobState) - TERMINAL_STATES)


def model_driver(clock: Clock, store: Callable[[], Model] = Model) -> ModelDriver:
    """A driver on a fresh model. Its tokens and ids are numbers, because a simulation must not depend on chance."""
    tokens, ids = count(1), count(1)
    model = store()
    model.token_for = lambda job: f"t{next(tokens)}"
    model.failure_id_for = lambda dead, queue: f"failure{next(ids)}"
    return ModelDriver(model, clock=clock)


class Backend:
    """Any driver whose calls take effect at once can be simulated; `make_driver` gets the backend's clock."""

    runs_by_itself: ClassVar[bool] = False

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, trace: Trace, make_driver: Callable[[Clock], Driver]
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._trace = trace
        self._driver = make_driver(self)
        self._cursor: str | None = None

    def now(self) -> Micros:
        """The backend's own clock, which is right by definition."""
        return self._scheduler.now_us

    def handle(self) -> Driver:
        """A handle for `wait`, the one call that takes time."""
        return self._driver.clone()

    def perform(self, who: str, call: op.Operation[Any]) -> Any:
        """One call takes effect, here and now."""
        ledger, true_us = self._ledger, self._scheduler.now_us
        ledger.number += 1
        now: Micros = getattr(call, "now", true_us)
        claims: list[tuple[Claim, JobRecord | None]] = []
        if isinstance(call, op.Settle):
            claims = self._judge(who, call.settlements, true_us, now)
        elif isinstance(call, op.ExtendLease):
            claims = self._judge(who, call.extensions, true_us, now)
        answer = run_now(self._driver.time() if isinstance(call, op.Time) else self._driver.run(call))
        rows = self._new_rows()
        ledger.book_rows(rows, true_us)
        if isinstance(call, op.Reserve):
            ledger.book_reserve(call.queue, answer, who=who, true_us=true_us, now=now)
        elif isinstance(call, op.Enqueue):
            ledger.book_enqueue(call.records, answer)
        elif isinstance(call, op.Configure):
            ledger.settings[call.queue] = call.settings
        self._book_answers(claims, answer)
        if call.name not in _SILENT:
            shown = brief(getattr(call, call.__struct_fields__[0]))
            self._trace.add(self._scheduler.now, who, f"{call.name} {shown} now={now} -> {brief(answer)}")
        return answer

    def _book_answers(
        self, claims: Sequence[tuple[Claim, JobRecord | None]], answers: Sequence[Lease | JobError | None]
    ) -> None:
        rightly_changed = {claim.job_id for claim, _ in claims if claim.is_valid}
        for (claim, before), given in zip(claims, answers if claims else (), strict=True):
            claim.answer = given if isinstance(given, JobError) else None
            if isinstance(given, Lease):
                self._ledger.book_extension(given)
            if before is not None and claim.job_id not in rightly_changed:
                claim.changed = self._record(claim.job_id) != before

    def _judge(
        self, who: str, items: Sequence[Settlement | Extension], true_us: Micros, now: Micros
    ) -> list[tuple[Claim, JobRecord | None]]:
        """Each claim with the job's record where the claim is not valid: that one must not change."""
        judged: list[tuple[Claim, JobRecord | None]] = []
        for item in items:
            record = self._record(item.job_id)
            state = None if record is None else record.state
            claim = self._ledger.claim(item, state, who=who, true_us=true_us, now=now)
            judged.append((claim, None if claim.is_valid else record))
        return judged

    def _record(self, job_id: str) -> JobRecord | None:
        return run_now(self._driver.get([job_id], now=self.now()))[0]

    def _new_rows(self) -> list[Any]:
        page = run_now(self._driver.read_attempts(after=self._cursor))
        self._cursor = page.cursor
        return page.attempts

    # -- for the end --------------------------------------------------------------------------------------

    def jobs(self) -> list[JobRecord]:
        return run_now(self._driver.list_jobs(JobFilter(), now=self.now(), limit=100_000)).jobs

    def is_drained(self) -> bool:
        return not run_now(self._driver.list_jobs(_UNENDED, now=self.now(), limit=1)).jobs


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never has to wait, as every call of the model but `wait`."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise RuntimeError(f"{work!r} waited: the simulation needs a driver whose calls take effect at once")
