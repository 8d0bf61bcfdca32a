"""The driver contract: what a backend must do so that every guarantee holds on it.

A driver stores jobs and moves them between states, atomically and in batches: one call, one round trip, one
transaction, with a result or an error *per item*. It decides nothing else: retries, back-off, time-outs and
validation belong to the core. Time always comes in as `now`; a driver never reads a clock inside an operation.

`docs/driver-contract.md` is the long form; `taskharbor_testkit.conformance` is the judge.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

import msgspec

from taskharbor.errors import InvalidRequest, JobError
from taskharbor.jobs import (
    SECOND,
    TERMINAL_STATES,
    Attempt,
    Failure,
    JobRecord,
    JobState,
    Lease,
    Micros,
    UpdateFlags,
)

if TYPE_CHECKING:
    from taskharbor.bulk.contract import BulkStore

DAY: Micros = 86_400 * SECOND

FAILURE_TYPE = "taskharbor.failure"
"""Type of the job that a failure queue receives for every job that died."""


class Enqueued(msgspec.Struct, frozen=True, gc=False):
    """What became of one enqueued record."""

    id: str
    """The job that will do the work: the new one, or the one that was already there."""
    existed: bool = False


class Ack(msgspec.Struct, frozen=True, gc=False):
    """The execution succeeded. -> done"""

    job_id: str
    token: str
    result: bytes | None = None


class Retry(msgspec.Struct, frozen=True, gc=False):
    """The execution failed and the core grants another. -> ready or scheduled, by run_at"""

    job_id: str
    token: str
    run_at_us: Micros
    attempts: int
    """The new number of recorded failures."""
    error: Failure


class Fail(msgspec.Struct, frozen=True, gc=False):
    """The execution failed for good. -> dead, and a job in the failure queue where the queue names one"""

    job_id: str
    token: str
    attempts: int
    error: Failure


class Release(msgspec.Struct, frozen=True, gc=False):
    """The job goes back unspent: no attempt, no stall. Keeps its place, or waits until `run_at_us` (a snooze)."""

    job_id: str
    token: str
    run_at_us: Micros | None = None


class Discard(msgspec.Struct, frozen=True, gc=False):
    """The holder ends the job on purpose: a cancel request was honoured, or the handler said so. -> cancelled"""

    job_id: str
    token: str
    reason: Failure | None = None


Settlement: TypeAlias = Ack | Retry | Fail | Release | Discard


class Extension(msgspec.Struct, frozen=True, gc=False):
    """A heartbeat for one job: proves the lease, carries progress up."""

    job_id: str
    token: str
    progress: bytes | None = None
    """None leaves the stored progress as it is."""


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator can say of a queue. Retention in microseconds; None keeps for ever."""

    paused: bool = False
    max_inflight: int | None = None
    """W: never more valid leases than this at once. None: no limit."""
    failure_queue: str | None = None
    keep_done_us: Micros | None = 7 * DAY
    """How long done and cancelled jobs stay after they ended."""
    keep_dead_us: Micros | None = 90 * DAY
    keep_attempts_us: Micros | None = 30 * DAY
    """How long rows of the attempt log stay after `ended_at`."""


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at a glance. Costs the same for ten jobs and for ten million."""

    queue: str
    counts: dict[JobState, int]
    """Jobs per state now; every state is present."""
    done_total: int = 0
    dead_total: int = 0
    cancelled_total: int = 0
    """Jobs that ever ended so, including those retention has removed. A merge counts as cancelled."""
    head_run_at_us: Micros | None = None
    """When the job that would be claimed next became due: how far the queue lags behind."""
    settings: QueueSettings = QueueSettings()


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs a listing or a purge means; what is None does not restrict."""

    queue: str | None = None
    states: frozenset[JobState] | None = None
    types: frozenset[str] | None = None
    key: str | None = None
    worker: str | None = None
    finished_before_us: Micros | None = None


class Page(msgspec.Struct, frozen=True):
    """Part of a listing, newest accepted first. `cursor` is opaque; None when nothing follows."""

    jobs: list[JobRecord]
    cursor: str | None


