"""A driver and the reference model side by side: every call goes to both, then everything visible is compared.

Cases and the state machine both stand on this. A case asserts the one thing it is named after; the comparison asserts
everything else.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeAlias, TypeVar

import msgspec

from taskharbor.drivers import contract
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Driver, JobFilter, QueueSettings
from taskharbor.errors import JobError
from taskharbor.jobs import SECOND, Attempt, Failure, JobRecord, JobState, Lease, Micros
from taskharbor.requests import new_id
from taskharbor_testkit.conformance import snapshot
from taskharbor_testkit.conformance.backend import Store
from taskharbor_testkit.conformance.calls import perform, replay, touched
from taskharbor_testkit.conformance.invariants import InvariantBroken, Witness
from taskharbor_testkit.conformance.snapshot import Mismatch, Snapshot
from taskharbor_testkit.model import Model

A = TypeVar("A")
End: TypeAlias = Callable[[JobRecord], contract.Settlement]

START: Micros = 1_700_000_000 * SECOND
QUEUE = "q"
BOOM = Failure("ValueError", "boom", "Traceback: line 1")


class Twin:
    """Time is a plain number that stands still until the case moves it. A call that is given another `now` is one
    whose caller read the clock earlier, or whose clock is wrong; what it left behind is looked at by the right time."""

    def __init__(self, store: Store, driver: Driver, observer: Driver) -> None:
        self.store = store
        self.driver = driver
        self.now = START
        self.model = Model()
        self.witness = Witness()
        self.observer = observer
        self._feed: list[Attempt] = []
        self._feed_cursor: str | None = None
        self._ids: set[str] = set()
        self._races = 0

    @classmethod
    async def open(cls, store: Store) -> Self:
        """Changes go through one handle and are read through another, as other processes would."""
        return cls(store, await store.connect(), await store.connect())

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)

    def job(self, **fields: Any) -> JobRecord:
        """A record that is due now, unless told otherwise."""
        defaults: dict[str, Any] = {"id": new_id(), "type": "mail", "queue": QUEUE, "payload": b"{}"}
        instants = {"run_at_us": self.now, "created_at_us": self.now}
        return JobRecord(**defaults | instants | fields)

    # -- one call, checked ----------------------------------------------------------------------------------

    async def call(self, call: op.Operation[A], by: Driver | None = None) -> A:
        (answer,) = await self.in_turn(call, by=by)
        return answer

    async def in_turn(self, *calls: op.Operation[A], by: Driver | None = None) -> list[A]:
        """Make these calls one after the other, and compare what is visible after the last one."""
        answers = [await perform(by or self.driver, call) for call in calls]
        shown = await self.look()
        known = self._known()
        for call, answer in zip(calls, answers, strict=True):
            self.witness.saw(call, answer)
        self.witness.check(shown, self.now)
        try:
            for call, answer in zip(calls, answers, strict=True):
                replay(self.model, call, answer, shown)
            snapshot.compare(self.model, shown, self.now, *known)
        except Mismatch as wrong:
            raise Mismatch(f"after {call}:\n{wrong}") from None
        return answers

    async def together(self, *calls: tuple[Driver, op.Operation[Any]]) -> list[Any]:
        """Start all at once; some serial order of them must explain every answer and all that is visible.

        The first call starts first in one half of the races, and last in the other."""
        self._races += 1
        # The Thue-Morse sequence: a case that repeats a race, with any period, has it in both orders.
        step = -1 if self._races.bit_count() % 2 else 1
        answers = (await asyncio.gather(*(perform(driver, call) for driver, call in calls[::step])))[::step]
        shown = await self.look()
        pairs = [(call, answer) for (_, call), answer in zip(calls, answers, strict=True)]
        known, reasons = self._known(), list[str]()
        changing = [set[str]() for _ in pairs]
        if self.driver.capabilities.passes_over_busy:
            changing = [touched(self.model, call, answer) for call, answer in pairs]
        for order in itertools.permutations(range(len(pairs))):
            model = self.model.copy()
            try:
                for n in order:
                    busy = set[str]().union(*changing[:n], *changing[n + 1 :])
                    replay(model, *pairs[n], shown, busy)
                snapshot.compare(model, shown, self.now, *known)
            except Mismatch as wrong:
                reasons.append(f"{[pairs[n][0].name for n in order]}: {wrong}")
                continue
            self.model = model
            for n in order:
                self.witness.saw(*pairs[n])
            self.witness.check(shown, self.now)
            return list(answers)
        listed = "\n".join(f"  {call} -> {answer!r}" for call, answer in pairs)
        raise Mismatch(f"no order of these calls explains what happened:\n{listed}\n" + "\n".join(reasons))

    async def look(self) -> Snapshot:
        """Take a snapshot, and read the log once more as a reader that resumes from its cursor."""
        shown = await snapshot.take(self.observer, self.now)
        page = await snapshot.read_log(self.observer, self._feed_cursor, limit=5)
        self._feed += page.attempts
        self._feed_cursor = page.cursor
        seqs = [row.seq for row in self._feed]
        missed = {row.seq for row in shown.rows} - set(seqs)
        if missed or len(set(seqs)) != len(seqs):
            raise Mismatch(
                f"a reader that resumes from its cursor missed {missed} or saw a row twice: {seqs}"
            )
        return shown

    def _known(self) -> tuple[set[int], set[str]]:
        return {row.seq for row in self.model.log}, set(self.model.jobs)

    @asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Nothing that is visible changes in here, said without the model's help."""
        before = await self.look()
        yield
        after = await self.look()
        if before != after:
            raise Mismatch(f"something changed:\nbefore {before}\nafter  {after}")

    async def finish(self) -> None:
        """The other ways to read must tell the same story."""
        shown = await self.look()
        ids = [job.id for job in shown.jobs]
        by_id = {job.id: job for job in shown.jobs}
        assert await self.observer.get(ids, now=self.now) == [by_id[job_id] for job_id in ids]
        for job_id in ids[:20]:
            rows = [row for row in shown.rows if row.job_id == job_id]
            own = await self.observer.job_attempts(job_id)
            earlier = rows[: len(rows) - len(own)]
            # An id that was accepted anew after its job was removed: the rows of that one may be left out.
            assert earlier + own == rows, f"job_attempts({job_id}) is not its log"
            assert not earlier or earlier[-1].state.is_terminal, f"job_attempts({job_id}) lacks {earlier}"
        for stats in shown.stats[:20]:
            assert await self.observer.settings(stats.queue) == stats.settings
            assert await self.observer.stats(now=self.now, queue=stats.queue) == [stats]

    # -- calls -----------------------------------------------------------------------------------------------

    async def enqueue(self, *records: JobRecord, by: Driver | None = None) -> list[contract.Enqueued]:
        return await self.call(op.Enqueue(list(records), self.now, self.are_new(records)), by)

    def are_new(self, records: Sequence[JobRecord]) -> bool:
        """Return True if the driver is told that the ids are new: every other time that they are."""
        ids = {record.id for record in records}
        is_new = len(ids) == len(records) and not ids & self._ids
        self._ids |= ids
        return is_new and len(self._ids) % 2 == 0

    async def add(self, **fields: Any) -> JobRecord:
        """Enqueue one job of these fields."""
        return (await self.add_many(1, **fields))[0]

    async def add_many(self, count: int, **fields: Any) -> list[JobRecord]:
        jobs = [self.job(**fields) for _ in range(count)]
        await self.enqueue(*jobs)
        return jobs

    async def reserve(
        self,
        limit: int = 1,
        *,
        queue: str = QUEUE,
        lease: float = 30,
        worker: str = "w1",
        types: list[str] | None = None,
        by: Driver | None = None,
        now: Micros | None = None,
    ) -> list[JobRecord]:
        lease_for = round(lease * SECOND)
        return await self.call(
            op.Reserve(queue, limit, lease_for, self.now if now is None else now, worker, types), by
        )

    async def lease(self, job: JobRecord | None = None, **how: Any) -> JobRecord:
        """Enqueue the job where one is given, then reserve one."""
        if job is not None:
            await self.enqueue(job)
        (held,) = await self.reserve(**how)
        return held

    async def hold(self, count: int, **how: Any) -> list[JobRecord]:
        """Enqueue so many jobs and lease all of them."""
        await self.add_many(count, queue=how.get("queue", QUEUE))
        return await self.reserve(count, **how)

    async def settle(
        self, *settlements: contract.Settlement, by: Driver | None = None, now: Micros | None = None
    ) -> list[JobError | None]:
        return await self.call(op.Settle(list(settlements), self.now if now is None else now), by)

    async def extend(
        self, *extensions: contract.Extension, lease: float = 30, now: Micros | None = None
    ) -> list[Lease | JobError]:
        return await self.call(
            op.ExtendLease(list(extensions), round(lease * SECOND), self.now if now is None else now)
        )

    async def keep(self, held: JobRecord, progress: bytes | None = None, **how: Any) -> JobRecord:
        """Extend one lease; the record with the token and expiry that hold from now on."""
        (lease,) = await self.extend(beat(held, progress), **how)
        assert isinstance(lease, Lease), f"a valid lease was refused: {lease!r}"
        changed = {name: getattr(lease, name) for name in ("token", "expires_at_us", "cancel_requested")}
        return msgspec.structs.replace(held, **changed)

    async def reclaim(self, now: Micros | None = None, by: Driver | None = None, **kwargs: Any) -> int:
        return await self.call(op.Reclaim(self.now if now is None else now, **kwargs), by)

    async def cancel(
        self, *job_ids: str, only_waiting: bool = False, by: Driver | None = None
    ) -> list[JobState | JobError]:
        return await self.call(op.CancelJobs(list(job_ids), self.now, only_waiting), by)

    async def cancel_keys(self, *keys: str, queue: str = QUEUE, only_waiting: bool = False) -> list[int]:
        return await self.call(op.CancelKeys(list(keys), queue, self.now, only_waiting))

    async def requeue(
        self, *job_ids: str, run_at: Micros | None = None, keep_counts: bool = False
    ) -> list[JobState | JobError]:
        return await self.call(op.Requeue(list(job_ids), self.now, run_at, keep_counts))

    async def purge(self, limit: int = 1000, by: Driver | None = None, **selection: Any) -> int:
        return await self.call(op.Purge(JobFilter(**selection), limit), by)

    async def prune(self, limit: int = 1000, by: Driver | None = None) -> int:
        return await self.call(op.Prune(self.now, limit), by)

    async def configure(self, queue: str = QUEUE, **settings: Any) -> None:
        """Give a queue these settings, and the default ones for the rest."""
        await self.call(op.Configure(queue, QueueSettings(**settings), self.now))

    async def change(self, queue: str = QUEUE, declares: str | None = None, **settings: Any) -> None:
        """Change these settings of a queue, and leave the rest."""
        await self.call(self.changing(queue, declares, **settings))

    def changing(self, queue: str = QUEUE, declares: str | None = None, **settings: Any) -> op.Configure:
        given = QueueSettings(declaration=declares, **settings)
        return op.Configure(queue, given, self.now, list(settings), declares is not None)  # type: ignore[arg-type]

    # -- looking ---------------------------------------------------------------------------------------------

    async def get(self, job_id: str) -> JobRecord:
        (job,) = await self.driver.get([job_id], now=self.now)
        if job is None:
            raise InvariantBroken("nothingLost", f"job {job_id} is gone")
        return job

    async def stats(self, queue: str = QUEUE) -> contract.QueueStats:
        (stats,) = await self.driver.stats(now=self.now, queue=queue)
        return stats

    async def rows(self, job_id: str) -> list[Attempt]:
        return await self.driver.job_attempts(job_id)

    async def shows(self, job: JobRecord, **wanted: Any) -> None:
        """The stored record of this job has these values."""
        _has(await self.get(job.id), wanted)

    async def logged(self, job: JobRecord, **wanted: Any) -> None:
        """The last row of this job in the attempt log has these values."""
        _has((await self.rows(job.id))[-1], wanted)

    async def states(self, *jobs: JobRecord) -> str:
        """The states of these jobs, separated by blanks."""
        return " ".join([(await self.get(job.id)).state for job in jobs])

    # -- expectations ----------------------------------------------------------------------------------------

    async def stores(self, *records: JobRecord) -> None:
        """Each of these records becomes a job of its own."""
        assert await self.enqueue(*records) == [contract.Enqueued(record.id) for record in records]

    async def recognises(self, given: JobRecord, known: JobRecord) -> None:
        """An enqueue of `given` leads to the known job and changes nothing."""
        async with self.unchanged():
            assert await self.enqueue(given) == [contract.Enqueued(known.id, existed=True)]

    async def updates(self, given: JobRecord, waiting: JobRecord) -> None:
        """An enqueue of `given` is taken for a change of the waiting job."""
        assert await self.enqueue(given) == [contract.Enqueued(waiting.id, existed=True)]

    async def refuses(self, wanted: type[JobError], *settlements: contract.Settlement) -> None:
        """Every one of these settlements is refused by this error and changes nothing."""
        async with self.unchanged():
            answers = await self.settle(*settlements)
        assert [type(answer) for answer in answers] == [wanted] * len(settlements)
        assert [getattr(answer, "job_id", None) for answer in answers] == [one.job_id for one in settlements]

    async def refuses_beat(self, wanted: type[JobError], held: JobRecord) -> None:
        async with self.unchanged():
            (answer,) = await self.extend(beat(held, b"progress"))
        assert type(answer) is wanted


