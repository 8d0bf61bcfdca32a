"""Clients for producers and operators, and the handles on jobs that they return.

`AsyncClient` does the work. `Client` is the same for synchronous code. Both use one driver and one clock, and know nothing of
handlers.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

import msgspec

from taskharbor.clock import BackendClock, Clock
from taskharbor.codec import Codec, CodecRegistry, NotKept, decode_result
from taskharbor.drivers.contract import (
    AttemptPage,
    Driver,
    Enqueued,
    JobFilter,
    JoinedAsyncTransaction,
    JoinedTransaction,
    Page,
    QueueSettings,
    QueueStats,
)
from taskharbor.drivers.operations import Enqueue
from taskharbor.drivers.registry import connect
from taskharbor.errors import (
    CodecError,
    InvalidRequest,
    JobError,
    JobFailed,
    JobNotFound,
    PayloadInvalid,
    ResultNotKept,
    WaitTimeout,
)
from taskharbor.jobs import Attempt, JobRecord, JobRequest, JobState, Micros
from taskharbor.queue_settings import QueueOptions, changing, check_known, declare
from taskharbor.requests import Defaults, RecordBuilder, as_instant, as_seconds
from taskharbor.transactions import AsyncClientWithin, AsyncTransaction, ClientWithin, SyncTransaction

if TYPE_CHECKING:
    from taskharbor.harbor import Harbor
    from taskharbor.schedules import AsyncSchedules, Schedules

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

CHUNK = 1000
"""Records per transaction of a bulk enqueue."""

_POLL_FIRST = 0.005
_POLL_LAST = 0.25
_LAST_PATIENCE = 2.0


class JobHandle(Generic[R]):
    """A handle on an enqueued job. Every method has a synchronous form and a form that ends in `_async`."""

    __slots__ = ("_clients", "_result_type", "existed", "id")

    def __init__(
        self, maker: Harbor | Client | AsyncClient, job_id: str, existed: bool = False, result_type: Any = Any
    ) -> None:
        self._clients = maker
        self.id = job_id
        self.existed = existed
        """True if the enqueue found a job that was there already (same key or idempotency key)."""
        self._result_type = result_type

    def record(self) -> JobRecord:
        """The job as it is stored now, or the job that it was merged into.

        Raises:
            JobNotFound: Retention has removed the job.
        """
        return self._clients.client.resolve(self.id)

    async def record_async(self) -> JobRecord:
        """The async form of `record`."""
        return await self._clients.async_client().resolve(self.id)

    def state(self) -> JobState:
        """The state of the job."""
        return self.record().state

    async def state_async(self) -> JobState:
        """The async form of `state`."""
        return (await self.record_async()).state

    def progress(self) -> Any:
        """The last progress that the handler reported, or None."""
        return _decoded_progress(self.record())

    async def progress_async(self) -> Any:
        """The async form of `progress`."""
        return _decoded_progress(await self.record_async())

    def attempts(self) -> list[Attempt]:
        """The executions of the job so far, oldest first, from the log of attempts."""
        return self._clients.client.job_attempts(self.id)

    async def attempts_async(self) -> list[Attempt]:
        """The async form of `attempts`."""
        return await self._clients.async_client().job_attempts(self.id)

    def wait(self, timeout: timedelta | float | None = None) -> JobRecord:
        """Wait until the job has ended, and return it.

        Raises:
            WaitTimeout: The job has not ended after `timeout`, seconds or a timedelta.
            RuntimeError: An event loop runs in this thread, and the call would stop it. Await `wait_async`.
        """
        refuse_in_loop("handle.wait()", "await handle.wait_async()")
        return self._clients.client.wait_for(self.id, timeout=timeout)

    async def wait_async(self, timeout: timedelta | float | None = None) -> JobRecord:
        """The async form of `wait`."""
        return await self._clients.async_client().wait_for(self.id, timeout=timeout)

    def result(self, timeout: timedelta | float | None = None) -> R:
        """Wait until the job has ended, and return the handler's result.

        Raises:
            JobFailed: The job is dead or cancelled.
            CodecError: The result does not fit the annotation of the function.
            ResultNotKept: The job is done, and its result was too large or could not be encoded.
            WaitTimeout: The job has not ended after `timeout`, seconds or a timedelta.
            RuntimeError: An event loop runs in this thread, and the call would stop it. Await `result_async`.
        """
        refuse_in_loop("handle.result()", "await handle.result_async()")
        return self._decode(self._clients.client.wait_for(self.id, timeout=timeout))

    async def result_async(self, timeout: timedelta | float | None = None) -> R:
        """The async form of `result`."""
        return self._decode(await self.wait_async(timeout))

    def cancel(self, *, only_waiting: bool = False) -> JobState:
        """Cancel the job. One that waits is cancelled at once; one that is inflight is asked to stop, unless `only_waiting`.

        Returns:
            The job's state after the call.

        Raises:
            JobFinished: The job has ended already.
        """
        return self._clients.client.cancel(self.id, only_waiting=only_waiting)

    async def cancel_async(self, *, only_waiting: bool = False) -> JobState:
        """The async form of `cancel`."""
        return await self._clients.async_client().cancel(self.id, only_waiting=only_waiting)

    def requeue(self, *, run_at: datetime | None = None, keep_counts: bool = False) -> JobState:
        """Run the dead job again, now or at `run_at`, with fresh counts unless `keep_counts`.

        Returns:
            The job's state after the call.

        Raises:
            JobNotDead: The job is not dead.
            KeyConflict: Another job of its key waits.
        """
        return self._clients.client.requeue(self.id, run_at=run_at, keep_counts=keep_counts)

    async def requeue_async(self, *, run_at: datetime | None = None, keep_counts: bool = False) -> JobState:
        """The async form of `requeue`."""
        client = self._clients.async_client()
        return await client.requeue(self.id, run_at=run_at, keep_counts=keep_counts)

    def _decode(self, record: JobRecord) -> R:
        if record.state is not JobState.DONE:
            raise JobFailed(record)
        codec = self._clients.codecs.get(record.codec)
        result: R = kept_result(codec, record, record.result, self._result_type)
        return result

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}>"


def kept_result(codec: Codec, record: JobRecord, data: bytes | None, type: Any) -> Any:
    """Decode the result of a job that is done. Raises ResultNotKept if it was not stored."""
    result_of = f"job {record.id} ({record.type}) is done, and its result"
    try:
        result = decode_result(codec, data, type)
    except PayloadInvalid as misfit:
        annotation = f"the annotation {type!r} of the function"
        raise CodecError(f"{result_of} does not fit {annotation}: {misfit.__cause__}") from misfit
    if isinstance(result, NotKept):
        raise ResultNotKept(f"{result_of} was not kept: {result.reason}")
    return result


def refuse_in_loop(call: str, instead: str) -> None:
    """Refuse a call that would stop the event loop of this thread: the job may need that loop to end."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(f"{call} would block the event loop that runs in this thread: use {instead}")


