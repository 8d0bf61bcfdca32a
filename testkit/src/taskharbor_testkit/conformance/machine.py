"""The state machine: random histories of a store with several clients, each call checked against the model.

Hypothesis looks for a history in which driver and model disagree and shrinks it to a few calls, printed as code.
Besides plain calls a history has what production has: stale and expired tokens, answers that got lost so that the
call is repeated, handles that die without a close, callers that read the clock some time before their call takes
effect, and calls that race.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import hypothesis
import msgspec
from hypothesis import Phase, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from taskharbor.drivers import contract
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver, JobFilter, QueueSettings, SettingsField
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, JobRecord, Lease, Micros
from taskharbor_testkit.conformance import strategies as some
from taskharbor_testkit.conformance.backend import Backend
from taskharbor_testkit.conformance.snapshot import list_all
from taskharbor_testkit.conformance.twin import BOOM, Twin, ack, discard, fail, release, retry, with_token

T = TypeVar("T")


VARIABLES = "TASKHARBOR_CONFORMANCE_"
"""The variables of the environment that set an effort begin with this: `..._EXAMPLES`, `_STEPS`, `_SEED`, `_SHRINK`."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """The effort of the machine: small in every run, large on request, and always reproducible."""

    examples: int = 60
    """Histories to try."""
    steps: int = 40
    """Calls in each."""
    seed: int | None = None
    """None: the same histories in every run. A number: others, and the same ones for the same number."""
    shrink: bool = True
    """True: after a failure, look for the shortest history that fails. That takes longer than finding the failure, perhaps
    minutes. From the environment: on, except in CI, where a time-out would lose the failure."""

    @classmethod
    def from_environment(cls, share: float = 1.0) -> Self:
        """`share`: the part of the usual histories to try, where the environment names no number."""
        is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false", "no", "off")
        usual = {"examples": max(1, round(cls().examples * share)), "shrink": not is_ci}
        names = {field: f"{VARIABLES}{field.upper()}" for field in cls.__struct_fields__}
        given = {field: os.environ[name] for field, name in names.items() if os.environ.get(name)}
        try:
            return msgspec.convert(usual | given, cls, strict=False)
        except msgspec.ValidationError as wrong:
            told = ", ".join(f"{names[field]}={text!r}" for field, text in given.items())
            raise InvalidRequest(f"{told}: {wrong}") from None

    def __str__(self) -> str:
        seed = "derandomized" if self.seed is None else f"{VARIABLES}SEED={self.seed}"
        text = f"{VARIABLES}EXAMPLES={self.examples} {VARIABLES}STEPS={self.steps} {seed}"
        return text if self.shrink else f"{text} (add {VARIABLES}SHRINK=1 for the shortest history)"


class DriverMachine(RuleBasedStateMachine):
    """One history. Everything runs on one event loop; `clients` are handles on the same store."""

    backend: ClassVar[Backend]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.tokens: list[tuple[str, str]] = []
        """Every (job, token) ever granted: the latest last, the stale ones before."""
        self.last: tuple[int, op.Operation[Any]] | None = None
        self.last_at: Micros = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize(wishes=st.lists(some.wishes, max_size=8), settings=some.settings, how=some.reservations)
    def open_the_store(
        self, wishes: list[dict[str, Any]], settings: QueueSettings, how: dict[str, Any]
    ) -> None:
        """A history begins with some jobs, some leases and some settings: from nothing it would rarely get far."""
        directory = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="taskharbor-machine-"))

        async def opened() -> tuple[Twin, list[Driver]]:
            self.store = await self.stack.enter_async_context(self.backend.store(Path(directory)))
            twin = await Twin.open(self.store)
            return twin, [twin.driver, await self.store.connect(), await self.store.connect()]

        self.twin, self.clients = self.run(opened())
        self.do(0, self.enqueueing(wishes))
        self.do(0, self.reserving(limit=how["limit"], lease=how["lease"]))
        self.do(0, op.Configure("q", settings, self.twin.now))

    def teardown(self) -> None:
        try:
            if hasattr(self, "twin"):
                self.run(self.twin.finish())
        finally:
            self.run(self.stack.aclose())
            self.run(self.loop.shutdown_default_executor())
            self.loop.close()

    # -- one call at a time ---------------------------------------------------------------------------------

    def do(self, client: int, call: op.Operation[Any]) -> None:
        self.last, self.last_at = (client, call), self.twin.now
        self.note(self.run(self.twin.call(call, self.clients[client])))

    def note(self, answer: Any) -> None:
        """Keep every token that was handed out; each will be used again, in time or too late."""
        for item in answer if isinstance(answer, list) else ():
            lease = item.lease if isinstance(item, JobRecord) else item
            if isinstance(lease, Lease) and (lease.job_id, lease.token) not in self.tokens:
                self.tokens.append((lease.job_id, lease.token))

    @rule(client=some.clients, wishes=st.lists(some.wishes, min_size=1, max_size=4))
    def enqueue(self, client: int, wishes: list[dict[str, Any]]) -> None:
        self.do(client, self.enqueueing(wishes))

    @rule(client=some.clients, how=some.reservations)
    def reserve(self, client: int, how: dict[str, Any]) -> None:
        self.do(client, self.reserving(**how))

    @rule(client=some.clients, step=some.time_steps, wishes=st.lists(some.wishes, max_size=2), how=some.ends)
    def work(self, client: int, step: Micros, wishes: list[dict[str, Any]], how: dict[str, Any]) -> None:
        """Most of a store's life in one step, so that histories get somewhere."""
        self.twin.now += step
        self.do(client, self.enqueueing(wishes))
        self.do(client, self.reserving(limit=2, lease=how["lease"]))
        if self.tokens:
            self.do(client, self.settling(how["ends"]))
            if how["lag"]:
                self.do(client, self.reserving(limit=2, lease=how["lease"], worker="w3", lag=how["lag"]))

    @rule(client=some.clients, wishes=st.lists(some.wishes, min_size=2, max_size=3), verb=some.verbs)
    def contend_for_a_key(self, client: int, wishes: list[dict[str, Any]], verb: str) -> None:
        """One job of a key runs, others of it come in meanwhile, then the first one ends or goes back."""
        first, *again = [wish | {"queue": "q", "key": "k"} for wish in wishes]
        self.do(client, self.enqueueing([first]))
        self.do(client, self.reserving(limit=10, lease=SECOND, worker="w2"))
        self.do(client, self.enqueueing(again))
        held = [job for job in self.twin.model.jobs.values() if job.token is not None and job.key == "k"]
        if held:
            which = [job_id for job_id, _ in reversed(self.tokens)].index(held[-1].id)
            self.do(client, self.settling([(which, verb, first["delay"])]))

    @rule(client=some.clients, which=some.picks, progress=st.sampled_from((None, b"", b"50%")), how=some.ends)
    def extend_lease(
        self, client: int, which: list[int], progress: bytes | None, how: dict[str, Any]
    ) -> None:
        beats = [contract.Extension(*self.token(n), progress) for n in which]
        self.do(client, op.ExtendLease(beats, how["lease"], self.twin.now - how["lag"]))

    @rule(client=some.clients, how=some.ends)
    def settle(self, client: int, how: dict[str, Any]) -> None:
        self.do(client, self.settling(how["ends"], how["lag"]))

    @rule(client=some.clients, queue=st.none() | some.queues, limit=some.limits, lag=some.lags)
    def reclaim(self, client: int, queue: str | None, limit: int, lag: Micros) -> None:
        self.do(client, op.Reclaim(self.twin.now - lag, queue, limit))

    @rule(client=some.clients, which=some.picks, lag=some.lags, only_waiting=st.booleans())
    def cancel(self, client: int, which: list[int], lag: Micros, only_waiting: bool) -> None:
        ids = [self.token(n)[0] if self.tokens and n % 2 else self.job_id(n) for n in which]
        self.do(client, op.CancelJobs(ids, self.twin.now - lag, only_waiting))

    @rule(client=some.clients, queue=some.queues, keys=some.keys, lag=some.lags, only_waiting=st.booleans())
    def cancel_keys(self, client: int, queue: str, keys: list[str], lag: Micros, only_waiting: bool) -> None:
        self.do(client, op.CancelKeys(keys, queue, self.twin.now - lag, only_waiting))

    @rule(
        client=some.clients,
        which=some.picks,
        lag=some.lags,
        delay=st.none() | some.delays,
        keep_counts=st.booleans(),
    )
    def requeue(
        self, client: int, which: list[int], lag: Micros, delay: Micros | None, keep_counts: bool
    ) -> None:
        dead = [job.id for job in self.twin.model.jobs.values() if job.state == "dead"] or ["unknown"]
        ids = [dead[n % len(dead)] if n % 4 else self.job_id(n) for n in which]
        run_at = None if delay is None else self.twin.now + delay
        self.do(client, op.Requeue(ids, self.twin.now - lag, run_at, keep_counts))

    @rule(client=some.clients, selection=some.filters, limit=some.limits)
    def purge(self, client: int, selection: JobFilter, limit: int) -> None:
        self.do(client, op.Purge(selection, limit))

    @rule(client=some.clients, limit=some.limits)
    def prune(self, client: int, limit: int) -> None:
        self.do(client, op.Prune(self.twin.now, limit))

    @rule(
        client=some.clients,
        queue=some.queues,
        settings=some.settings,
        fields=some.fields,
        declaration=some.declarations,
    )
    def configure(
        self,
        client: int,
        queue: str,
        settings: QueueSettings,
        fields: list[SettingsField] | None,
        declaration: str | None,
    ) -> None:
        if settings.failure_queue == queue:
            return  # Refused: a failing job would never end.
        given = msgspec.structs.replace(settings, declaration=declaration)
        self.do(client, op.Configure(queue, given, self.twin.now, fields, declaration is not None))

    @rule(client=some.clients, selection=some.filters, limit=some.page_sizes)
    def list_jobs(self, client: int, selection: JobFilter, limit: int) -> None:
        listed = self.run(list_all(self.clients[client], selection, self.twin.now, limit))
        wanted = self.twin.model.listing(selection, now=self.twin.now)
        assert [job.id for job in listed] == [job.id for job in wanted]

    @rule(step=some.time_steps)
    def time_passes(self, step: Micros) -> None:
        self.twin.now += step

    # -- what production has --------------------------------------------------------------------------------

    @precondition(lambda self: self.last is not None)
    @rule()
    def the_answer_got_lost(self) -> None:
        """The caller repeats the very same call, `now` and all, as after an ambiguous commit."""
        assert self.last is not None
        client, call = self.last
        if self.last_at == self.twin.now:
            self.do(client, call)

    @precondition(lambda self: self.store.capabilities.durable)
    @rule(client=some.clients)
    def a_handle_dies(self, client: int) -> None:
        """Let go of without close. (The store closes it when the history is over, for the sake of the test.)"""
        self.clients[client] = self.run(self.store.connect())

    @rule(wishes=st.lists(some.wishes, min_size=1, max_size=2), how=some.reservations, end=some.ends)
    def calls_race(self, wishes: list[dict[str, Any]], how: dict[str, Any], end: dict[str, Any]) -> None:
        """Three clients at once; some order of their calls must explain what came of it."""
        cancel = op.CancelJobs([self.job_id(end["which"])], self.twin.now)
        third = self.settling(end["ends"]) if self.tokens else cancel
        calls = [self.enqueueing(wishes), self.reserving(**how | {"queue": "q", "worker": "w9"}), third]
        self.last = None
        for answer in self.run(self.twin.together(*zip(self.clients, calls, strict=True))):
            self.note(answer)

    # -- calls as data --------------------------------------------------------------------------------------

    def enqueueing(self, wishes: list[dict[str, Any]]) -> op.Enqueue:
        now = self.twin.now
        given = [dict(wish) for wish in wishes]
        records = [JobRecord(run_at_us=now + one.pop("delay"), created_at_us=now, **one) for one in given]
        return op.Enqueue(records, now, self.twin.are_new(records))

    def reserving(
        self,
        *,
        limit: int,
        lease: Micros,
        queue: str = "q",
        worker: str = "w1",
        types: list[str] | None = None,
        lag: Micros = 0,
    ) -> op.Reserve:
        return op.Reserve(queue, limit, lease, self.twin.now - lag, worker, types)

    def settling(self, ends: list[tuple[int, str, Micros]], lag: Micros = 0) -> op.Settle:
        return op.Settle([self.settlement(*end) for end in ends], self.twin.now - lag)

    def settlement(self, which: int, verb: str, delay: Micros) -> contract.Settlement:
        job_id, token = self.token(which)
        job = with_token(self.twin.model.jobs.get(job_id) or self.twin.job(id=job_id), token)
        later = self.twin.now + delay
        settlements: dict[str, contract.Settlement] = {
            "ack": ack(job, b"result" if delay else None),
            "retry": retry(job, later),
            "fail": fail(job),
            "discard": discard(job, BOOM if delay else None),
            "release": release(job),
            "snooze": release(job, later),
        }
        return settlements[verb]

    def token(self, which: int) -> tuple[str, str]:
        """Not a precondition of a rule: whether a race has granted a lease may differ when a history is repeated."""
        return self.tokens[-1 - which % len(self.tokens)] if self.tokens else ("unknown", "no token")

    def job_id(self, which: int) -> str:
        ids = [*self.twin.model.jobs, "unknown"]
        return ids[-2 - which] if which < len(ids) - 1 else "unknown"


def run_machine(backend: Backend, effort: Effort) -> None:
    """Look for a history that breaks the driver; raises it, shrunk, with the seed in the notes."""
    # Hypothesis wants a class: one of its own for this backend.
    machine: Any = type("ConformanceMachine", (DriverMachine,), {"backend": backend})
    if effort.seed is not None:
        machine = hypothesis.seed(effort.seed)(machine)
    settings = hypothesis.settings(
        max_examples=effort.examples,
        stateful_step_count=effort.steps,
        derandomize=effort.seed is None,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink] if effort.shrink else [Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        stateful.run_state_machine_as_test(machine, settings=settings)
    except Exception as error:
        error.add_note(f"reproduce with: {effort}")
        raise
