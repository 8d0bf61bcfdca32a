"""Bulk writing: tasks stage jobs, publishing turns them into jobs of their queues. How, is said in `publishing`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from taskharbor.bulk import background
from taskharbor.drivers.objectstore.bulk.held import HeldStore
from taskharbor.drivers.objectstore.bulk.publishing import Publisher
from taskharbor.drivers.objectstore.bulk.removing import remove
from taskharbor.drivers.objectstore.bulk.staging import TaskStaging, loads
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import JobError
from taskharbor.jobs import JobRecord, JobState, Micros


class ObjectStoreWriting(HeldStore):
    """The writing half. Every call may come from another process than the one before."""

    def stage(self, write: str, task: str, batches: Iterable[Sequence[JobRecord]]) -> int:
        staging = TaskStaging(self._opened().blobs, write, task)
        asked: Future[None] | None = None
        try:
            for load in loads(batches):
                # One goes out while the next is made.
                if asked is not None:
                    asked.result()
                asked = background.begin(staging.put(load))
            if asked is not None:
                asked.result()
        finally:
            if asked is not None:
                wait([asked])
        jobs = background.wait_for(staging.complete())
        if self.change(lambda store: _is_over(store, write)):
            # It was published without this task, or given up: the task must leave nothing behind.
            background.wait_for(staging.drop())
            return 0
        return jobs

    def publish(self, write: str, tasks: Sequence[str], *, now: Micros) -> int:
        return self.change(lambda store: _publish(store, write, tasks, now))

    def abandon(self, write: str) -> None:
        self.change(lambda store: _abandon(store, write))

    def remove(self, job_ids: Sequence[str]) -> list[JobState | JobError]:
        return self.change(lambda store: remove(store, job_ids))


async def _is_over(store: OpenStore, write: str) -> bool:
    publisher = Publisher(store)
    try:
        return await publisher.is_over(write)
    finally:
        await publisher.close()


async def _publish(store: OpenStore, write: str, tasks: Sequence[str], now: Micros) -> int:
    publisher = Publisher(store)
    try:
        return await publisher.publish(write, tasks, now)
    finally:
        await publisher.close()


async def _abandon(store: OpenStore, write: str) -> None:
    publisher = Publisher(store)
    try:
        await publisher.abandon(write)
    finally:
        await publisher.close()