def _decoded_progress(record: JobRecord) -> Any:
    return None if record.progress is None else msgspec.json.decode(record.progress)


class AsyncClient:
    """Enqueues, inspects and operates jobs from async code. It opens on first use. Close it, or use `async with`."""

    def __init__(
        self,
        driver: Driver | str,
        *,
        defaults: Defaults | None = None,
        codecs: CodecRegistry | None = None,
        clock: Clock | None = None,
        queues: Collection[str] = (),
    ) -> None:
        """`queues`: those that an operator may change before the store has seen them."""
        self._queues = queues
        self.driver = connect(driver) if isinstance(driver, str) else driver
        self.builder = RecordBuilder(defaults, codecs)
        self._clock = clock
        self._backend_clock: BackendClock | None = None
        self._opening: asyncio.Task[None] | None = None
        self._ending: AsyncIterator[None] | None = None

    async def open(self) -> Self:
        """Open the store. Any other call does so too.

        Raises:
            BackendUnavailable: The backend does not answer.
            SchemaMismatch: The store was made by a release that this one cannot work with.
        """
        await self._ready()
        return self

    async def close(self) -> None:
        """Close the connections. The client opens them again when it is used again."""
        opening, self._opening = self._opening, None
        if opening is not None:
            # A failed opening raises in the call that began it, not here.
            await asyncio.wait([opening])
            await self.driver.close()

    def close_with_loop(self) -> None:
        """Close the connections when the running event loop ends, as `asyncio.run` ends it."""

        async def until_the_end() -> AsyncIterator[None]:
            try:
                yield
            finally:
                await self.close()

        # A loop closes the async generators that began on it, before it closes itself.
        self._ending = until_the_end()
        with suppress(StopIteration):
            self._ending.__anext__().send(None)  # type: ignore[attr-defined]

    def leave_to_parent(self, kept: list[object]) -> None:
        """In a forked child: begin again with a new handle on the store. `kept` gets what belongs to the parent."""
        kept += [self.driver, self._opening, self._ending, self._backend_clock]
        self.driver, self._backend_clock = self.driver.clone(), None
        self._opening = self._ending = None

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _ready(self) -> None:
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            self._opening = opening = asyncio.ensure_future(self.driver.open())
        if not opening.done():
            await asyncio.shield(opening)

    async def now(self) -> Micros:
        """The time that this client gives to every operation: the backend's, unless a clock was given."""
        await self._ready()
        if self._clock is not None:
            return self._clock.now()
        if self._backend_clock is None:
            self._backend_clock = BackendClock(self.driver.time)
        await self._backend_clock.refresh()
        return self._backend_clock.now()

    # -- producing ----------------------------------------------------------------------------------------

    @property
    def codecs(self) -> CodecRegistry:
        """The codecs of this client."""
        return self.builder.codecs

    @property
    def client(self) -> Client:
        """Not there: a handle that this client made has the async forms only."""
        raise RuntimeError("this handle comes from an AsyncClient: use the form that ends in _async")

    def async_client(self) -> Self:
        """Return this client."""
        return self

    async def enqueue(self, request: JobRequest) -> JobHandle[Any]:
        """Enqueue one job.

        Args:
            request: Type, payload and options of the job.

        Returns:
            A handle on the job.

        Raises:
            InvalidRequest: A value is out of bounds. Nothing is stored.
            BackendUnavailable: The backend does not answer. The job may be stored.
        """
        (accepted,) = await self.enqueue_batch([request])
        return JobHandle(self, accepted.id, accepted.existed)

    async def enqueue_batch(self, requests: Sequence[JobRequest]) -> list[Enqueued]:
        """Enqueue jobs in one transaction, all or none.

        Returns:
            Per request, the id and whether a job with this id or key was there already.

        Raises:
            InvalidRequest: A value is out of bounds. Nothing is stored.
            BackendUnavailable: The backend does not answer. The jobs may be stored.
        """
        now = await self.now()
        return await self._send(self.builder.build(requests, now), now, max(1, len(requests)))

    async def enqueue_many(self, requests: Iterable[JobRequest], *, chunk: int = CHUNK) -> list[Enqueued]:
        """Enqueue any number of jobs, in transactions of `chunk`. All are checked before the first is sent."""
        now = await self.now()
        return await self._send(self.builder.build(list(requests), now), now, chunk)

    async def enqueue_like(
        self, request: JobRequest, payloads: Sequence[bytes], *, chunk: int = CHUNK
    ) -> list[Enqueued]:
        """Enqueue one job per payload. All other fields are the request's. This is the quickest way to enqueue many jobs of one
        kind.

        Args:
            request: Type and options of the jobs. Its own payload is ignored.
            payloads: Payloads that are encoded already, with the request's codec.
            chunk: The number of jobs per transaction.
        """
        now = await self.now()
        return await self._send(self.builder.build_like(request, payloads, now), now, chunk)

    async def _send(self, records: list[JobRecord], now: Micros, chunk: int) -> list[Enqueued]:
        """Send records in transactions of `chunk`. Every enqueue goes through here."""
        accepted: list[Enqueued] = []
        for batch in [records] if 0 < len(records) <= chunk else chunks(records, chunk):
            # `builder` has checked the records.
            accepted += await self.driver.run(Enqueue(batch, now, new_ids=True))
        return accepted

    async def enqueue_stream(
        self, requests: Iterable[JobRequest], *, chunk: int = CHUNK
    ) -> AsyncIterator[list[Enqueued]]:
        """Enqueue jobs from an input of any length. Each chunk is checked, sent and answered before the next is read."""
        for batch in chunks(requests, chunk):
            yield await self.enqueue_batch(batch)

    def within(self, transaction: AsyncTransaction) -> AsyncClientWithin:
        """Enqueue as part of a transaction of yours: `await client.within(connection).enqueue(request)`."""
        joined = self.driver.within(transaction)
        if not isinstance(joined, JoinedAsyncTransaction):
            raise InvalidRequest(
                "the transaction is synchronous and would block the event loop: use Client, or an asynchronous connection"
            )
        return AsyncClientWithin(joined, self.builder, self.now)

    @property
    def schedules(self) -> AsyncSchedules:
        """The schedules of the store: put, list, pause, trigger and delete them."""
        from taskharbor.schedules.client import AsyncSchedules

        return AsyncSchedules(self)

    # -- looking ------------------------------------------------------------------------------------------

    async def get(self, job_id: str) -> JobRecord:
        """Return a job.

        Raises:
            JobNotFound: No job has this id, or retention has removed it.
        """
        (record,) = await self.driver.get([job_id], now=await self.now())
        if record is None:
            raise JobNotFound(job_id)
        return record

    async def get_many(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """Return jobs in the order of their ids, with None for each that is not found."""
        return await self.driver.get(job_ids, now=await self.now())

    async def list_jobs(
        self, selection: JobFilter | None = None, *, limit: int = 100, cursor: str | None = None
    ) -> Page:
        """List jobs, newest accepted first.

        Args:
            selection: States, queue, type or key to list. None lists all jobs.
            limit: The size of the page.
            cursor: The cursor of the page before.

        Returns:
            A page of jobs, and the cursor of the next page or None.
        """
        wanted = selection or JobFilter()
        return await self.driver.list_jobs(wanted, now=await self.now(), limit=limit, cursor=cursor)

    async def stats(self, queue: str | None = None) -> list[QueueStats]:
        """Return the counters of one queue, or of all queues."""
        return await self.driver.stats(now=await self.now(), queue=queue)

    async def job_attempts(self, job_id: str) -> list[Attempt]:
        """Return the rows of the attempt log about one job, oldest first."""
        await self._ready()
        return await self.driver.job_attempts(job_id)

    async def read_attempts(self, *, after: str | None = None, limit: int = 1000) -> AttemptPage:
        """Read the attempt log.

        Args:
            after: The cursor of the page before. None begins with the oldest row.
            limit: The size of the page.

        Returns:
            A page of rows, and the cursor to go on from.
        """
        await self._ready()
        return await self.driver.read_attempts(after=after, limit=limit)

    async def resolve(self, job_id: str) -> JobRecord:
        """Return the job, or the job that it was merged into.

        Raises:
            JobNotFound: No job has this id, or retention has removed it.
        """
        record = await self.get(job_id)
        while record.merged_into is not None:
            record = await self.get(record.merged_into)
        return record

    async def wait_for(self, job_id: str, *, timeout: timedelta | float | None = None) -> JobRecord:
        """Wait until the job has ended, and return it, or the job that it was merged into.

        Raises:
            JobNotFound: No job has this id, or retention has removed it.
            WaitTimeout: The job has not ended after `timeout`, seconds or a timedelta.
        """
        loop = asyncio.get_running_loop()
        seconds = None if timeout is None else as_seconds("timeout", timeout)
        give_up = None if seconds is None else loop.time() + seconds
        pause = _POLL_FIRST
        while not (record := await self.resolve(job_id)).state.is_terminal:
            if give_up is not None:
                left = give_up - loop.time()
                if left <= 0:
                    raise WaitTimeout(f"job {job_id} is still {record.state} after {seconds:g} s")
                pause = min(pause, left)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _POLL_LAST)
        return record

    # -- operating ----------------------------------------------------------------------------------------

    async def cancel(self, job_id: str, *, only_waiting: bool = False) -> JobState:
        """Cancel a job. One that waits is cancelled at once; one that is inflight is asked to stop.

        Args:
            job_id: The id of the job.
            only_waiting: Leave a job that is inflight as it is.

        Returns:
            The job's state after the call.

        Raises:
            JobNotFound: No job has this id.
            JobFinished: The job has ended already.
        """
        return _raise_if_error((await self.cancel_many([job_id], only_waiting=only_waiting))[0])

    async def cancel_many(
        self, job_ids: Sequence[str], *, only_waiting: bool = False
    ) -> list[JobState | JobError]:
        """Cancel jobs. Returns the state or the error of each, in order."""
        return await self.driver.cancel(job_ids, now=await self.now(), only_waiting=only_waiting)

    async def cancel_key(self, queue: str, key: str, *, only_waiting: bool = False) -> int:
        """Cancel the jobs of a key: the one that waits, and the one that is inflight unless `only_waiting`.

        Returns:
            The number of jobs that were cancelled or asked to stop: 0, 1 or 2.
        """
        return (await self.cancel_keys(queue, [key], only_waiting=only_waiting))[0]

    async def cancel_keys(self, queue: str, keys: Sequence[str], *, only_waiting: bool = False) -> list[int]:
        """Cancel the jobs of keys. Returns the number of jobs for each key, in order."""
        now = await self.now()
        return await self.driver.cancel_keys(keys, queue=queue, now=now, only_waiting=only_waiting)

    async def requeue(
        self, job_id: str, *, run_at: datetime | None = None, keep_counts: bool = False
    ) -> JobState:
        """Run a dead job again.

        Args:
            job_id: The id of the job.
            run_at: The time to run it, an aware datetime. None: now.
            keep_counts: Keep its counts of attempts and stalls. Otherwise they begin at zero.

        Returns:
            The job's state after the call.

        Raises:
            JobNotFound: No job has this id.
            JobNotDead: The job is not dead.
            KeyConflict: Another job of its key waits.
        """
        answers = await self.requeue_many([job_id], run_at=run_at, keep_counts=keep_counts)
        return _raise_if_error(answers[0])

    async def requeue_many(
        self, job_ids: Sequence[str], *, run_at: datetime | None = None, keep_counts: bool = False
    ) -> list[JobState | JobError]:
        """Requeue dead jobs. Returns the state or the error of each, in order."""
        at = None if run_at is None else as_instant("run_at", run_at)
        return await self.driver.requeue(job_ids, now=await self.now(), run_at_us=at, keep_counts=keep_counts)

    async def purge(self, selection: JobFilter, *, limit: int = 1000) -> int:
        """Remove ended jobs.

        Args:
            selection: Which ended jobs to remove.
            limit: The most jobs to remove in this call.

        Returns:
            The number of removed jobs. Call again until it is 0.
        """
        await self._ready()
        return await self.driver.purge(selection, limit=limit)

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings of a queue."""
        await self._ready()
        return await self.driver.settings(queue)

    async def configure(self, queue: str, *, create: bool = False, **settings: Unpack[QueueOptions]) -> None:
        """Change settings of a queue: `client.configure("api", max_inflight=2, keep_done=timedelta(days=1))`.

        A setting that is not given stays as it is.

        Args:
            queue: The name of the queue.
            create: Make a queue that the store has never seen.
            settings: `paused`, `max_inflight` (jobs at once over all workers), `failure_queue` (gets a job for each one that dies
                here), and the time to keep what has ended, as a `timedelta` or in seconds: `keep_done` (also for cancelled jobs),
                `keep_dead`, `keep_attempts`. None: no limit, no failure queue, kept for ever.

        Raises:
            QueueNotFound: The store has never seen the queue, and no app declares it.
            InvalidRequest: A value is out of bounds. Nothing changes.
        """
        call = changing(queue, settings, await self.now())
        if not create and queue not in self._queues:
            await check_known(self.driver, queue, call.now)
        await self.driver.run(call)

    async def pause(self, queue: str, *, create: bool = False) -> None:
        """Pause a queue: no more of its jobs start. Enqueueing goes on. Raises QueueNotFound as `configure` does."""
        await self.configure(queue, create=create, paused=True)

    async def resume(self, queue: str, *, create: bool = False) -> None:
        """Undo a pause."""
        await self.configure(queue, create=create, paused=False)

    async def declare(self, queue: str, **settings: Unpack[QueueOptions]) -> None:
        """Apply settings that code declares: those that differ from what was declared last. So it does not undo what an operator
        has changed since. A setting that is no longer declared stays as it is."""
        await declare(self.driver, queue, settings, await self.now())


class Portal:
    """The background event loop of the process. All synchronous clients share it, so a call needs no new loop and no new
    connection."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="taskharbor-portal", daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the work, and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work on the portal's loop and wait for its result."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a synchronous call from inside the portal's own loop would wait for itself")
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # After Ctrl-C in the caller the work does not go on.
            raise


