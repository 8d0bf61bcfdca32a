"""What a queue's state says of one segment: where it is, what it holds, and what of that is gone.

A segment never changes. What retention or a purge removes from one is noted here, in the same write as everything else
that follows from it, and leaves the segment when it is merged into a larger one.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TypeAlias

import msgspec

from taskharbor.jobs import JobState, Micros

Mark: TypeAlias = tuple[Micros, int]
"""When something ended, and its number: the order in which retention takes things."""
_MANY = 100


class SegmentEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    name: str
    """Of the object, below the queue's `log/`."""
    level: int
    """How often it was merged."""
    size: int
    """Bytes of the object."""
    rows: int
    """Rows of the attempt log that are left."""
    first_row: int
    last_row: int
    """Numbers of the first and the last row; 0 where there never was one. Of two segments of a queue, all rows of one come before
    all rows of the other."""
    first_row_id: str
    last_row_id: str
    """The least and the greatest job id among the rows."""
    oldest_row: Micros
    """No row that is left ended before this."""
    done: int
    cancelled: int
    """Jobs that are left."""
    first_job: int
    last_job: int
    """The least and the greatest number among the jobs: the order in which they were accepted."""
    first_job_id: str
    last_job_id: str
    oldest_job: Micros
    """No job that is left finished before this."""
    rows_gone: Mark | None = None
    """Rows up to this one, in the order of (ended_at, number), are gone."""
    jobs_gone: Mark | None = None
    """Jobs up to this one, in the order of (finished_at, number), are gone."""
    jobs_purged: tuple[int, ...] = ()
    """Numbers of jobs that are gone besides, in order."""

    @property
    def jobs(self) -> int:
        return self.done + self.cancelled

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.done or self.cancelled)

    @property
    def is_wasteful(self) -> bool:
        """Holds payloads of jobs that are all gone, which the rows in it may outlive by weeks, or much to leave out."""
        return (self.jobs == 0 and self.last_job > 0) or len(self.jobs_purged) > _MANY

    def may_hold_job(self, job_id: str) -> bool:
        return self.jobs > 0 and self.first_job_id <= job_id <= self.last_job_id

    def may_hold_rows_of(self, job_id: str) -> bool:
        return self.rows > 0 and self.first_row_id <= job_id <= self.last_row_id

    def has_row(self, ended_at: Micros, number: int) -> bool:
        return self.rows_gone is None or (ended_at, number) > self.rows_gone

    def has_job(self, finished_at: Micros, number: int) -> bool:
        return (self.jobs_gone is None or (finished_at, number) > self.jobs_gone) and not (
            self.jobs_purged and self._is_purged(number)
        )

    def _is_purged(self, number: int) -> bool:
        """There may be thousands."""
        at = bisect_left(self.jobs_purged, number)
        return at < len(self.jobs_purged) and self.jobs_purged[at] == number


def less_jobs(
    entry: SegmentEntry,
    states: list[JobState],
    *,
    gone: Mark | None = None,
    oldest: Micros | None = None,
    purged: tuple[int, ...] = (),
) -> SegmentEntry:
    """The entry after jobs that ended in these states were removed, either up to a mark or by their numbers."""
    done = states.count(JobState.DONE)
    return msgspec.structs.replace(
        entry,
        done=entry.done - done,
        cancelled=entry.cancelled - (len(states) - done),
        jobs_gone=gone or entry.jobs_gone,
        oldest_job=entry.oldest_job if oldest is None else oldest,
        jobs_purged=tuple(sorted((*entry.jobs_purged, *purged))) if purged else entry.jobs_purged,
    )
