"""The reference model as a whole: the calls of operators, of readers and of bulk jobs, on the store of `store`.

A planted bug is a subclass that overrides one method.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Sequence
from typing import get_args

import msgspec

from taskharbor import errors
from taskharbor.bulk.stage import unpack
from taskharbor.drivers import contract
from taskharbor.drivers.contract import (
    AttemptPage,
    JobFilter,
    LogPage,
    Page,
    QueueSettings,
    QueueStats,
    SettingsField,
)
from taskharbor.errors import JobError
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros, Outcome
from taskharbor_testkit.model.records import matches, own_copy, read_cursor
from taskharbor_testkit.model.store import Store


class Model(Store):
    """A correct store, and the right answer to each call of the contract but `wait`."""

    # -- operating ----------------------------------------------------------------------------------------

    def cancel(
        self, job_ids: Sequence[str], *, now: Micros, only_waiting: bool = False
    ) -> list[JobState | JobError]:
        self.promote(now)
        return [self.cancel_one(job_id, now, only_waiting) for job_id in job_ids]

    def cancel_keys(
        self, keys: Sequence[str], *, queue: str, now: Micros, only_waiting: bool = False
    ) -> list[int]:
        self.promote(now)
        return [self.cancel_key(queue, key, now, only_waiting) for key in keys]

    def cancel_key(self, queue: str, key: str, now: Micros, only_waiting: bool) -> int:
        of_key = [
            job
            for job in self.jobs_of(key)
            if job.queue == queue
            and (job.state.is_waiting or (job.state is JobState.INFLIGHT and not only_waiting))
        ]
        for job in of_key:
            self.cancel_one(job.id, now, only_waiting)
        return len(of_key)

    def cancel_one(self, job_id: str, now: Micros, only_waiting: bool) -> JobState | JobError:
        job = self.jobs.get(job_id)
        if job is None:
            return errors.JobNotFound(job_id)
        if job.state.is_waiting:
            self.end(job, copy.copy(job), JobState.CANCELLED, Outcome.CANCELLED, now)
        elif job.state is JobState.INFLIGHT:
            job.cancel_requested |= not only_waiting
        elif job.state is not JobState.CANCELLED:
            return errors.JobFinished(job_id)
        return job.state

    def requeue(
        self,
        job_ids: Sequence[str],
        *,
        now: Micros,
        run_at_us: Micros | None = None,
        keep_counts: bool = False,
    ) -> list[JobState | JobError]:
        self.promote(now)
        run_at = now if run_at_us is None else run_at_us
        return [self.requeue_one(job_id, now, run_at, keep_counts) for job_id in job_ids]

    def requeue_one(self, job_id: str, now: Micros, run_at: Micros, keep_counts: bool) -> JobState | JobError:
        job = self.jobs.get(job_id)
        if job is None:
            return errors.JobNotFound(job_id)
        if job.state is not JobState.DEAD:
            return errors.JobNotDead(job_id)
        if self.of_key(job, lambda state: state.is_waiting) is not None:
            return errors.KeyConflict(job_id)
        job.run_at_us = run_at
        job.finished_at_us = None
        if not keep_counts:
            self.reset_counts(job)
        if self.is_blocked(job):
            job.state = JobState.BLOCKED
        else:
            self.line_up(job, now)
        self.append(job, job, Outcome.REQUEUED, now)
        return job.state

    def reset_counts(self, job: JobRecord) -> None:
        job.attempts = job.stalls = 0

    def purge(self, selection: JobFilter, *, limit: int = 1000) -> int:
        return self.forget(self.purgeable(selection)[:limit])

    def purgeable(self, selection: JobFilter) -> list[str]:
        return [job.id for job in self.jobs.values() if job.state.is_terminal and matches(job, selection)]

    def remove(self, job_ids: Sequence[str]) -> list[JobState | JobError]:
        answers = {job_id: self.removable(job_id) for job_id in job_ids}
        self.forget([job_id for job_id, answer in answers.items() if isinstance(answer, JobState)])
        return [answers[job_id] for job_id in job_ids]

    def removable(self, job_id: str) -> JobState | JobError:
        job = self.jobs.get(job_id)
        if job is None:
            return errors.JobNotFound(job_id)
        if not job.state.is_terminal:
            return JobError(job_id, f"the job is {job.state} and has not ended: cancel it first")
        return job.state

    def prune(self, *, now: Micros, limit: int = 1000) -> int:
        return self.forget(self.prunable(now)[:limit]) + self.forget_rows(self.prunable_rows(now)[:limit])

    def prunable(self, now: Micros) -> list[str]:
        return [job.id for job in self.jobs.values() if self.is_overdue(job, now)]

    def is_overdue(self, job: JobRecord, now: Micros) -> bool:
        settings = self.settings(job.queue)
        keep = settings.keep_dead_us if job.state is JobState.DEAD else settings.keep_done_us
        return job.finished_at_us is not None and keep is not None and job.finished_at_us + keep <= now

    def prunable_rows(self, now: Micros) -> list[int]:
        keep = {queue: self.settings(queue).keep_attempts_us for queue in {row.queue for row in self.log}}
        return [
            row.seq
            for row in self.log
            if (kept := keep[row.queue]) is not None and row.ended_at_us + kept <= now
        ]

    def forget(self, job_ids: Sequence[str]) -> int:
        """Remove jobs. The idempotency keys that led to them go, too."""
        for job_id in job_ids:
            self.keyed.get(self.jobs[job_id].key or "", set()).discard(job_id)
            del self.jobs[job_id], self.places[job_id]
        self.idempotency = {key: job_id for key, job_id in self.idempotency.items() if job_id in self.jobs}
        return len(job_ids)

    def forget_rows(self, seqs: Sequence[int]) -> int:
        gone = set(seqs)
        self.log = [row for row in self.log if row.seq not in gone]
        return len(seqs)

    def configure(
        self,
        queue: str,
        settings: QueueSettings,
        *,
        now: Micros,
        fields: Sequence[SettingsField] | None = None,
        declares: bool = False,
    ) -> None:
        kept = self.settings(queue)
        if declares and kept.declaration == settings.declaration:
            return
        names: Sequence[str] = get_args(SettingsField) if fields is None else fields
        changed = {name: getattr(settings, name) for name in names}
        if declares:
            changed["declaration"] = settings.declaration
        self.configured[queue] = msgspec.structs.replace(kept, **changed)
        self.wake(queue)

    # -- reading ------------------------------------------------------------------------------------------

    def get(self, job_ids: Sequence[str], *, now: Micros) -> list[JobRecord | None]:
        self.promote(now)
        return [own_copy(self.jobs[job_id]) if job_id in self.jobs else None for job_id in job_ids]

    def listing(self, selection: JobFilter, *, now: Micros) -> list[JobRecord]:
        self.promote(now)
        return [own_copy(job) for job in reversed(self.jobs.values()) if matches(job, selection)]

    def list_jobs(
        self, selection: JobFilter, *, now: Micros, limit: int = 100, cursor: str | None = None
    ) -> Page:
        before, last = read_cursor(cursor, self.next_place), read_cursor(selection.until, 0)
        listed = self.listing(selection, now=now)
        rest = [job for job in listed if last <= self.places[job.id] < before]
        return Page(rest[:limit], str(self.places[rest[limit - 1].id]) if len(rest) > limit else None)

    def stats(self, *, now: Micros, queue: str | None = None) -> list[QueueStats]:
        self.promote(now)
        names = sorted(self.queues | set(self.configured)) if queue is None else [queue]
        return [self.stats_of(name, now) for name in names]

    def stats_of(self, queue: str, now: Micros) -> QueueStats:
        runnable = self.runnable(queue, now)
        ended = [state for state in JobState if state.is_terminal]
        return QueueStats(
            queue=queue,
            counts=self.counts(queue),
            head_run_at_us=runnable[0].run_at_us if runnable else None,
            settings=self.settings(queue),
            **{f"{state}_total": self.totals.get((queue, state), 0) for state in ended},
        )

    def counts(self, queue: str) -> dict[JobState, int]:
        states = [job.state for job in self.jobs.values() if job.queue == queue]
        return {state: states.count(state) for state in JobState}

    def read_attempts(self, *, after: str | None = None, limit: int = 1000) -> AttemptPage:
        last = read_cursor(after, 0)
        first = bisect.bisect_right(self.log, last, key=lambda row: row.seq)
        rows = self.log[first : first + limit]
        return AttemptPage(rows, str(rows[-1].seq if rows else last))

    def job_attempts(self, job_id: str) -> list[Attempt]:
        return [row for row in self.log if row.job_id == job_id]

    # -- bulk: one stream of the log, one share of the jobs, portions that are published once -----------------

    def log_streams(self) -> contract.LogState:
        first = self.log[0].seq if self.log else self.next_seq
        last = self.next_seq - 1
        stream = contract.LogStream(name="", queue=None, last=last, trimmed=first - 1, is_dense=False)
        return contract.LogState(str(id(self)), [stream])

    def read_log(self, stream: str, after: int, until: int, limit: int) -> LogPage:
        rows = [row for row in self.log if after < row.seq <= until]
        page = rows[:limit]
        return LogPage(page, page[-1].seq if len(page) < len(rows) else until)

    def split_log(self, stream: str, after: int, until: int, rows: int) -> list[int]:
        return list(range(after + rows, until, rows))

    def split_jobs(self, queue: str | None, parts: int) -> list[contract.JobShare]:
        return [contract.JobShare(queue=queue)]

    def put_blob(self, blob: str, data: bytes, swaps: bool, expected: bytes | None) -> bool:
        is_expected = not swaps or self.blobs.get(blob) == expected
        if is_expected:
            self.blobs[blob] = data
        return is_expected

    def read_blobs(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.blobs.get(name) for name in names]

    def list_blobs(self, folder: str) -> list[str]:
        return sorted(name for name in self.blobs if name.startswith(f"{folder}/"))

    def drop_blobs(self, names: Sequence[str]) -> list[None]:
        for name in names:
            self.blobs.pop(name, None)
        return [None] * len(names)

    def check_room(self, queue: str, size: int) -> None:
        """A model has room for everything."""

    def publish_blobs(
        self, series: str, number: int, portion: int, names: Sequence[str], now: Micros
    ) -> dict[str, int]:
        jobs = [job for name in names if name in self.blobs for job in unpack(self.blobs[name])]
        last, added = self.published.get(series, ((number, 0), 0))
        added = added if last[0] == number else 0
        if last < (number, portion):
            added += sum(not answer.existed for answer in self.enqueue(jobs, now=now))
            self.published[series] = ((number, portion), added)
        return {"": added}
