"""The state of a queue, together with what is in its segments: jobs by id, listings, the log.

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
from taskharbor.drivers.memory.queues import CANCELLED, DONE
from taskharbor.drivers.objectstore.entries import SegmentEntry
from taskharbor.drivers.objectstore.kept import KeptSlot
from taskharbor.drivers.objectstore.rows import StoredRow
from taskharbor.drivers.objectstore.segments import ArchivedJob, Segment
from taskharbor.drivers.objectstore.state import LiveState
from taskharbor.jobs import JobRecord, Micros

Brought = Mapping[str, Segment]
"""Segments by name: what the driver has read for a call."""

ARCHIVED_STATES = frozenset({DONE, CANCELLED})
"""Dead jobs stay in the state: they may be requeued."""


class SegmentsNeeded(Exception):
    """The step cannot go on without these."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.names = names


def require(entries: Iterable[SegmentEntry], brought: Brought) -> None:
    missing = {entry.name: None for entry in entries if entry.name not in brought}
    if missing:
        raise SegmentsNeeded(list(missing))


class RecallingState(LiveState):
    """Finds what is archived."""

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
        require([entry for entry, _ in wanted], brought)
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
                require(_enough(entry, heap, limit), brought)
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
        require(entries, brought)
        found: list[StoredRow] = []
        for entry in entries:
            if len(found) < limit:
                found += brought[entry.name].rows_after(entry, number, limit - len(found))
        if len(found) < limit:
            found += self.tail.after(number)[: limit - len(found)]
        return found

    def rows_of(self, job_id: str, brought: Brought) -> list[StoredRow]:
        entries = [entry for entry in self.segments if entry.may_hold_rows_of(job_id)]
        require(entries, brought)
        archived = [row for entry in entries for row in brought[entry.name].rows_of(entry, job_id)]
        return archived + [row for row in self.tail.rows if row.job_id == job_id]


class _Opaque:
    """Something on a heap that must never be compared."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: object) -> bool:
        return False


def _enough(first: SegmentEntry, heap: list[tuple[int, int, int, Any]], limit: int) -> Iterator[SegmentEntry]:
    """The segment that is needed now, and those that a page will need next if all that is in them matches."""
    yield first
    jobs = first.jobs
    for _, depth, _, thing in sorted(heap, key=lambda item: item[:3]):
        if depth == 0 and jobs < limit:
            jobs += thing.jobs
            yield thing


def _number(job: ArchivedJob) -> int:
    return job[0]
