"""Handles on enqueued jobs: their state, their progress, their result, and what an operator does to them."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from taskharbor.codec import Codec, NotKept, decode_result
from taskharbor.errors import CodecError, JobFailed, PayloadInvalid, ResultNotKept
from taskharbor.jobs import Attempt, JobRecord, JobState

if TYPE_CHECKING:
    from taskharbor.client import AsyncClient, Client
    from taskharbor.harbor import Harbor

R = TypeVar("R")


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

    def wait(self, timeout: float | None = None) -> JobRecord:
        """Wait until the job has ended, and return it.

        Raises:
            WaitTimeout: The job has not ended after `timeout` seconds.
            RuntimeError: An event loop runs in this thread, and the call would stop it. Await `wait_async`.
        """
        refuse_in_loop("handle.wait()", "await handle.wait_async()")
        return self._clients.client.wait_for(self.id, timeout=timeout)

    async def wait_async(self, timeout: float | None = None) -> JobRecord:
        """The async form of `wait`."""
        return await self._clients.async_client().wait_for(self.id, timeout=timeout)

    def result(self, timeout: float | None = None) -> R:
        """Wait until the job has ended, and return the handler's result.

        Raises:
            JobFailed: The job is dead or cancelled.
            CodecError: The result does not fit the annotation of the function.
            ResultNotKept: The job is done, and its result was too large or could not be encoded.
            WaitTimeout: The job has not ended after `timeout` seconds.
            RuntimeError: An event loop runs in this thread, and the call would stop it. Await `result_async`.
        """
        refuse_in_loop("handle.result()", "await handle.result_async()")
        return self._decode(self._clients.client.wait_for(self.id, timeout=timeout))

    async def result_async(self, timeout: float | None = None) -> R:
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
    try:
        result = decode_result(codec, data, type)
    except PayloadInvalid as misfit:
        raise CodecError(
            f"job {record.id} ({record.type}) is done, and its result does not fit the annotation {type!r} of the function: "
            f"{misfit.__cause__}"
        ) from misfit
    if isinstance(result, NotKept):
        done = f"job {record.id} ({record.type}) is done"
        raise ResultNotKept(f"{done}, and its result was not kept: {result.reason}")
    return result


def refuse_in_loop(call: str, instead: str) -> None:
    """Refuse a call that would stop the event loop of this thread: the job may need that loop to end."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(f"{call} would block the event loop that runs in this thread: use {instead}")


def _decoded_progress(record: JobRecord) -> Any:
    return None if record.progress is None else msgspec.json.decode(record.progress)
