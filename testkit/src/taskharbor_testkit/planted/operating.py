"""Bugs in what an operator does."""

from __future__ import annotations

import sys

import msgspec

from taskharbor.drivers.contract import JobFilter, Page
from taskharbor.drivers.memory import MemoryStore
from taskharbor.drivers.memory.lines import PlaceLine
from taskharbor.drivers.memory.queues import INFLIGHT, Queue, Slot
from taskharbor.errors import JobError, JobFinished
from taskharbor.jobs import JobRecord, JobState, Micros
from taskharbor_testkit.planted.registry import planted


@planted
class RequeueKeepsCounters(MemoryStore):
    """A requeued job starts with attempts and stalls at zero."""

    def _start_over(self, record: JobRecord, now: Micros) -> None:
        attempts, stalls = record.attempts, record.stalls
        super()._start_over(record, now)
        record.attempts, record.stalls = attempts, stalls


@planted
class CancelOfInflightForgotten(MemoryStore):
    """A cancel of an inflight job is flagged on it."""

    def _cancel(self, job_id: str, now: Micros) -> JobState | JobError:
        answer = super()._cancel(job_id, now)
        if answer is INFLIGHT:
            self.jobs[job_id].record.cancel_requested = False
        return answer


@planted
class CancelOfEndedSucceeds(MemoryStore):
    """A cancel of a done or dead job is JobFinished."""

    def _cancel(self, job_id: str, now: Micros) -> JobState | JobError:
        answer = super()._cancel(job_id, now)
        return self.jobs[job_id].record.state if isinstance(answer, JobFinished) else answer


@planted
class CountersDrift(MemoryStore):
    """The counts of a queue are those of its jobs."""

    def _cancel_waiting(self, slot: Slot, now: Micros) -> None:
        super()._cancel_waiting(slot, now)
        slot.queue.scheduled.stale -= 1


@planted
class PurgeRemovesWaiting(MemoryStore):
    """A purge removes terminal jobs only."""

    def _purgeable(self, queue: Queue) -> list[PlaceLine]:
        return [*super()._purgeable(queue), queue.scheduled, *queue.ready.values()]

    def _forget(self, slot: Slot) -> None:
        if slot.record.key is not None and slot.record.state.is_waiting:
            del slot.queue.waiting[slot.record.key]
        super()._forget(slot)


@planted
class PurgeIgnoresFilter(MemoryStore):
    """A purge removes what matches the filter, nothing else."""

    def purge(self, selection: JobFilter, limit: int) -> int:
        return super().purge(JobFilter(queue=selection.queue), limit)


@planted
class PruneIgnoresRetention(MemoryStore):
    """Retention keeps a terminal job as long as its queue says."""

    def _prune_jobs(self, line: PlaceLine, finished_by: Micros, limit: int) -> int:
        return super()._prune_jobs(line, sys.maxsize, limit)


@planted
class PruneIgnoresLimit(MemoryStore):
    """A prune removes at most `limit` jobs."""

    def _prune_jobs(self, line: PlaceLine, finished_by: Micros, limit: int) -> int:
        return super()._prune_jobs(line, finished_by, sys.maxsize)


@planted
class ListingSkipsAJob(MemoryStore):
    """Two pages of a listing leave no gap between them."""

    def list_jobs(self, selection: JobFilter, now: Micros, limit: int, cursor: str | None) -> Page:
        page = super().list_jobs(selection, now, limit, cursor)
        if page.cursor is None:
            return page
        return msgspec.structs.replace(page, cursor=str(int(page.cursor) - 1))
