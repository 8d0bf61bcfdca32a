"""Bugs in operators' calls: cancel, requeue, listing, counting, retention."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from taskharbor.drivers.contract import JobFilter, Page, QueueSettings
from taskharbor.drivers.operations import Configure, Operation, Settings
from taskharbor.errors import JobError, JobFinished
from taskharbor.jobs import LATEST, JobRecord, JobState, Micros
from taskharbor_testkit.model.records import matches
from taskharbor_testkit.planted.registry import Bug, HandleBug

A = TypeVar("A")


class RequeueKeepsCounters(Bug):
    """A requeued job starts with attempts and stalls at zero."""

    def reset_counts(self, job: JobRecord) -> None:
        pass


class CancelOfInflightForgotten(Bug):
    """A cancel of an inflight job is flagged on it."""

    def cancel_one(self, job_id: str, now: Micros, only_waiting: bool) -> JobState | JobError:
        answer = super().cancel_one(job_id, now, only_waiting)
        if answer is JobState.INFLIGHT:
            self.jobs[job_id].cancel_requested = False
        return answer


class CancelOfEndedSucceeds(Bug):
    """A cancel of a done or dead job is JobFinished."""

    def cancel_one(self, job_id: str, now: Micros, only_waiting: bool) -> JobState | JobError:
        answer = super().cancel_one(job_id, now, only_waiting)
        return self.jobs[job_id].state if isinstance(answer, JobFinished) else answer


class CancelOfWaitingMarksInflight(Bug):
    """A cancel of only what waits leaves an inflight job as it is."""

    def cancel(
        self, job_ids: Sequence[str], *, now: Micros, only_waiting: bool = False
    ) -> list[JobState | JobError]:
        return super().cancel(job_ids, now=now)


class CancelOfKeyMarksInflight(Bug):
    """A cancel by key of only what waits leaves an inflight job as it is."""

    def cancel_key(self, queue: str, key: str, now: Micros, only_waiting: bool) -> int:
        return super().cancel_key(queue, key, now, False)


class CancelOfKeySparesInflight(Bug):
    """A cancel by key marks the inflight job too."""

    def cancel_key(self, queue: str, key: str, now: Micros, only_waiting: bool) -> int:
        return super().cancel_key(queue, key, now, True)


class CancelOfKeyInAllQueues(Bug):
    """A cancel by key concerns one queue."""

    def cancel_key(self, queue: str, key: str, now: Micros, only_waiting: bool) -> int:
        return sum(
            super(CancelOfKeyInAllQueues, self).cancel_key(one, key, now, only_waiting) for one in self.queues
        )


class CancelOfKeyTwiceCountsTwice(Bug):
    """A key that is named twice in a call is cancelled once."""

    def cancel_keys(
        self, keys: Sequence[str], *, queue: str, now: Micros, only_waiting: bool = False
    ) -> list[int]:
        distinct = list(dict.fromkeys(keys))
        counts = super().cancel_keys(distinct, queue=queue, now=now, only_waiting=only_waiting)
        return [dict(zip(distinct, counts, strict=True))[key] for key in keys]


class RequeueForgetsItsTime(Bug):
    """A job is requeued at the time that the call names."""

    def requeue_one(self, job_id: str, now: Micros, run_at: Micros, keep_counts: bool) -> JobState | JobError:
        return super().requeue_one(job_id, now, now, keep_counts)


class BlockedRequeueForgetsItsTime(Bug):
    """A job that is requeued as blocked waits for its time after that."""

    def requeue_one(self, job_id: str, now: Micros, run_at: Micros, keep_counts: bool) -> JobState | JobError:
        answer = super().requeue_one(job_id, now, run_at, keep_counts)
        if answer is JobState.BLOCKED:
            self.jobs[job_id].run_at_us = now
        return answer


class RequeueAlwaysResetsCounts(Bug):
    """A job is requeued with its counts where the call says so."""

    def requeue_one(self, job_id: str, now: Micros, run_at: Micros, keep_counts: bool) -> JobState | JobError:
        return super().requeue_one(job_id, now, run_at, False)


class SettingsReplacedAsAWhole(Bug):
    """A setting that a call does not name keeps its value."""

    def configure(self, queue: str, settings: QueueSettings, **how: Any) -> None:
        super().configure(queue, settings, **how | {"fields": None})


class SettingsReadThenWritten(HandleBug):
    """Two settings that change at the same time both hold."""

    async def run(self, call: Operation[A]) -> A:
        if isinstance(call, Configure) and call.fields is not None and not call.declares:
            kept = await super().run(Settings(call.queue))
            await asyncio.sleep(0)
            changed = {name: getattr(call.settings, name) for name in call.fields}
            call.settings, call.fields = replace(kept, **changed), None
        return await super().run(call)


class DeclarationAppliedAgain(Bug):
    """A declaration that was applied does not undo an operator's change."""

    def configure(self, queue: str, settings: QueueSettings, **how: Any) -> None:
        if how.get("declares"):
            self.configured[queue] = replace(self.settings(queue), declaration=None)
        super().configure(queue, settings, **how)


