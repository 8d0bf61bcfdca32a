"""Bulk writing: tasks stage jobs, publishing turns them into jobs of their queues. How, is said in `drivers.redis.publishing`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from taskharbor.bulk.chunks import chunked
from taskharbor.bulk.contract import StagingLost
from taskharbor.bulk.write_ids import series_of
from taskharbor.drivers.redis.bulk.held import HeldStore
from taskharbor.drivers.redis.bulk.staging import chunk_values
from taskharbor.drivers.redis.packing import Call, Word
from taskharbor.drivers.redis.publishing import BulkWrite, StagingIncomplete, finish_left_behind
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.redis.stored import STATES
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import SECOND, JobRecord, JobState, Micros

_NOT_FOUND = -1
_STAYS = 10


class RedisWriting(HeldStore):
    """The writing half. Every call may come from another process than the one before."""

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        jobs: dict[str, int] = {}
        """How many are staged so far, by queue."""
        asked: Future[bool] | None = None
        try:
            for chunk in chunked(batches):
                values = chunk_values(chunk)
                # The server puts down one chunk while the next is made.
                if asked is not None and not asked.result():
                    return self._dropped(write, task, jobs)
                asked = self._put(write, task, values, jobs)
            if asked is not None and not asked.result():
                return self._dropped(write, task, jobs)
        except StagingIncomplete:
            raise StagingLost(
                f"{self.options.place}: what the task {task} of {write} had staged is gone (the server was restarted without its "
                "data, or another took over): write it again"
            ) from None
        finally:
            if asked is not None:
                wait([asked])
        if not self.call(lambda store: _write(store, write).complete(task, jobs)):
            return self._dropped(write, task, jobs)
        return sum(jobs.values())

    def _put(
        self, write: str, task: str, values: dict[str, list[Word]], jobs: dict[str, int]
    ) -> Future[bool]:
        return self.begin(lambda store: _write(store, write).stage(task, values, jobs))

    def _dropped(self, write: str, task: str, queues: Iterable[str]) -> int:
        """The write was published without this task, or abandoned: it must leave nothing behind."""
        self.call(lambda store: _write(store, write).drop(task, queues))
        return 0

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros) -> int:
        async def publish(store: Store) -> int:
            await finish_left_behind(store, now)
            return await _write(store, write).publish(tasks, now)

        try:
            return self.call(publish)
        except StagingIncomplete as error:
            raise StagingLost(
                f"{self.options.place}: what the tasks {error} of {write} had staged is gone, or they never came to their end: "
                "nothing was published, write it again"
            ) from None

    def abandon(self, write: str) -> None:
        async def abandon(store: Store) -> None:
            seconds, micros = await store.connections.command("TIME")
            await _write(store, write).abandon(int(seconds) * SECOND + int(micros))

        self.call(abandon)

    def remove(self, job_ids: Sequence[str]) -> list[JobState | JobError]:
        return self.call(lambda store: _remove(store, job_ids))


def _write(store: Store, write: str) -> BulkWrite:
    return BulkWrite(store, write, *series_of(write))


async def _remove(store: Store, job_ids: Sequence[str]) -> list[JobState | JobError]:
    homes = await store.located(job_ids)
    groups: dict[str, list[str]] = {}
    for job_id in dict.fromkeys(job_ids):
        if job_id in homes:
            groups.setdefault(homes[job_id], []).append(job_id)
    seconds, micros = await store.connections.command("TIME")
    now = int(seconds) * SECOND + int(micros)
    calls: list[Call] = [store.call("bulk_remove", queue, now, *ids) for queue, ids in groups.items()]
    found: dict[str, int] = {}
    for ids, codes in zip(groups.values(), await store.connections.run(lambda _: calls), strict=True):
        found.update(zip(ids, codes, strict=True))
    return [_removed(job_id, found.get(job_id, _NOT_FOUND)) for job_id in job_ids]


def _removed(job_id: str, code: int) -> JobState | JobError:
    if code == _NOT_FOUND:
        return JobNotFound(job_id)
    if code >= _STAYS:
        return JobError(job_id, f"the job is {STATES[code - _STAYS]} and has not ended: cancel it first")
    return STATES[code]