def _has(shown: msgspec.Struct, wanted: dict[str, Any]) -> None:
    got = {name: getattr(shown, name) for name in wanted}
    assert got == wanted, f"{got} should be {wanted}"


def ack(job: JobRecord, result: bytes | None = None) -> contract.Ack:
    return contract.Ack(job.id, _token(job), result)


def retry(
    job: JobRecord, run_at: Micros, *, attempts: int | None = None, error: Failure = BOOM
) -> contract.RetryAt:
    return contract.RetryAt(
        job.id, _token(job), run_at, job.attempts + 1 if attempts is None else attempts, error
    )


def fail(job: JobRecord, *, attempts: int | None = None, error: Failure = BOOM) -> contract.Fail:
    return contract.Fail(job.id, _token(job), job.attempts + 1 if attempts is None else attempts, error)


def release(job: JobRecord, run_at: Micros | None = None) -> contract.Release:
    return contract.Release(job.id, _token(job), run_at)


def discard(job: JobRecord, reason: Failure | None = None) -> contract.Discard:
    return contract.Discard(job.id, _token(job), reason)


def beat(job: JobRecord, progress: bytes | None = None) -> contract.Extension:
    return contract.Extension(job.id, _token(job), progress)


def _token(job: JobRecord) -> str:
    assert job.token is not None, "the record was not leased"
    return job.token


def with_token(job: JobRecord, token: str) -> JobRecord:
    return msgspec.structs.replace(job, token=token)


SETTLEMENTS: dict[str, End] = {
    "ack": ack,
    "retry": lambda job: retry(job, job.run_at_us),
    "fail": fail,
    "release": release,
    "discard": discard,
}
"""One settlement of each kind, for cases that hold for all of them."""