class OperatorReplacesDeclaration(Bug):
    """An operator's change of all settings leaves the declaration."""

    def configure(self, queue: str, settings: QueueSettings, **how: Any) -> None:
        super().configure(queue, settings, **how)
        if not how.get("declares") and how.get("fields") is None:
            self.configured[queue] = replace(self.configured[queue], declaration=settings.declaration)


class DeclarationWithoutFieldsForgotten(Bug):
    """A declaration that names no field is noted."""

    def configure(self, queue: str, settings: QueueSettings, **how: Any) -> None:
        if how.get("fields") != []:
            super().configure(queue, settings, **how)


class CountersDrift(Bug):
    """The counts of a queue are those of its jobs."""

    drift: Mapping[str, int] = {}

    def cancel_one(self, job_id: str, now: Micros, only_waiting: bool) -> JobState | JobError:
        job = self.jobs.get(job_id)
        if job is not None and job.state.is_waiting:
            self.drift = {**self.drift, job.queue: self.drift.get(job.queue, 0) + 1}
        return super().cancel_one(job_id, now, only_waiting)

    def counts(self, queue: str) -> dict[JobState, int]:
        counts = super().counts(queue)
        counts[JobState.SCHEDULED] += self.drift.get(queue, 0)
        return counts


class PurgeRemovesWaiting(Bug):
    """A purge removes terminal jobs only."""

    def purgeable(self, selection: JobFilter) -> list[str]:
        kept = (JobState.INFLIGHT, JobState.BLOCKED)
        return [job.id for job in self.jobs.values() if job.state not in kept and matches(job, selection)]


class PurgeIgnoresFilter(Bug):
    """A purge removes what matches the filter, nothing else."""

    def purgeable(self, selection: JobFilter) -> list[str]:
        return super().purgeable(JobFilter(queue=selection.queue))


class LimitOfZeroIsNone(Bug):
    """A limit of 0 is a limit."""

    def purge(self, selection: JobFilter, *, limit: int = 1000) -> int:
        return super().purge(selection, limit=limit or sys.maxsize)


class PublishedAgain(Bug):
    """A portion that was published adds nothing, also after its jobs are gone."""

    def publish_blobs(
        self, series: str, number: int, portion: int, names: Sequence[str], now: Micros
    ) -> dict[str, int]:
        self.published.clear()
        return super().publish_blobs(series, number, portion, names, now)


class PruneIgnoresRetention(Bug):
    """Retention keeps a terminal job as long as its queue says."""

    def is_overdue(self, job: JobRecord, now: Micros) -> bool:
        return super().is_overdue(job, LATEST)


class PruneIgnoresLimit(Bug):
    """A prune removes at most `limit` jobs."""

    def prune(self, *, now: Micros, limit: int = 1000) -> int:
        return super().prune(now=now, limit=sys.maxsize)


class ListingSkipsAJob(Bug):
    """Two pages of a listing leave no gap between them."""

    def list_jobs(
        self, selection: JobFilter, *, now: Micros, limit: int = 100, cursor: str | None = None
    ) -> Page:
        page = super().list_jobs(selection, now=now, limit=limit, cursor=cursor)
        return page if page.cursor is None else Page(page.jobs, str(int(page.cursor) - 1))
