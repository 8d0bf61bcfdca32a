"""The state of a queue, together with what is in its segments.

A step on a state never waits. Where it needs segments that nobody has read yet, it raises `SegmentsNeeded` before it changes
anything; the driver reads them and runs the step again. A segment never changes, so what was read once stays right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush, merge
from itertools import islice
from typing import Any

import msgspec

from taskharbor.drivers.contract import Enqueued, JobFilter, QueueStats
from taskharbor.drivers.memory.copies import as_read
from taskharbor.drivers.memory.operating import matches
from taskharbor.drivers.memory.queues import CANCELLED, DONE, Queue
from taskharbor.drivers.objectstore.entries import SegmentEntry, less_jobs
from taskharbor.drivers.objectstore.retention import due_jobs, due_rows
from taskharbor.drivers.objectstore.rows import StoredRow
from taskharbor.drivers.objectstore.segments import ArchivedJob, Segment
from taskharbor.drivers.objectstore.state import KeptSlot, LiveState
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import JobRecord, JobState, Micros

Brought = Mapping[str, Segment]
"""Segments by name: what the driver has read for a call."""

ARCHIVED_STATES = frozenset({DONE, CANCELLED})


class SegmentsNeeded(Exception):
    """The step cannot go on without these."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.names = names


class QueueState(LiveState):
    """A queue, or a shard of one, as the driver asks for it."""

    # -- by id --------------------------------------------------------------------------------------------

    def recall(self, job_ids: Iterable[str], brought: Brought) -> None:
        """Have those of the jobs at hand that are in segments. `recalled.clear()` when the call is over."""
        in_state = self.jobs
        if not self.segments:
            return
        unknown = [job_id for job_id in job_ids if job_id not in in_state]
        if not unknown:
            return
        # Most ids that are asked for are newer than all that has ended.
        least, greatest = min(unknown), max(unknown)
        wanted = [
            (entry, job_id)
            for entry in self.segments
            if least <= entry.last_job_id and entry.first_job_id <= greatest
            for job_id in unknown
            if entry.may_hold_job(job_id)
        ]
        _require([entry for entry, _ in wanted], brought)
        queue = self._queue(self.name)
        for entry, job_id in wanted:
            found = brought[entry.name].job(entry, job_id)
            if found is not None:
                self.recalled[job_id] = KeptSlot.stored(*found, queue)

    def enqueue_known(
        self, records: Sequence[JobRecord], stamps: Sequence[int], now: Micros, brought: Brought
    ) -> list[Enqueued]:
        """Those whose ids are known, here or in a segment, change nothing. A repeated try may come after its job has ended."""
        self.recall((record.id for record in records), brought)
        return self.enqueue_stamped(records, stamps, now)

    def knows(self, job_ids: Iterable[str], brought: Brought) -> list[str]:
        """Those of the ids that this queue has."""
        wanted = list(job_ids)
        self.recall(wanted, brought)
        known = [job_id for job_id in wanted if job_id in self.jobs or job_id in self.recalled]
        self.recalled.clear()
        return known

    # -- looking ------------------------------------------------------------------------------------------

    def listed(
        self, selection: JobFilter, now: Micros, limit: int, before: int | None, brought: Brought
    ) -> list[ArchivedJob]:
        """Up to `limit` jobs that match, with their numbers, newest accepted first."""
        here = (
            (slot.seq, slot.record)
            for slot in self.order.before(before)
            if matches(slot.record, selection, now)
        )
        if selection.states is None or selection.states & ARCHIVED_STATES:
            archived = self._archived_before(before, limit, brought)
            there = ((number, job) for number, job in archived if matches(job, selection, now))
            found: Iterator[ArchivedJob] = merge(here, there, key=_number, reverse=True)
        else:
            found = here
        return [(number, as_read(record, now)) for number, record in islice(found, limit)]

    def _archived_before(self, before: int | None, limit: int, brought: Brought) -> Iterator[ArchivedJob]:
        """Newest accepted first. A segment is needed, and a block unpacked, once the walk has come to its newest job."""
        # (what comes first, how deep it lies, tie-break, the thing): segments hold blocks, blocks hold jobs.
        heap: list[tuple[int, int, int, Any]] = []
        for at, entry in enumerate(self.segments):
            if entry.jobs and (before is None or entry.first_job < before):
                heappush(heap, (-entry.last_job, 0, at, entry))
        while heap:
            _, depth, at, thing = heappop(heap)
            if depth == 2:
                yield thing
                continue
            entry = self.segments[at]
            if entry.name not in brought:
                _require(_enough(entry, heap, limit), brought)
            segment = brought[entry.name]
            if depth == 0:
                for block in segment.header.job_blocks:
                    if before is None or block.first < before:
                        heappush(heap, (-block.last, 1, at, _Opaque(block)))
            else:
                for job in segment.jobs_left(entry, [thing.value]):
                    if before is None or job[0] < before:
                        heappush(heap, (-job[0], 2, at, job))

    def stats_at(self, now: Micros) -> QueueStats | None:
        """None: nobody ever used the queue."""
        queue = self.queue
        if queue is None:
            return None
        stats = self._stats(queue, now)
        self._wake()
        done = sum(entry.done for entry in self.segments)
        cancelled = sum(entry.cancelled for entry in self.segments)
        counts = stats.counts
        counts[DONE] += done
        counts[CANCELLED] += cancelled
        return msgspec.structs.replace(
            stats, done_total=stats.done_total + done, cancelled_total=stats.cancelled_total + cancelled
        )

    # -- the log ------------------------------------------------------------------------------------------

    def rows_after(self, number: int, limit: int, brought: Brought) -> list[StoredRow]:
        entries: list[SegmentEntry] = []
        for entry in self.segments:
            if entry.rows and entry.last_row > number:
                entries.append(entry)
                # The first one may have been read in part; all others count in full.
                if sum(one.rows for one in entries[1:]) >= limit:
                    break
        _require(entries, brought)
        found: list[StoredRow] = []
        for entry in entries:
            if len(found) < limit:
                found += brought[entry.name].rows_after(entry, number, limit - len(found))
        if len(found) < limit:
            found += self.tail.after(number)[: limit - len(found)]
        return found

    def rows_of(self, job_id: str, brought: Brought) -> list[StoredRow]:
        entries = [entry for entry in self.segments if entry.may_hold_rows_of(job_id)]
        _require(entries, brought)
        archived = [row for entry in entries for row in brought[entry.name].rows_of(entry, job_id)]
        return archived + [row for row in self.tail.rows if row.job_id == job_id]

    # -- cleaning up --------------------------------------------------------------------------------------

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
                _require([entry], brought)
                jobs = due_jobs(entry, brought[entry.name], jobs_by, jobs_limit)
                states = [record.state for _, record in jobs.items]
                entry = entries[at] = less_jobs(entry, states, gone=jobs.gone, oldest=jobs.oldest)
                forgotten += [record for _, record in jobs.items]
                jobs_limit -= len(jobs.items)
            rows_by = _due_before(now, settings.keep_attempts_us)
            if rows_limit > 0 and entry.rows and rows_by is not None and entry.oldest_row <= rows_by:
                _require([entry], brought)
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
                _require([entry], brought)
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
        entries = list(self.segments)
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
                    at = _index_of(entries, slot.record, slot.seq, brought)
                    entries[at] = less_jobs(entries[at], [slot.record.state], purged=(slot.seq,))
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

    # -- folding ------------------------------------------------------------------------------------------

    @property
    def ended_count(self) -> int:
        """Jobs that could go to a segment. Dead ones stay: they may be requeued."""
        queue = self.queue
        return 0 if queue is None else queue.done.live + queue.cancelled.live

    @property
    def ended_bytes(self) -> int:
        queue = self.queue
        lines = () if queue is None else (queue.done, queue.cancelled)
        return sum(len(item[-1].piece()) for line in lines for item in line)

    def ended_slots(self) -> list[KeptSlot]:
        """In the order of their numbers."""
        queue = self.queue
        if queue is None:
            return []
        slots: list[KeptSlot] = [item[-1] for line in (queue.done, queue.cancelled) for item in line]
        return sorted(slots, key=_seq)

    def fold_in(self, entry: SegmentEntry, rows: list[int], jobs: list[int]) -> bool:
        """A segment takes the place of the rows and jobs with these numbers; False where they are not all here any more."""
        queue, slots = self.queue, self.accepted_order.slots
        here = [slots.get(number) for number in jobs]
        is_same_tail = [row.number for row in self.tail.rows[: len(rows)]] == rows
        if queue is None or not is_same_tail or None in here:
            return False
        for slot in here:
            assert slot is not None
            queue.archive(slot)
            del self.jobs[slot.record.id]
            self.order.remove(slot.seq)
        self.tail.remove_first(len(rows))
        self.segments = [*self.segments, entry]
        self.touched = True
        return True

    def merge_in(self, entry: SegmentEntry, parts: list[SegmentEntry], wall_clock: Micros) -> bool:
        """A segment takes the place of others; False where those are not all here as they were."""
        segments = self.segments
        if parts[0] not in segments:
            return False
        at = segments.index(parts[0])
        if segments[at : at + len(parts)] != parts:
            return False
        self.segments = [*segments[:at], entry, *segments[at + len(parts) :]]
        self.retired = [*self.retired, *((part.name, wall_clock) for part in parts)]
        self.touched = True
        return True

    def leave_unmerged(self, entry: SegmentEntry) -> bool:
        """It is as large as a segment may be."""
        self.segments = [
            msgspec.structs.replace(one, level=one.level + 1) if one == entry else one
            for one in self.segments
        ]
        self.touched = True
        return True

    def forget_retired(self, names: Sequence[str]) -> None:
        self.retired = [(name, at) for name, at in self.retired if name not in names]
        self.touched = True

    def known_segments(self) -> list[str]:
        return [entry.name for entry in self.segments] + [name for name, _ in self.retired]


