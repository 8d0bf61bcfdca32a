"""Bugs in operators' calls: cancel, requeue, listing, counting, retention."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from taskharbor.drivers.contract import JobFilter, Page
from taskharbor.errors import JobError, JobFinished
from taskharbor.jobs import LATEST, JobRecord, JobState, Micros
from taskharbor_testkit.model.records import matches
from taskharbor_testkit.planted.registry import Bug


class RequeueKeepsCounters(Bug):
    """A requeued job starts with attempts and stalls at zero."""

    def reset_counts(self, job: JobRecord) -> None:
        pass


class CancelOfInflightForgotten(Bug):
    """A cancel of an inflight job is flagged on it."""

    def cancel_one(self, job_id: str, now: Micros) -> JobState | JobError:
        answer = super().cancel_one(job_id, now)
        if answer is JobState.INFLIGHT:
            self.jobs[job_id].cancel_requested = False
        return answer


class CancelOfEndedSucceeds(Bug):
    """A cancel of a done or dead job is JobFinished."""

    def cancel_one(self, job_id: str, now: Micros) -> JobState | JobError:
        answer = super().cancel_one(job_id, now)
        return self.jobs[job_id].state if isinstance(answer, JobFinished) else answer


class CountersDrift(Bug):
    """The counts of a queue are those of its jobs."""

    drift: Mapping[str, int] = {}

    def cancel_one(self, job_id: str, now: Micros) -> JobState | JobError:
        job = self.jobs.get(job_id)
        if job is not None and job.state.is_waiting:
            self.drift = {**self.drift, job.queue: self.drift.get(job.queue, 0) + 1}
        return super().cancel_one(job_id, now)

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