_portal: Portal | None = None
_lock = threading.Lock()
_on_portal: weakref.WeakSet[AsyncClient] = weakref.WeakSet()
_left_to_parent: list[object] = []
"""Handles that a forked child inherited. Their sockets are the parent's too: it must neither use nor close nor collect them."""


def _begin_anew() -> None:
    """Give each client of a forked child a connection of its own. The thread of the portal does not survive a fork."""
    global _lock, _portal
    _left_to_parent.append(_portal)
    _lock, _portal = threading.Lock(), None
    for client in list(_on_portal):
        client.leave_to_parent(_left_to_parent)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@atexit.register
def _close_at_exit() -> None:
    """Close what a short program left open. Connections of some backends complain at the end otherwise."""
    if _portal is None:
        return

    async def close() -> None:
        await asyncio.gather(*(client.close() for client in list(_on_portal)), return_exceptions=True)

    with suppress(Exception):  # The program is over, whatever the backend says.
        _portal.begin(close()).result(_LAST_PATIENCE)


def _close_dropped(client: AsyncClient) -> None:
    """Close a client that nobody has any more, without waiting: this may run in any thread."""
    if _portal is not None:
        _portal.begin(client.close())


def portal() -> Portal:
    """Return the portal of this process."""
    global _portal
    with _lock:
        if _portal is None:
            _portal = Portal()
        return _portal


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Make the synchronous form of a method."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return portal().call(method(self._inner, *args, **kwargs))

    return call


