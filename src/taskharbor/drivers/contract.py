"""The driver contract: the calls that every backend implements, so that every guarantee holds on it.

A driver stores jobs and moves them between states, atomically and in batches: one call, one round trip, one transaction, with a
result or an error *per item*. It decides nothing else: retries, back-off, time-outs and time limits belong to the core. Time is
always the argument `now`; a driver never reads a clock inside an operation.

The public methods make an operation of their arguments (`operations`) and check it once (`validation`). A driver carries the
operations out: it has a function or a method for each, or one `run` for all.

`docs/driver-contract.md` explains the contract. `taskharbor_testkit.conformance` checks a driver against it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from taskharbor.drivers import operations as op
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
    RetryAt,
    SettingsField,
    Settlement,
    Woken,
    failure_record,
    gather_flags,
)
from taskharbor.drivers.validation import Dispatcher, check, listed
from taskharbor.errors import InvalidRequest, JobError
from taskharbor.jobs import TERMINAL_STATES, Attempt, Failure, JobRecord, JobState, Lease, Micros

if TYPE_CHECKING:
    from taskharbor.bulk.store import BulkStore

_MOST_PARTS = 100_000


class JoinedTransaction(abc.ABC):
    """A transaction of the caller. Jobs that are enqueued here exist once it has committed, and only then.

    An enqueue is one statement on the caller's connection, by the same rules as `Driver.enqueue`. The caller begins, commits and
    rolls back.
    """

    @abc.abstractmethod
    def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]: ...


class JoinedAsyncTransaction(abc.ABC):
    """`JoinedTransaction` on an asynchronous connection."""

    @abc.abstractmethod
    async def enqueue(self, records: Sequence[JobRecord], *, now: Micros) -> list[Enqueued]: ...


class Driver(Dispatcher, abc.ABC):
    """One handle on a store, used from one event loop. `clone()` makes another for another loop.

    Every call that moves jobs is atomic as a whole: after a crash either all of the batch happened or nothing did. An error about
    one item (`JobError`) is *returned* in the item's place. An error about the whole call (bad input, backend gone) is raised. A
    call that raised `BackendUnavailable` may or may not have happened. Every call is safe to repeat with the same arguments.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def from_url(cls, url: str) -> Self:
        """Parse the URL and keep its options. No I/O. Raises InvalidRequest for an unknown option."""

    @abc.abstractmethod
    def clone(self) -> Self:
        """Return another handle on the same store, not yet open, for another event loop or as another client."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect and make the store ready (create or check its schema). Opening twice is harmless."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close the connections. Closing twice is harmless; no accepted job is lost."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @abc.abstractmethod
    async def time(self) -> Micros:
        """Return the backend's own time. The core sets its clock by it. Operations do not use it."""

    @classmethod
    def bulk_store(cls, url: str) -> BulkStore | None:
        """Return a bulk store (`taskharbor.bulk`) for callers that read or write millions of rows, if the backend can do better
        than this contract page by page. Optional; no I/O here."""
        return None

    async def migrate(self, *, dry_run: bool = False) -> list[str]:
        """Bring the store's schema up to date. Returns the names of the steps that were taken, or with `dry_run` would be."""
        return []

    # -- producing ----------------------------------------------------------------------------------------

    async def enqueue(
        self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False
    ) -> list[Enqueued]:
        """Store each record as ready, scheduled (run_at > now) or blocked, in this order, all or nothing.

        Per record, the first match wins:
        1. Its id is known: nothing changes, existed. So a repeated try after an unclear answer is safe.
        2. Its idempotency_key is known in the queue: nothing changes, existed; the answer has the id known for the key. The key
           stays known as long as the job that it led to is kept.
        3. It has a key, and a job of that (queue, key) waits: that job is changed by the record's flags (`update`, or the default
           flags), existed; the answer has its id. A blocked job also gathers the flags: booleans by "or", run_at the newer unless
           that is "no". The priority changes only by the flag `priority`; the place of insertion stays. The
           record's own idempotency_key leads to that job from now on. The record's id is not kept, so a repeated try after the
           job has run makes a new job.
        4. It has a key, and a job of that (queue, key) is inflight (valid lease or not): stored as blocked, with its flags.
        5. Else stored. Lease fields, state and counters of the given record are ignored.

        `new_ids`: the caller made the ids for this call, so no job has ever had one of them, and the driver need not look for
        them. If the driver repeats the call by itself, it must still recognise them.
        """
        return await self.run(check(op.Enqueue(listed("records", records), now, new_ids)))

    def within(self, transaction: object) -> JoinedTransaction | JoinedAsyncTransaction:
        """Join a transaction of the caller: a connection or session of a library that the driver knows. Optional. No I/O; the
        handle need not be open. Raises InvalidRequest for a transaction that it cannot join."""
        raise InvalidRequest(
            f"{type(self).__name__.removesuffix('Driver')} does not join transactions of yours: only postgresql:// does; enqueue "
            "after your commit, without within()"
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
        """Reclaim expired leases of the queue, promote due scheduled jobs, then lease up to `limit` runnable jobs. A driver may
        leave expired leases for the next call, once it has reclaimed a thousand, and `limit` of them.

        Order: priority descending, run_at, insertion. Each job comes back inflight with token, worker, a fence one higher,
        reserved_at = now and expires_at = reserved_at + lease_for.

        One exception: a lease of this queue was valid until later than `now` (until its end or its expiry, whichever came first).
        That can happen, because calls may take effect in another order than their clocks were read. Then reserved_at is that
        later instant. So the log never shows two leases at once that were not.

        `now` as given decides which jobs are due (run_at <= now) and which leases have expired (expires_at <= now).

        A paused queue gives nothing. The queue never has more than max_inflight valid leases (expires_at > now). `types`
        restricts the types; an empty sequence matches nothing. The call never waits for another worker's rows.
        """
        given = None if types is None else listed("types", types)
        return await self.run(check(op.Reserve(queue, limit, lease_for, now, worker, given)))

    async def extend_lease(
        self, extensions: Sequence[Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        """Set expires_at = now + lease_for for every valid lease. Returns the new lease of each, or its error.

        A lease is never shortened. If it already lasts longer (a heartbeat that arrives late, with an older `now`, or a shorter
        lease_for), expires_at stays, and the returned lease says so. To end a lease early, release it. The token may change. A
        cancel request is in the returned lease. Validation as for settle.
        """
        return await self.run(check(op.ExtendLease(listed("extensions", extensions), lease_for, now)))

    async def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        """End leases. Each settlement is validated and applied on its own, in order, in one transaction.

        Terminal idempotence comes first: Ack of a done job, Fail of a done or dead job and Discard of a cancelled job succeed and
        change nothing, whatever the token. Then the validation, in this order: job known (JobNotFound), inflight
        (JobNotInflight), token matches (LeaseMismatch), expires_at > now (LeaseExpired).

        Each valid settlement appends one row to the attempt log (ended_at = now, never before the lease's reserved_at), clears
        the lease fields, `progress` and the cancel request, and:
        - a cancel request turns RetryAt and Release into cancelled (outcome cancelled); RetryAt still records its failure;
        - an end (done, dead, cancelled) makes a blocked job of the same key ready or scheduled by its own run_at;
        - a job that goes back to waiting absorbs a blocked job of the same key by that job's flags, after its own change: the
          blocked job becomes cancelled with merged_into, and gets a log row `merged`;
        - dead: if the queue names a failure queue, `failure_record` of the job is enqueued there in the same step.

        Every end sets finished_at to max(now, reserved_at). RetryAt and Fail set failed_at (= now) and last_error. Discard with a
        reason sets last_error.
        """
        return await self.run(check(op.Settle(listed("settlements", settlements), now)))

    async def reclaim(self, *, now: Micros, queue: str | None = None, limit: int = 1000) -> int:
        """End up to `limit` leases with expires_at <= now: outcome `expired`, stalls + 1. Returns the number of ended leases.

        The job is cancelled if a cancel was requested. It is dead if attempts + stalls >= max_attempts; with max_stalls, if
        attempts >= max_attempts or stalls >= max_stalls. Then last_error (not failed_at) is set and the failure queue is served.
        Else it is ready again in its old place, and absorbs a blocked job of its key as in settle.
        """
        return await self.run(check(op.Reclaim(now, queue, limit)))

    # -- operating ----------------------------------------------------------------------------------------

    async def cancel(
        self, job_ids: Sequence[str], *, now: Micros, only_waiting: bool = False
    ) -> list[JobState | JobError]:
        """Cancel jobs, and return the state or the error of each.

        A waiting job becomes CANCELLED at once, with a log row. An inflight job is marked and INFLIGHT is returned; the next
        heartbeat tells its holder. A cancelled job stays CANCELLED. A done or dead job: JobFinished. An unknown job: JobNotFound.

        `only_waiting`: an inflight job is not marked; the answer is INFLIGHT too.
        """
        return await self.run(check(op.CancelJobs(listed("job_ids", job_ids), now, only_waiting)))

    async def cancel_keys(
        self, keys: Sequence[str], *, queue: str, now: Micros, only_waiting: bool = False
    ) -> list[int]:
        """Cancel the jobs of keys in a queue, by the rules of `cancel`: the waiting job of each key, and the inflight one unless
        `only_waiting`. Returns for each key how many jobs were cancelled or marked: 0, 1 or 2. A job that is marked already
        counts."""
        return await self.run(check(op.CancelKeys(listed("keys", keys), queue, now, only_waiting)))

    async def requeue(
        self,
        job_ids: Sequence[str],
        *,
        now: Micros,
        run_at_us: Micros | None = None,
        keep_counts: bool = False,
    ) -> list[JobState | JobError]:
        """Make dead jobs ready again, and return the state or the error of each.

        The job is due now, or at `run_at_us`. It is SCHEDULED if that is later than `now`. Its attempts and stalls are zero,
        unless `keep_counts`. last_error is kept, finished_at is cleared, and the log gets a row `requeued`. If its key is
        inflight the job is BLOCKED. If its key already waits: KeyConflict. If it is not dead: JobNotDead.
        """
        return await self.run(check(op.Requeue(listed("job_ids", job_ids), now, run_at_us, keep_counts)))

    async def purge(self, selection: JobFilter, *, limit: int = 1000) -> int:
        """Remove up to `limit` ended jobs that match; never others, whatever the filter says. Returns the number of removed
        jobs."""
        return await self.run(check(op.Purge(selection, limit)))

    async def prune(self, *, now: Micros, limit: int = 1000) -> int:
        """Apply every queue's retention to ended jobs and to the attempt log, at most `limit` rows of each. Returns the number of
        removed rows. A row is due when its end + the queue's retention <= now."""
        return await self.run(check(op.Prune(now, limit)))

    async def get(self, job_ids: Sequence[str], *, now: Micros) -> list[JobRecord | None]:
        """Return jobs by id, in the given order. A scheduled job whose time has come reads as ready."""
        return await self.run(check(op.Get(listed("job_ids", job_ids), now)))

    async def list_jobs(
        self, selection: JobFilter, *, now: Micros, limit: int = 100, cursor: str | None = None
    ) -> Page:
        """List the jobs that match, newest accepted first.

        A page never repeats or skips a job that did not change between calls, even if the job at the cursor was removed or
        matches no longer. Raises InvalidRequest for a text that is no cursor.
        """
        return await self.run(check(op.ListJobs(selection, now, limit, cursor)))

    async def stats(self, *, now: Micros, queue: str | None = None) -> list[QueueStats]:
        """Return the figures of every queue that has settings or ever had a job, by name; or only those of `queue`, known or
        not."""
        return await self.run(check(op.Stats(now, queue)))

    async def configure(
        self,
        queue: str,
        settings: QueueSettings,
        *,
        now: Micros,
        fields: Sequence[SettingsField] | None = None,
        declares: bool = False,
    ) -> None:
        """Change the named fields of a queue's settings, or all, in one step. A lower max_inflight revokes no lease; it grants
        none until there is room.

        The field `declaration` changes only with `declares`. Such a call changes nothing if the stored declaration is the given
        one. Otherwise it changes the named fields and the declaration.
        """
        given = None if fields is None else listed("fields", fields)
        await self.run(check(op.Configure(queue, settings, now, given, declares)))

    async def settings(self, queue: str) -> QueueSettings:
        """Return a queue's settings; the defaults if none were made."""
        return await self.run(check(op.Settings(queue)))

    # -- history ------------------------------------------------------------------------------------------

    async def read_attempts(self, *, after: str | None = None, limit: int = 1000) -> AttemptPage:
        """Read the attempt log in commit order, from the beginning or after a cursor. It never skips a row that commits late.
        Raises InvalidRequest for a text that is no cursor."""
        return await self.run(check(op.ReadAttempts(after, limit)))

    async def job_attempts(self, job_id: str) -> list[Attempt]:
        """Return one job's rows of the attempt log, in order. Rows of an earlier job of that id, which retention has removed, may
        be left out."""
        return await self.run(check(op.JobAttempts(job_id)))

    # -- in bulk ------------------------------------------------------------------------------------------
    # `taskharbor.bulk` reads and writes whole tables through these, from many processes at once.

    async def open_to_read(self) -> None:
        """Open for a reader: make no store if there is none, and write nothing."""
        await self.open()

    async def log_streams(self) -> LogState:
        """Return the streams of the attempt log as they are now. Every row of the log is in one of them."""
        return await self.run(op.LogStreams())

    async def read_log(self, stream: str, *, after: int, until: int, limit: int = 1000) -> LogPage:
        """Return rows of a stream after one place up to another: `limit` of them, and rows of one place together. The page's
        place is `until` if no row is left."""
        return await self.run(check(op.ReadLog(stream, after, until, limit)))

    async def split_log(self, stream: str, *, after: int, until: int, rows: int) -> list[int]:
        """Return places in between, in order, that cut these rows into shares of about `rows` rows."""
        return await self.run(check(op.SplitLog(stream, after, until, rows)))

    async def split_jobs(self, *, queue: str | None = None, parts: int) -> list[JobShare]:
        """Return shares of about the same size that cover the listing of all jobs, or of one queue: about `parts`, or more."""
        return await self.run(check(op.SplitJobs(queue, parts)))

    async def remove(self, job_ids: Sequence[str]) -> list[JobState | JobError]:
        """Remove jobs that have ended. Answers per id: the state of the job (the same for an id named twice), JobNotFound, or a
        JobError for a job that has not ended and stays."""
        return await self.run(check(op.Remove(listed("job_ids", job_ids))))

    async def put_blob(self, name: str, data: bytes) -> None:
        """Store bytes under a name."""
        await self.run(check(op.PutBlob(name, data)))

    async def swap_blob(self, name: str, data: bytes, *, expected: bytes | None) -> bool:
        """Store bytes under a name if the blob holds exactly `expected` (None: if there is no blob). Else return False and change
        nothing."""
        return await self.run(check(op.PutBlob(name, data, True, expected)))

    async def read_blobs(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the blobs of these names, None for a blob that is not there."""
        return await self.run(check(op.ReadBlobs(listed("names", names))))

    async def list_blobs(self, folder: str) -> list[str]:
        """Return the names that begin with `folder` and a slash, in order."""
        return await self.run(check(op.ListBlobs(folder)))

    async def drop_blobs(self, names: Sequence[str]) -> None:
        """Remove blobs. A name that is not there is no error."""
        if names:
            await self.run(check(op.DropBlobs(listed("names", names))))

    async def check_room(self, queue: str, size: int) -> None:
        """Raise InvalidRequest if the queue cannot take `size` more bytes of jobs."""
        await self.run(check(op.CheckRoom(queue, size)))

    async def publish_blobs(
        self, names: Sequence[str], *, series: str, number: int, portion: int, now: Micros
    ) -> dict[str, int]:
        """Enqueue the jobs that `bulk.stage.pack` packed into these blobs, and note with them that this portion of the write is
        published.

        The portions of a write come in ascending order, from 1 on, and the writes of a series by ascending number. So one note
        per series is enough: the last number and portion. A portion up to the noted one adds nothing, even after its jobs are
        gone. A write of an earlier number answers 0 for a place whose note is of a later one. A blob that is not there is left
        out; no blob is removed.

        The store may keep its notes in several places, each with a part of the jobs. Returns, by place, the number of jobs that
        the write has added there so far, at least for every place of these jobs.
        """
        return await self.run(check(op.PublishBlobs(series, number, portion, listed("names", names), now)))

    # -- waiting ------------------------------------------------------------------------------------------

    async def wait(
        self, queues: Sequence[str], *, now: Micros, timeout: float, seen: str | None = None
    ) -> Woken:
        """Wait until something *may* have become runnable in one of the queues since the wait that returned `seen`, or until a
        scheduled job or an expiring lease that is known now comes due. Returns `woken`, or not woken after `timeout` seconds.

        `seen` is the text from the caller's last wait for the same queues. Without it the answer comes at once, woken. A caller
        that passes it on misses no wake-up, whichever handle it uses; it may wake for nothing. A due job that cannot run (paused,
        no room) wakes a caller once. The wait can be cancelled at any moment.
        """
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
        """`wait` and then `reserve` in one call, for a caller that has just reserved less than it asked for.

        Returns None if the driver cannot do that, or not now. The claim uses a clock that was at `now` when the call was made and
        has run since. It can be cancelled at any moment: jobs that it has leased go back.
        """
        given = None if types is None else listed("types", types)
        call = check(op.Reserve(queue, limit, lease_for, now, worker, given))
        return await self._reserve_next(call, timeout)

    # -- implementing ---------------------------------------------------------------------------------------

    async def _split_log(self, call: op.SplitLog) -> list[int]:
        """Split a log whose places follow one another without a gap."""
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
        await self._settle_one(RetryAt(job_id, token, run_at, attempts, error), now)

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
    "DAY", "EXPIRED_ERROR", "FAILURE_TYPE", "TERMINAL_STATES", "Ack", "AttemptPage", "Capabilities",
    "Discard", "Driver", "Enqueued", "Extension", "Fail", "FailurePayload", "JobFilter", "JobShare",
    "JoinedAsyncTransaction", "JoinedTransaction", "LogPage", "LogState", "LogStream", "Page",
    "QueueSettings", "QueueStats", "Release", "RetryAt", "SettingsField", "Settlement", "Woken", "failure_record",
    "gather_flags",
]  # fmt: skip