def _index_of(entries: Sequence[SegmentEntry], record: JobRecord, number: int, brought: Brought) -> int:
    """Which segment has the job that was recalled."""
    for at, entry in enumerate(entries):
        if entry.may_hold_job(record.id):
            found = brought[entry.name].job(entry, record.id)
            if found is not None and found[0] == number:
                return at
    raise AssertionError(f"job {record.id} was recalled from nowhere")


class _Opaque:
    """Something on a heap that must never be compared."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: object) -> bool:
        return False


def _require(entries: Iterable[SegmentEntry], brought: Brought) -> None:
    missing = {entry.name: None for entry in entries if entry.name not in brought}
    if missing:
        raise SegmentsNeeded(list(missing))


def _enough(first: SegmentEntry, heap: list[tuple[int, int, int, Any]], limit: int) -> Iterator[SegmentEntry]:
    """The segment that is needed now, and those that a page will need next if all that is in them matches."""
    yield first
    jobs = first.jobs
    for _, depth, _, thing in sorted(heap, key=lambda item: item[:3]):
        if depth == 0 and jobs < limit:
            jobs += thing.jobs
            yield thing


def _due_before(now: Micros, keep: Micros | None) -> Micros | None:
    return None if keep is None else now - keep


def _number(job: ArchivedJob) -> int:
    return job[0]


def _seq(slot: KeptSlot) -> int:
    return slot.seq
