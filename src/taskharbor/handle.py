"""A handle on one accepted job: ask for its state, wait for its end, read its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from taskharbor.errors import JobFailed
from taskharbor.jobs import JobRecord, JobState

if TYPE_CHECKING:
    from taskharbor.harbor import Harbor

R = TypeVar("R")


class JobHandle(Generic[R]):
    """What enqueue returns. Every question has a synchronous form and one ending in `_async`."""

    __slots__ = ("_harbor", "_result_type", "existed", "id")

    def __init__(self, harbor: Harbor, job_id: str, existed: bool = False, result_type: Any = Any) -> None:
        self._harbor = harbor
        self.id = job_id
        self.existed = existed
        """True where the enqueue met a job that was already there (same key or idempotency key)."""
        self._result_type = result_type

    def record(self) -> JobRecord:
        return self._harbor.client.resolve(self.id)

    async def record_async(self) -> JobRecord:
        return await self._harbor.async_client().resolve(self.id)

    def state(self) -> JobState:
        return self.record().state

    async def state_async(self) -> JobState:
        return (await self.record_async()).state

    def progress(self) -> Any:
        return _decoded_progress(self.record())

    async def progress_async(self) -> Any:
        return _decoded_progress(await self.record_async())

    def wait(self, timeout: float | None = None) -> JobRecord:
        """The job once it has ended; WaitTimeout if that takes longer than `timeout` seconds."""
        return self._harbor.client.wait_for(self.id, timeout=timeout)

    async def wait_async(self, timeout: float | None = None) -> JobRecord:
        return await self._harbor.async_client().wait_for(self.id, timeout=timeout)

    def result(self, timeout: float | None = None) -> R:
        """What the handler returned, once it has; JobFailed if the job ended otherwise."""
        return self._decode(self.wait(timeout))

    async def result_async(self, timeout: float | None = None) -> R:
        return self._decode(await self.wait_async(timeout))

    def cancel(self) -> JobState:
        return self._harbor.client.cancel(self.id)

    async def cancel_async(self) -> JobState:
        return await self._harbor.async_client().cancel(self.id)

    def _decode(self, record: JobRecord) -> R:
        if record.state is not JobState.DONE:
            reason = (record.last_error or "no reason recorded").splitlines()[0]
            raise JobFailed(f"job {record.id} ended {record.state}: {reason}")
        if record.result is None:
            return None  # type: ignore[return-value]
        codec = self._harbor.codecs.get(record.codec)
        result: R = codec.decode(record.result, self._result_type)
        return result

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}>"


def _decoded_progress(record: JobRecord) -> Any:
    return None if record.progress is None else msgspec.json.decode(record.progress)
