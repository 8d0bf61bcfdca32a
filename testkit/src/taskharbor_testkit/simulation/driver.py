"""A process's driver: the contract's calls, sent over the simulated network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from taskharbor.drivers.contract import (
    AttemptPage,
    Driver,
    Enqueued,
    Extension,
    JobFilter,
    Page,
    QueueSettings,
    QueueStats,
    Settlement,
)
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.errors import BackendUnavailable, JobError
from taskharbor.jobs import Attempt, JobRecord, JobState, Lease, Micros
from taskharbor_testkit.simulation.network import Network
from taskharbor_testkit.simulation.process import Process


class SimulatedDriver(Driver):
    def __init__(self, network: Network, process: Process, waiting: MemoryDriver) -> None:
        self._network = network
        self._process = process
        self._waiting = waiting

    async def _call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        return await self._network.call(self._process, op, args, kwargs)

    @classmethod
    def from_url(cls, url: str) -> Self:
        raise NotImplementedError("a simulated driver has no URL")

    def clone(self) -> Self:
        return type(self)(self._network, self._process, self._waiting.clone())

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def time(self) -> Micros:
        now: Micros = await self._call("time")
        return now

    async def enqueue(
        self, records: Sequence[JobRecord], *, now: Micros, new_ids: bool = False
    ) -> list[Enqueued]:
        answers: list[Enqueued] = await self._call("enqueue", records, now=now, new_ids=new_ids)
        return answers

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
        leased: list[JobRecord] = await self._call(
            "reserve", queue, limit=limit, lease_for=lease_for, now=now, worker=worker, types=types
        )
        return leased

    async def extend_lease(
        self, extensions: Sequence[Extension], *, lease_for: Micros, now: Micros
    ) -> list[Lease | JobError]:
        answers: list[Lease | JobError] = await self._call(
            "extend_lease", extensions, lease_for=lease_for, now=now
        )
        return answers

    async def settle(self, settlements: Sequence[Settlement], *, now: Micros) -> list[JobError | None]:
        answers: list[JobError | None] = await self._call("settle", settlements, now=now)
        return answers

    async def reclaim(self, *, now: Micros, queue: str | None = None, limit: int = 1000) -> int:
        ended: int = await self._call("reclaim", now=now, queue=queue, limit=limit)
        return ended

    async def cancel(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        answers: list[JobState | JobError] = await self._call("cancel", job_ids, now=now)
        return answers

    async def requeue(self, job_ids: Sequence[str], *, now: Micros) -> list[JobState | JobError]:
        answers: list[JobState | JobError] = await self._call("requeue", job_ids, now=now)
        return answers

    async def purge(self, selection: JobFilter, *, limit: int = 1000) -> int:
        gone: int = await self._call("purge", selection, limit=limit)
        return gone

    async def prune(self, *, now: Micros, limit: int = 1000) -> int:
        gone: int = await self._call("prune", now=now, limit=limit)
        return gone

    async def get(self, job_ids: Sequence[str], *, now: Micros) -> list[JobRecord | None]:
        records: list[JobRecord | None] = await self._call("get", job_ids, now=now)
        return records

    async def list_jobs(
        self, selection: JobFilter, *, now: Micros, limit: int = 100, cursor: str | None = None
    ) -> Page:
        page: Page = await self._call("list_jobs", selection, now=now, limit=limit, cursor=cursor)
        return page

    async def stats(self, *, now: Micros, queue: str | None = None) -> list[QueueStats]:
        stats: list[QueueStats] = await self._call("stats", now=now, queue=queue)
        return stats

    async def configure(self, queue: str, settings: QueueSettings, *, now: Micros) -> None:
        await self._call("configure", queue, settings, now=now)

    async def settings(self, queue: str) -> QueueSettings:
        settings: QueueSettings = await self._call("settings", queue)
        return settings

    async def read_attempts(self, *, after: str | None = None, limit: int = 1000) -> AttemptPage:
        page: AttemptPage = await self._call("read_attempts", after=after, limit=limit)
        return page

    async def job_attempts(self, job_id: str) -> list[Attempt]:
        rows: list[Attempt] = await self._call("job_attempts", job_id)
        return rows

    async def wait(self, queues: Sequence[str], *, now: Micros, timeout: float) -> bool:
        if self._network.weather.is_out:
            raise BackendUnavailable("wait: no answer")
        return await self._waiting.wait(queues, now=now, timeout=timeout)
