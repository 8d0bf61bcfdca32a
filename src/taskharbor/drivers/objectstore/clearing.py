"""The state of a queue: how ended jobs and rows of the log are removed, from it and from its segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.memory.operating import matches
from taskharbor.drivers.memory.queues import Queue, Slot
from taskharbor.drivers.objectstore.entries import Mark, SegmentEntry, less_jobs
from taskharbor.drivers.objectstore.recalling import ARCHIVED_STATES, Brought, RecallingState, require
from taskharbor.drivers.objectstore.rows import StoredRow
from taskharbor.drivers.objectstore.segments import ArchivedJob, Block, Segment
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import JobRecord, JobState, Micros

T = TypeVar("T")


class Due(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    gone: Mark | None
    """Everything up to here is gone once these are."""
    oldest: Micros
    """The first end among what is left then; 0 where nothing is."""


def due_rows(entry: SegmentEntry, segment: Segment, ended_by: Micros, limit: int) -> Due[StoredRow]:
    def left(block: Block) -> Iterable[tuple[Mark, StoredRow]]:
        for row in segment.rows_in(block):
            if entry.has_row(row.ended_at, row.number):
                yield (row.ended_at, row.number), row

    return _due(segment.header.row_blocks, entry.rows_gone, left, ended_by, limit)


def due_jobs(entry: SegmentEntry, segment: Segment, finished_by: Micros, limit: int) -> Due[ArchivedJob]:
    def left(block: Block) -> Iterable[tuple[Mark, ArchivedJob]]:
        for number, record in segment.jobs_left(entry, [block]):
            yield (record.finished_at_us or 0, number), (number, record)

    return _due(segment.header.job_blocks, entry.jobs_gone, left, finished_by, limit)


def _due(
    blocks: Sequence[Block],
    gone: Mark | None,
    left_in: Callable[[Block], Iterable[tuple[Mark, T]]],
    by: Micros,
    limit: int,
) -> Due[T]:
    waiting = sorted((block for block in blocks if gone is None or block.newest >= gone[0]), key=_oldest)
    waiting.reverse()
    found: list[tuple[Mark, T]] = []
    while waiting and waiting[-1].oldest <= by:
        if len(found) > limit and found[limit][0][0] < waiting[-1].oldest:
            break
        found += left_in(waiting.pop())
        found.sort(key=_mark)
    items = [pair for pair in found if pair[0][0] <= by][:limit]
    rest = [pair[0][0] for pair in found[len(items) : len(items) + 1]]
    rest += [block.oldest for block in waiting[-1:]]
    return Due([item for _, item in items], items[-1][0] if items else gone, min(rest, default=0))


def _oldest(block: Block) -> Micros:
    return block.oldest


def _mark(pair: tuple[Mark, T]) -> Mark:
    return pair[0]


class ClearingState(RecallingState):
    """Retention, purges, and removal by id. A segment's entry notes what of it is gone."""

    def has_due(self, now: Micros) -> bool:
        """Whether retention would take anything."""
        queue = self.queue
        if queue is None:
            return False
        settings = queue.settings
        jobs_by = _due_before(now, settings.keep_done_us)
        dead_by = _due_before(now, settings.keep_dead_us)
        rows_by = _due_before(now, settings.keep_attempts_us)
        heads = [
            (queue.done.head(), jobs_by),
            (queue.cancelled.head(), jobs_by),
            (queue.dead.head(), dead_by),
        ]
        return (
            any(item is not None and by is not None and item[0] <= by for item, by in heads)
            or (jobs_by is not None and any(one.jobs and one.oldest_job <= jobs_by for one in self.segments))
            or (rows_by is not None and any(one.rows and one.oldest_row <= rows_by for one in self.segments))
            or (rows_by is not None and any(row.ended_at <= rows_by for row in self.tail.rows))
        )

    def prune_all(
        self, now: Micros, jobs_limit: int, rows_limit: int, wall_clock: Micros, brought: Brought
    ) -> tuple[int, int]:
        """Apply retention to at most so many jobs and rows; how many of each went."""
        queue = self.queue
        if queue is None:
            return 0, 0
        settings = queue.settings
        kept_jobs, kept_rows, entries = jobs_limit, rows_limit, list(self.segments)
        forgotten: list[JobRecord] = []
        trimmed: list[int] = []
        for at, entry in enumerate(entries):
            jobs_by = _due_before(now, settings.keep_done_us)
            if jobs_limit > 0 and entry.jobs and jobs_by is not None and entry.oldest_job <= jobs_by:
                require([entry], brought)
                jobs = due_jobs(entry, brought[entry.name], jobs_by, jobs_limit)
                states = [record.state for _, record in jobs.items]
                entry = entries[at] = less_jobs(entry, states, gone=jobs.gone, oldest=jobs.oldest)
                forgotten += [record for _, record in jobs.items]
                jobs_limit -= len(jobs.items)
            rows_by = _due_before(now, settings.keep_attempts_us)
            if rows_limit > 0 and entry.rows and rows_by is not None and entry.oldest_row <= rows_by:
                require([entry], brought)
                rows = due_rows(entry, brought[entry.name], rows_by, rows_limit)
                entries[at] = msgspec.structs.replace(
                    entry, rows=entry.rows - len(rows.items), rows_gone=rows.gone, oldest_row=rows.oldest
                )
                trimmed += [row.number for row in rows.items]
                rows_limit -= len(rows.items)
        # From here on nothing more is needed, so things may change.
        self._replace_segments(entries, wall_clock)
        self.tail.note_trimmed(trimmed)
        for record in forgotten:
            self._forget_archived(queue, record)
        for line, keep in (
            (queue.done, settings.keep_done_us),
            (queue.cancelled, settings.keep_done_us),
            (queue.dead, settings.keep_dead_us),
        ):
            if keep is not None:
                jobs_limit -= self._prune_jobs(line, now - keep, jobs_limit)
        if settings.keep_attempts_us is not None:
            rows_limit -= self.tail.prune(queue.log, now - settings.keep_attempts_us, rows_limit)
        return kept_jobs - jobs_limit, kept_rows - rows_limit

    def purge_all(self, selection: JobFilter, limit: int, wall_clock: Micros, brought: Brought) -> int:
        queue = self.queue
        if queue is None or limit < 1:
            return 0
        slots = self._to_purge(selection, limit)
        left = limit - len(slots)
        entries = list(self.segments)
        forgotten: list[JobRecord] = []
        may_be_archived = selection.states is None or bool(selection.states & ARCHIVED_STATES)
        for at, entry in enumerate(entries):
            if left and entry.jobs and may_be_archived:
                require([entry], brought)
                jobs = brought[entry.name].jobs_left(entry)
                wanted = list(islice((job for job in jobs if matches(job[1], selection, None)), left))
                if wanted:
                    entries[at] = less_jobs(
                        entry,
                        [record.state for _, record in wanted],
                        purged=tuple(number for number, _ in wanted),
                    )
                    forgotten += [record for _, record in wanted]
                    left -= len(wanted)
        self._replace_segments(entries, wall_clock)
        for record in forgotten:
            self._forget_archived(queue, record)
        for slot in slots:
            self._forget(slot)
        return limit - left

    def remove_ended(
        self, job_ids: Sequence[str], wall_clock: Micros, brought: Brought
    ) -> list[JobState | JobError]:
        """Remove jobs that have ended: the state each was in, or why it stays."""
        self.recall(job_ids, brought)
        answers: dict[str, JobState | JobError] = {}
        archived: dict[int, list[Slot]] = {}
        for job_id in dict.fromkeys(job_ids):
            slot = self._find(job_id)
            if slot is None:
                answers[job_id] = JobNotFound(job_id)
            elif not slot.record.state.is_terminal:
                answers[job_id] = JobError(
                    job_id, f"the job is {slot.record.state} and has not ended: cancel it first"
                )
            else:
                answers[job_id] = slot.record.state
                if job_id in self.jobs:
                    self._forget(slot)
                else:
                    self._forget_archived(slot.queue, slot.record)
                    at = _index_of(self.segments, slot.record, slot.seq, brought)
                    archived.setdefault(at, []).append(slot)
        entries = list(self.segments)
        for at, slots in archived.items():
            states = [slot.record.state for slot in slots]
            entries[at] = less_jobs(entries[at], states, purged=tuple(slot.seq for slot in slots))
        self._replace_segments(entries, wall_clock)
        return [answers[job_id] for job_id in job_ids]

    def _replace_segments(self, entries: list[SegmentEntry], wall_clock: Micros) -> None:
        """What is empty by now is retired."""
        if entries != self.segments:
            gone = [(entry.name, wall_clock) for entry in entries if entry.is_empty]
            self.retired = [*self.retired, *gone]
            self.segments = [entry for entry in entries if not entry.is_empty]
            self.touched = True

    def _forget_archived(self, queue: Queue, record: JobRecord) -> None:
        queue.gone[record.state] += 1
        for idempotency_key in queue.led_here.pop(record.id, ()):
            del queue.accepted[idempotency_key]


def _index_of(entries: Sequence[SegmentEntry], record: JobRecord, number: int, brought: Brought) -> int:
    """Which segment has the job that was recalled."""
    for at, entry in enumerate(entries):
        if entry.may_hold_job(record.id):
            found = brought[entry.name].job(entry, record.id)
            if found is not None and found[0] == number:
                return at
    raise AssertionError(f"job {record.id} was recalled from nowhere")


def _due_before(now: Micros, keep: Micros | None) -> Micros | None:
    return None if keep is None else now - keep
