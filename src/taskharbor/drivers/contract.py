"""The driver contract: what a backend must do so that every guarantee holds on it.

A driver stores jobs and moves them between states, atomically and in batches: one call, one round trip, one
transaction, with a result or an error *per item*. It decides nothing else: retries, back-off, time-outs and
time limits belong to the core. Time always comes in as `now`; a driver never reads a clock inside an operation.

The public methods make an operation of their arguments (`operations`) and check it once (`dispatch`). A driver carries the
operations out: it has a function or a method for each, or one `run` for all.

`docs/driver-contract.md` is the long form; `taskharbor_testkit.conformance` is the judge.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from taskharbor.drivers import operations as op
from taskharbor.drivers.dispatch import Dispatcher, check, listed
from taskharbor.drivers.records import (
    DAY,
    EXPIRED_ERROR,
    FAILURE_TYPE,
    Ack,
    AttemptPage,
    Capabilities,
    Discard,
    Enqueued,
    Extension,
    Fail,
    FailurePayload,
    JobFilter,
    JobShare,
    LogPage,
    LogState,
    LogStream,
    Page,
    QueueSettings,
    QueueStats,
    Release,
    Retry,
    Settlement,
    Woken,
    failure_record,
    gather_flags,
)
from taskharbor.errors import InvalidRequest, JobError
from taskharbor.jobs import TERMINAL_STATES, Attempt, Failure, JobRecord, JobState, Lease, Micros

if TYPE_CHECKING:
    from taskharbor.bulk.store import BulkStore

_MOST_PARTS = 100_000


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


class Driver(Dispatcher, abc.ABC):
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

    async def __aexit__(self, *error: object) -> None:
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
        return await self.run(check(op.Enqueue(listed("records", records), now, new_ids)))

    def within(self, transaction: object) -> JoinedTransaction | JoinedAsyncTransaction:
        """Join a transaction of the caller's: a connection or session of a library the driver knows. Optional, no I/O, and
        the handle need not be open. Raises InvalidRequest for anything it cannot join."""
        raise InvalidRequest(
            f"{type(self).__name__} cannot enqueue within a transaction of yours: its jobs are not kept in that database; "
            "use postgresql:// for that"
        )

    # -- working ------------------------------------------------------------------------------------------

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
        given = None if types is None else listed("types", types)
        return await self.run(check(op.Reserve(queue, limit, lease_for, now, worker, given)))

    async def extend_lease(
        self, extensions: Sequence[Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        """Set expires_at = now + lease_for for every valid lease; the lease that holds from now on.

        Never backwards: where the lease already holds longer (a heartbeat that arrives late, with an older `now`, or a
        shorter lease_for), expires_at stays, and the returned lease says so. To end a lease early, release it.
        The token may change; the cancel request, if any, is in the returned lease. Validation as for settle.
        """
        return await self.run(check(op.ExtendLease(listed("extensions", extensions), lease_for, now)))

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
        finished_at is set by every end, to max(now, reserved_at); failed_at (= now) and last_error by Retry and Fail (and
        Discard with a reason sets last_error).
        """
        return await self.run(check(op.Settle(listed("settlements", settlements), now)))

    async def reclaim(self, *, now: Micros, queue: str | None = None, limit: int = 1000) -> int:
        """End up to `limit` leases with expires_at <= now: outcome `expired`, stalls + 1. How many were ended.

        The job is cancelled if a cancel was requested; dead if attempts + stalls >= max_attempts or (max_stalls set and
        stalls >= max_stalls), with last_error (not failed_at) set and the failure queue served; else ready again in its
        old place, absorbing a blocked job of its key as in settle.
        """
        return await self.run(check(op.Reclaim(now, queue, limit)))

    # -- operating ----------------------------------------------------------------------------------------

    async def cancel(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        """Waiting: CANCELLED at once, with a log row. Inflight: flagged, INFLIGHT is returned, and the next heartbeat tells
        its holder. Cancelled already: CANCELLED. Done or dead: JobFinished. Unknown: JobNotFound."""
        return await self.run(check(op.Cancel(listed("job_ids", job_ids), now)))

    async def requeue(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        """Dead -> ready, due now, attempts and stalls at zero, last_error kept, finished_at cleared, with a log row `requeued`.
        BLOCKED where its key is inflight, KeyConflict where its key already waits. Not dead: JobNotDead."""
        return await self.run(check(op.Requeue(listed("job_ids", job_ids), now)))

    async def purge(self, selection: JobFilter, *, limit: int = 1000) -> int:
        """Remove up to `limit` terminal jobs that match (never others, whatever the filter says). How many."""
        return await self.run(check(op.Purge(selection, limit)))

    async def prune(self, *, now: Micros, limit: int = 1000) -> int:
        """Apply every queue's retention to terminal jobs and the attempt log, at most `limit` rows of each. How many went.
        A row is due once its end + what the queue keeps <= now."""
        return await self.run(check(op.Prune(now, limit)))

    async def get(self, job_ids: Sequence[str], *, now: Micros) -> list[JobRecord | None]:
        """The jobs by id, in the given order. A scheduled job whose time has come reads as ready."""
        return await self.run(check(op.Get(listed("job_ids", job_ids), now)))

    async def list_jobs(
        self, selection: JobFilter, *, now: Micros, limit: int = 100, cursor: str | None = None
    ) -> Page:
        """Jobs that match, newest accepted first. A page never repeats or skips what stood still between calls, also where the
        job at the cursor was removed or matches no longer. A cursor that is none raises InvalidRequest."""
        return await self.run(check(op.ListJobs(selection, now, limit, cursor)))

    async def stats(self, *, now: Micros, queue: str | None = None) -> list[QueueStats]:
        """Every queue that has settings or ever had a job, by name (or just the one asked for, known or not)."""
        return await self.run(check(op.Stats(now, queue)))

    async def configure(self, queue: str, settings: QueueSettings, *, now: Micros) -> None:
        """Replace a queue's settings. A lower max_inflight revokes no lease; it grants none until there is room."""
        await self.run(check(op.Configure(queue, settings, now)))

    async def settings(self, queue: str) -> QueueSettings:
        """A queue's settings; the defaults where none were made."""
        return await self.run(check(op.Settings(queue)))

    # -- history ------------------------------------------------------------------------------------------

    async def read_attempts(self, *, after: str | None = None, limit: int = 1000) -> AttemptPage:
        """The attempt log in commit order, from the beginning or after a cursor. Never skips a row that commits late. A cursor
        that is none raises InvalidRequest."""
        return await self.run(check(op.ReadAttempts(after, limit)))

    async def job_attempts(self, job_id: str) -> list[Attempt]:
        """One job's rows of the attempt log, in order. Those of an earlier job of that id, which retention has removed, may be
        left out."""
        return await self.run(check(op.JobAttempts(job_id)))

    # -- in bulk ------------------------------------------------------------------------------------------
    # `taskharbor.bulk` reads and writes whole tables through these, from many processes at once.

    async def open_to_read(self) -> None:
        """`open` for a reader: makes no store where there is none, and writes nothing."""
        await self.open()

    async def log_streams(self) -> LogState:
        """The streams of the attempt log as they are now. Every row of the log is in one of them."""
        return await self.run(op.LogStreams())

    async def read_log(self, stream: str, *, after: int, until: int, limit: int = 1000) -> LogPage:
        """Rows of a stream after one place up to another: `limit` of them, and those of one place together. The page's place is
        `until` where no row is left."""
        return await self.run(check(op.ReadLog(stream, after, until, limit)))

    async def split_log(self, stream: str, *, after: int, until: int, rows: int) -> list[int]:
        """Places in between, in order, which cut these rows into shares of about so many."""
        return await self.run(check(op.SplitLog(stream, after, until, rows)))

    async def split_jobs(self, *, queue: str | None = None, parts: int) -> list[JobShare]:
        """Shares of about the same size, which cover the listing of all jobs, or of one queue's: about `parts`, or more."""
        return await self.run(check(op.SplitJobs(queue, parts)))

    async def remove(self, job_ids: Sequence[str]) -> list[JobState | JobError]:
        """Remove jobs that have ended. Per id: the state the job was in (the same for an id named twice), JobNotFound, or a
        JobError where the job has not ended and stays."""
        return await self.run(check(op.Remove(listed("job_ids", job_ids))))

    async def put_blob(self, name: str, data: bytes) -> None:
        """Store bytes under a name."""
        await self.run(check(op.PutBlob(name, data)))

    async def swap_blob(self, name: str, data: bytes, *, expected: bytes | None) -> bool:
        """The same where the blob holds exactly what is expected (None: where there is none). Else False, and nothing changes."""
        return await self.run(check(op.PutBlob(name, data, True, expected)))

    async def read_blobs(self, names: Sequence[str]) -> list[bytes | None]:
        """The blobs of these names, None for one that is not there."""
        return await self.run(check(op.ReadBlobs(listed("names", names))))

    async def list_blobs(self, folder: str) -> list[str]:
        """The names that begin with `folder` and a slash, in order."""
        return await self.run(check(op.ListBlobs(folder)))

    async def drop_blobs(self, names: Sequence[str]) -> None:
        """Remove blobs; a name that is not there is fine."""
        if names:
            await self.run(check(op.DropBlobs(listed("names", names))))

    async def check_room(self, queue: str, size: int) -> None:
        """Raise InvalidRequest where the queue cannot take so many bytes of new jobs."""
        await self.run(check(op.CheckRoom(queue, size)))

    async def publish_blobs(
        self, names: Sequence[str], *, series: str, number: int, portion: int, now: Micros
    ) -> dict[str, int]:
        """Enqueue the jobs that `bulk.stage.pack` packed into these blobs, and note with them that this portion of the series'
        write is published. The portions of a write come in ascending order, from 1 on, and the writes of a series by ascending
        number. So one note per series is enough: the last number and portion. A portion up to that one adds nothing, also after
        its jobs are gone. A write of an earlier number answers 0 for a place whose note is of a later one. A blob that is not
        there is left out; no blob is removed.

        The store may keep its notes in several places, each with a part of the jobs. The answer: by place, how many jobs the
        write has added there so far, at least for every place that these jobs go to.
        """
        return await self.run(check(op.PublishBlobs(series, number, portion, listed("names", names), now)))

    # -- waiting ------------------------------------------------------------------------------------------

    async def wait(
        self, queues: Sequence[str], *, now: Micros, timeout: float, seen: str | None = None
    ) -> Woken:
        """Return `woken` as soon as something *may* have become runnable in one of the queues since the wait that told `seen`,
        or when a scheduled job or an expiring lease known now comes due; not woken after `timeout` seconds.

        `seen` is the text that the caller's last wait for the same queues told; without it the answer comes at once, woken. So
        a caller that passes it on misses no wake-up, whichever handle it uses; it may wake for nothing. A due job that cannot
        run (paused, no room) wakes a caller once. Cancellable at any moment."""
        return await self.run(check(op.Wait(listed("queues", queues), now, timeout, seen)))

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
        given = None if types is None else listed("types", types)
        return await self._reserve_next(
            check(op.Reserve(queue, limit, lease_for, now, worker, given)), timeout
        )

    # -- implementing ---------------------------------------------------------------------------------------

    async def _split_log(self, call: op.SplitLog) -> list[int]:
        """For places that follow one another without a gap."""
        if (call.until - call.after) // call.rows > _MOST_PARTS:
            raise InvalidRequest(f"rows {call.rows}: the log would be cut into more than {_MOST_PARTS} parts")
        return list(range(call.after + call.rows, call.until, call.rows))

    async def _split_jobs(self, call: op.SplitJobs) -> list[JobShare]:
        return [JobShare(queue=call.queue)]

    async def _check_room(self, call: op.CheckRoom) -> None:
        return None

    async def _reserve_next(self, call: op.Reserve, timeout: float) -> list[JobRecord] | None:
        return None

    # -- one job at a time ----------------------------------------------------------------------------------

    async def ack(self, job_id: str, token: str, *, now: Micros, result: bytes | None = None) -> None:
        """End one lease: the job is done."""
        await self._settle_one(Ack(job_id, token, result), now)

    async def retry(
        self, job_id: str, token: str, *, now: Micros, run_at: Micros, attempts: int, error: Failure
    ) -> None:
        """End one lease: the job failed and runs again."""
        await self._settle_one(Retry(job_id, token, run_at, attempts, error), now)

    async def fail(self, job_id: str, token: str, *, now: Micros, attempts: int, error: Failure) -> None:
        """End one lease: the job is dead."""
        await self._settle_one(Fail(job_id, token, attempts, error), now)

    async def release(self, job_id: str, token: str, *, now: Micros, run_at: Micros | None = None) -> None:
        """End one lease: the job goes back, and nothing is spent."""
        await self._settle_one(Release(job_id, token, run_at), now)

    async def discard(self, job_id: str, token: str, *, now: Micros, reason: Failure | None = None) -> None:
        """End one lease: the job is cancelled."""
        await self._settle_one(Discard(job_id, token, reason), now)

    async def _settle_one(self, settlement: Settlement, now: Micros) -> None:
        (error,) = await self.settle([settlement], now=now)
        if error is not None:
            raise error


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
    "JobShare",
    "JoinedAsyncTransaction",
    "JoinedTransaction",
    "LogPage",
    "LogState",
    "LogStream",
    "Page",
    "QueueSettings",
    "QueueStats",
    "Release",
    "Retry",
    "Settlement",
    "Woken",
    "failure_record",
    "gather_flags",
]