class AttemptPage(msgspec.Struct, frozen=True):
    """Part of the attempt log, in log order. `cursor` resumes after the last row, even when no row came."""

    attempts: list[Attempt]
    cursor: str


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What workers, the conformance kit and `doctor` may expect of a driver beyond the contract."""

    durable: bool = True
    """A job accepted survives the death of every process."""
    multi_process: bool = True
    """Several processes can open the same store."""
    passes_over_busy: bool = False
    """`reserve` may leave out a job that another call is changing at that very moment, instead of waiting for it, and count the
    lease of such a job as held. That call then wakes whoever waits. And of a job that another call is changing, a settlement
    or heartbeat that does not hold the lease may be told by the error of the moment before or after."""
    batch: int = 1000
    """How many jobs a worker leases or settles in one call, where they are quick enough: more make a call cheaper per job, and
    keep others waiting for longer."""


class JoinedTransaction(abc.ABC):
    """A transaction of the caller's, seen from the queue: what is enqueued here is there once it has committed, and only then.

    One statement on the caller's connection, by the same rules as `Driver.enqueue`. Beginning, committing and rolling back
    stay with the caller.
    """

    @abc.abstractmethod
    def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]: ...


class JoinedAsyncTransaction(abc.ABC):
    """The same on an asynchronous connection."""

    @abc.abstractmethod
    async def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]: ...


class Driver(abc.ABC):
    """One handle on a store, used from one event loop. `clone()` makes another for another loop.

    Every call that moves jobs is atomic as a whole on the backend: after a crash either all of the batch
    happened or nothing did. Errors per item (`JobError`) are *returned* in the item's place; only what concerns the
    whole call (bad input, backend gone) is raised. An operation that raised `BackendUnavailable` may or may
    not have happened; every operation here is safe to repeat with the same arguments.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def from_url(cls, url: str) -> Self:
        """Parse the URL and remember it. No I/O here; raise InvalidRequest on options it does not know."""

    @abc.abstractmethod
    def clone(self) -> Self:
        """Another handle on the same store, not yet open, for use from another event loop or as another client."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect and make the store ready (create or check its schema). Opening twice is harmless."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of connections. Closing twice is harmless; nothing accepted is lost."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abc.abstractmethod
    async def time(self) -> Micros:
        """The backend's own time now: what the core's clock is set by. Not used inside operations."""

    @classmethod
    def bulk_store(cls, url: str) -> BulkStore | None:
        """The store for those who read or write it by the million (`taskharbor.bulk`), where it can do better than this
        contract page by page. Optional; no I/O here."""
        return None

    async def migrate(self, *, dry_run: bool = False) -> list[str]:
        """Bring the store's schema up to date; the names of the steps taken (or that would be taken)."""
        return []

    # -- producing ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def enqueue(
        self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False
    ) -> list[Enqueued]:
        """Store each record as ready, scheduled (run_at > now) or blocked, in this order, all or nothing.

        Per record, first match wins:
        1. its id is known: nothing changes, existed (so a repeated try after an unclear answer is safe);
        2. its idempotency_key is known in the queue: nothing changes, the id known for it, existed. The key stays
           known as long as the job it led to is kept;
        3. it has a key and a job of that (queue, key) waits: that one is changed by the record's flags (`update`, or
           the default flags), its id, existed. A blocked one also gathers the flags: booleans by "or", run_at
           the newer unless that is "no". Priority and insertion stay. The record's own idempotency_key leads to that
           job from now on; its id is not kept, so a repeated try after the job has run makes a new one;
        4. it has a key and a job of that (queue, key) is inflight (valid lease or not): stored as blocked, with its flags;
        5. else stored. Lease fields, state and counters of the given record are ignored.

        `new_ids`: the caller made the ids for this very call, so no job has ever had one of them, and the driver need not
        look. Where it tries again by itself, it must still recognise them.
        """

    def within(self, transaction: object) -> JoinedTransaction | JoinedAsyncTransaction:
        """Join a transaction of the caller's: a connection or session of a library the driver knows. Optional, no I/O, and
        the handle need not be open. Raises InvalidRequest for anything it cannot join."""
        raise InvalidRequest(
            f"{type(self).__name__} cannot enqueue within a transaction of yours: its jobs are not kept in that database; "
            "use postgresql:// for that"
        )

    # -- working ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def reserve(
        self,
        queue: str,
        *,
        limit: int,
        lease_for: Micros,
        now: Micros,
        worker: str,
        types: Sequence[str] | None = None,
    ) -> list[JobRecord]:
        """Reclaim due leases of the queue, promote due scheduled jobs, then lease up to `limit` runnable ones.

        Order: priority descending, run_at, insertion. Each comes back inflight with token, worker, fence one higher,
        reserved_at = now, and expires_at = reserved_at + lease_for. Where a lease of this queue was valid until
        later than `now` (until its end or its expiry, whichever came first: calls may take effect in another order than
        their clocks were read), reserved_at is that instant instead: what
        follows in the store follows in time, so the log never shows two leases at once that were not. What is due
        (run_at <= now) and what is over (expires_at <= now) is judged by `now` as given, whatever others saw before.
        Nothing from a paused queue; never more than max_inflight valid leases (expires_at > now) in the queue; only
        `types` where given (an empty sequence matches nothing). Never waits for another worker's rows.
        """

    @abc.abstractmethod
    async def extend_lease(
        self, extensions: Sequence[Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        """Set expires_at = now + lease_for for every valid lease; the lease that holds from now on.

        Never backwards: where the lease already holds longer (a heartbeat that arrives late, with an older `now`, or a
        shorter lease_for), expires_at stays, and the returned lease says so. To end a lease early, release it.
        The token may change; the cancel request, if any, is in the returned lease. Validation as for settle.
        """

    @abc.abstractmethod
    async def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        """End leases: each settlement validated and applied on its own, in order, in one transaction.

        Validation, in this order: job known (JobNotFound), inflight (JobNotInflight), token matches (LeaseMismatch),
        expires_at > now (LeaseExpired). Before that, terminal idempotence: Ack of a done job, Fail of a done or
        dead job and Discard of a cancelled job succeed and change nothing, whatever the token.

        Each valid one appends one row to the attempt log (ended_at = now, never before the lease's reserved_at),
        clears the lease fields, `progress` and the cancel request, and:
        - a cancel request turns Retry and Release into cancelled (outcome cancelled); Retry still records its failure;
        - an end (done, dead, cancelled) makes a blocked job of the same key ready or scheduled by its own run_at;
        - a job that goes back to waiting absorbs a blocked job of the same key by that one's flags, after its own
          change: the blocked one becomes cancelled with merged_into, and gets a log row `merged`;
        - dead: where the queue names a failure queue, `failure_record` of it is enqueued there in the same step.
        finished_at is set by every end; failed_at and last_error by Retry and Fail (and Discard with a reason sets last_error).
        """

    @abc.abstractmethod
    async def reclaim(self, *, now: Micros, queue: str | None = None, limit: int = 1000) -> int:
        """End up to `limit` leases with expires_at <= now: outcome `expired`, stalls + 1. How many were ended.

        The job is cancelled if a cancel was requested; dead if attempts + stalls >= max_attempts or (max_stalls set and
        stalls >= max_stalls), with last_error (not failed_at) set and the failure queue served; else ready again in its
        old place, absorbing a blocked job of its key as in settle.
        """

    # -- operating ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def cancel(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        """Waiting: CANCELLED at once, with a log row. Inflight: flagged, INFLIGHT is returned, and the next heartbeat tells
        its holder. Cancelled already: CANCELLED. Done or dead: JobFinished. Unknown: JobNotFound."""

    @abc.abstractmethod
    async def requeue(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        """Dead -> ready, due now, attempts and stalls at zero, last_error kept, finished_at cleared, with a log row `requeued`.
        BLOCKED where its key is inflight, KeyConflict where its key already waits. Not dead: JobNotDead."""

    @abc.abstractmethod
    async def purge(self, selection: JobFilter, *, limit: int = 1000) -> int:
        """Remove up to `limit` terminal jobs that match (never others, whatever the filter says). How many."""

    @abc.abstractmethod
    async def prune(self, *, now: Micros, limit: int = 1000) -> int:
        """Apply every queue's retention to terminal jobs and the attempt log, at most `limit` rows of each. How many went.
        A row is due once its end + what the queue keeps <= now."""

    @abc.abstractmethod
    async def get(self, job_ids: Sequence[str], *, now: Micros) -> list[JobRecord | None]:
        """The jobs by id, in the given order. A scheduled job whose time has come reads as ready."""

    @abc.abstractmethod
    async def list_jobs(
        self, selection: JobFilter, *, now: Micros, limit: int = 100, cursor: str | None = None
    ) -> Page:
        """Jobs that match, newest accepted first. A page never repeats or skips what stood still between calls."""

    @abc.abstractmethod
    async def stats(self, *, now: Micros, queue: str | None = None) -> list[QueueStats]:
        """Every queue that has settings or ever had a job, by name (or just the one asked for, known or not)."""

    @abc.abstractmethod
    async def configure(self, queue: str, settings: QueueSettings, *, now: Micros) -> None:
        """Replace a queue's settings. A lower max_inflight revokes no lease; it grants none until there is room."""

    @abc.abstractmethod
    async def settings(self, queue: str) -> QueueSettings:
        """A queue's settings; the defaults where none were made."""

    # -- history ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def read_attempts(self, *, after: str | None = None, limit: int = 1000) -> AttemptPage:
        """The attempt log in commit order, from the beginning or after a cursor. Never skips a row that commits late."""

    @abc.abstractmethod
    async def job_attempts(self, job_id: str) -> list[Attempt]:
        """One job's rows of the attempt log, in order. Those of an earlier job of that id, which retention has removed, may be
        left out."""

    # -- waiting ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def wait(self, queues: Sequence[str], *, now: Micros, timeout: float) -> bool:
        """Return True as soon as something *may* have become runnable in one of the queues since the last wait returned, or
        when a scheduled job or an expiring lease known now comes due; False after `timeout` seconds. Never misses a wake-up;
        may wake for nothing. Cancellable at any moment."""

    async def reserve_next(
        self,
        queue: str,
        *,
        limit: int,
        lease_for: Micros,
        now: Micros,
        worker: str,
        types: Sequence[str] | None = None,
        timeout: float,
    ) -> list[JobRecord] | None:
        """`wait` and then `reserve` in one go, for who has just reserved less than it asked for; None where the driver cannot do
        that, or not now. It claims by a clock that was at `now` when it was called and has run since. Cancellable at any moment:
        what it leased by then goes back."""
        return None

    # -- one job at a time ----------------------------------------------------------------------------------

    async def ack(self, job_id: str, token: str, *, now: Micros, result: bytes | None = None) -> None:
        await self._settle_one(Ack(job_id, token, result), now)

    async def retry(
        self, job_id: str, token: str, *, now: Micros, run_at: Micros, attempts: int, error: Failure
    ) -> None:
        await self._settle_one(Retry(job_id, token, run_at, attempts, error), now)

    async def fail(self, job_id: str, token: str, *, now: Micros, attempts: int, error: Failure) -> None:
        await self._settle_one(Fail(job_id, token, attempts, error), now)

    async def release(self, job_id: str, token: str, *, now: Micros, run_at: Micros | None = None) -> None:
        await self._settle_one(Release(job_id, token, run_at), now)

    async def discard(self, job_id: str, token: str, *, now: Micros, reason: Failure | None = None) -> None:
        await self._settle_one(Discard(job_id, token, reason), now)

    async def _settle_one(self, settlement: Settlement, now: Micros) -> None:
        (error,) = await self.settle([settlement], now=now)
        if error is not None:
            raise error


def gather_flags(kept: UpdateFlags, newer: UpdateFlags) -> UpdateFlags:
    """Flags of a blocked job after one more enqueue onto it: no wish is dropped."""
    return UpdateFlags(
        payload=kept.payload or newer.payload,
        run_at=kept.run_at if newer.run_at == "no" else newer.run_at,
        retry=kept.retry or newer.retry,
        reset_counts=kept.reset_counts or newer.reset_counts,
    )


EXPIRED_ERROR = Failure(
    "LeaseExpired", "the lease expired before the job was settled (worker lost or stalled)"
)
"""last_error of a job that died by a stall, and the error of every `expired` row."""


class FailurePayload(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of a failure queue's job (JSON; bytes in base64): what died, with what payload, and why."""

    job_id: str
    queue: str
    type: str
    codec: str
    payload: bytes
    error: str
    attempts: int
    stalls: int


_encode_failure = msgspec.json.Encoder().encode


def failure_record(dead: JobRecord, *, job_id: str, queue: str, now: Micros) -> JobRecord:
    """The job that a failure queue receives. `dead` carries its final counters and last_error."""
    payload = FailurePayload(
        job_id=dead.id,
        queue=dead.queue,
        type=dead.type,
        codec=dead.codec,
        payload=dead.payload,
        error=dead.last_error or "",
        attempts=dead.attempts,
        stalls=dead.stalls,
    )
    return JobRecord(
        id=job_id,
        type=FAILURE_TYPE,
        queue=queue,
        payload=_encode_failure(payload),
        headers=dead.headers,
        run_at_us=now,
        created_at_us=now,
    )


__all__ = [
    "DAY",
    "EXPIRED_ERROR",
    "FAILURE_TYPE",
    "TERMINAL_STATES",
    "Ack",
    "AttemptPage",
    "Capabilities",
    "Discard",
    "Driver",
    "Enqueued",
    "Extension",
    "Fail",
    "FailurePayload",
    "JobFilter",
    "JoinedAsyncTransaction",
    "JoinedTransaction",
    "Page",
    "QueueSettings",
    "QueueStats",
    "Release",
    "Retry",
    "Settlement",
    "failure_record",
    "gather_flags",
]