class Client:
    """`AsyncClient` for synchronous code. Every call runs on the background event loop of the process."""

    def __init__(
        self,
        driver: Driver | str,
        *,
        defaults: Defaults | None = None,
        codecs: CodecRegistry | None = None,
        clock: Clock | None = None,
        queues: Collection[str] = (),
    ) -> None:
        self._inner = AsyncClient(driver, defaults=defaults, codecs=codecs, clock=clock, queues=queues)
        _on_portal.add(self._inner)
        weakref.finalize(self, _close_dropped, self._inner).atexit = False

    @property
    def driver(self) -> Driver:
        """The driver that this client uses."""
        return self._inner.driver

    @property
    def codecs(self) -> CodecRegistry:
        """The codecs of this client."""
        return self._inner.codecs

    @property
    def client(self) -> Self:
        """This client."""
        return self

    @property
    def schedules(self) -> Schedules:
        """The schedules of the store: put, list, pause, trigger and delete them."""
        from taskharbor.schedules.client import Schedules

        return Schedules(self)

    def async_client(self) -> AsyncClient:
        """Not there: a handle that this client made has the synchronous forms only."""
        raise RuntimeError("this handle comes from a Client: use the form without _async, or an AsyncClient")

    def open(self) -> Self:
        """Open the store. Any other call does so too."""
        portal().call(self._inner.open())
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    close = blocking(AsyncClient.close)
    now = blocking(AsyncClient.now)
    enqueue_batch = blocking(AsyncClient.enqueue_batch)
    enqueue_like = blocking(AsyncClient.enqueue_like)
    get = blocking(AsyncClient.get)
    get_many = blocking(AsyncClient.get_many)
    list_jobs = blocking(AsyncClient.list_jobs)
    stats = blocking(AsyncClient.stats)
    job_attempts = blocking(AsyncClient.job_attempts)
    read_attempts = blocking(AsyncClient.read_attempts)
    resolve = blocking(AsyncClient.resolve)
    cancel = blocking(AsyncClient.cancel)
    cancel_many = blocking(AsyncClient.cancel_many)
    cancel_key = blocking(AsyncClient.cancel_key)
    cancel_keys = blocking(AsyncClient.cancel_keys)
    requeue = blocking(AsyncClient.requeue)
    requeue_many = blocking(AsyncClient.requeue_many)
    purge = blocking(AsyncClient.purge)
    settings = blocking(AsyncClient.settings)
    configure = blocking(AsyncClient.configure)
    pause = blocking(AsyncClient.pause)
    resume = blocking(AsyncClient.resume)
    declare = blocking(AsyncClient.declare)

    def enqueue(self, request: JobRequest) -> JobHandle[Any]:
        """Enqueue one job. Returns a handle on it."""
        (accepted,) = self.enqueue_batch([request])
        return JobHandle(self, accepted.id, accepted.existed)

    def wait_for(self, job_id: str, *, timeout: timedelta | float | None = None) -> JobRecord:
        """Wait until the job has ended, and return it, or the job that it was merged into.

        Raises:
            JobNotFound: No job has this id, or retention has removed it.
            WaitTimeout: The job has not ended after `timeout`, seconds or a timedelta.
            RuntimeError: An event loop runs in this thread, and the call would stop it.
        """
        refuse_in_loop("client.wait_for()", "await AsyncClient.wait_for()")
        return portal().call(self._inner.wait_for(job_id, timeout=timeout))

    def enqueue_many(self, requests: Iterable[JobRequest], *, chunk: int = CHUNK) -> list[Enqueued]:
        """Enqueue any number of jobs, in transactions of `chunk`. All are checked before the first is sent."""
        # The iterable runs in the caller's thread: it may block, and the portal's loop may not.
        return portal().call(self._inner.enqueue_many(list(requests), chunk=chunk))

    def enqueue_stream(
        self, requests: Iterable[JobRequest], *, chunk: int = CHUNK
    ) -> Iterator[list[Enqueued]]:
        """Enqueue jobs from an input of any length. Each chunk is checked, sent and answered before the next is read."""
        for batch in chunks(requests, chunk):
            yield portal().call(self._inner.enqueue_batch(batch))

    def within(self, transaction: SyncTransaction) -> ClientWithin:
        """Enqueue as part of a transaction of yours: `client.within(connection).enqueue(request)`."""
        joined = self.driver.within(transaction)
        if not isinstance(joined, JoinedTransaction):
            raise InvalidRequest(
                "the transaction is asynchronous, the client is not: use AsyncClient, and await the enqueue"
            )
        return ClientWithin(joined, self._inner.builder, self.now)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    if size < 1:
        raise InvalidRequest(f"chunk {size!r}: at least 1")
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


def _raise_if_error(answer: JobState | JobError) -> JobState:
    if isinstance(answer, JobError):
        raise answer
    return answer
