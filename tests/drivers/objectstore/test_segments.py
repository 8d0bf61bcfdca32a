"""Segments: what goes in comes out, what is gone stays gone, and of a large one little is unpacked."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_here import NOW, a_job

from taskharbor.drivers.objectstore import building
from taskharbor.drivers.objectstore.building import Built, merged, segment_of
from taskharbor.drivers.objectstore.clearing import due_jobs, due_rows
from taskharbor.drivers.objectstore.entries import SegmentEntry, less_jobs
from taskharbor.drivers.objectstore.rows import StoredRow, row_of
from taskharbor.drivers.objectstore.segments import ArchivedJob, Segment, read_header
from taskharbor.drivers.objectstore.stored_jobs import encode_job
from taskharbor.errors import SchemaMismatch
from taskharbor.jobs import SECOND, JobState, Outcome


def a_row(number: int, ended_at: int = NOW, job_id: str = "j") -> StoredRow:
    return row_of(number, a_job(id=job_id), Outcome.DONE, JobState.DONE, None, ended_at)


def an_ended_job(number: int, finished_at: int = NOW, state: JobState = JobState.DONE) -> ArchivedJob:
    return number, a_job(id=f"j{number}", state=state, finished_at_us=finished_at, payload=b"p" * 50)


def built(name: str, rows: list[StoredRow], jobs: list[ArchivedJob]) -> Built:
    return segment_of(
        name,
        "q",
        [(row, msgspec.msgpack.encode(row)) for row in rows],
        [(job, encode_job(*job)) for job in jobs],
    )


def opened(made: Built) -> tuple[SegmentEntry, Segment]:
    return made.entry, Segment(made.data, "here")


def test_what_goes_in_comes_out() -> None:
    rows = [a_row(number, job_id=f"j{number}") for number in range(1, 2501)]
    jobs = [an_ended_job(number) for number in range(10, 40)]
    entry, segment = opened(built("a", rows, jobs))
    assert segment.rows_after(entry, 0, 10_000) == rows
    assert segment.rows_after(entry, 2400, 7) == rows[2400:2407]
    assert list(segment.jobs_left(entry)) == jobs
    assert segment.job(entry, "j12") == jobs[2]
    assert segment.job(entry, "j9") is None
    assert segment.rows_of(entry, "j77") == [rows[76]]
    assert (entry.rows, entry.done, entry.first_row, entry.last_row) == (2500, 30, 1, 2500)


def test_a_reader_of_rows_unpacks_only_the_blocks_it_needs() -> None:
    entry, segment = opened(built("a", [a_row(number) for number in range(1, 5001)], []))
    segment.rows_after(entry, 3500, 100)
    assert len(segment._rows) == 1


def test_all_rows_come_before_all_jobs_so_that_a_prefix_is_enough() -> None:
    made = built("a", [a_row(1)], [an_ended_job(5)])
    header, start = read_header(made.data[:400], "here")
    assert header.row_blocks[0].offset == 0
    assert header.job_blocks[0].offset == header.row_blocks[0].size
    assert start + header.job_blocks[0].offset + header.job_blocks[0].size == len(made.data)


def test_merging_copies_what_is_whole_and_leaves_out_what_is_gone() -> None:
    first = opened(
        built("a", [a_row(n, NOW + n) for n in range(1, 11)], [an_ended_job(n, NOW + n) for n in (3, 9)])
    )
    second = opened(
        built("b", [a_row(n, NOW + n) for n in range(11, 21)], [an_ended_job(n, NOW + n) for n in (4, 5)])
    )
    due = due_rows(*first, NOW + 4, 100)
    worn = msgspec.structs.replace(first[0], rows=6, rows_gone=due.gone, oldest_row=due.oldest)
    worn = less_jobs(worn, [JobState.DONE], purged=(9,))
    entry, segment = opened(merged("c", "q", [(worn, first[1]), second]))
    assert [row.number for row in segment.rows_after(entry, 0, 100)] == list(range(5, 21))
    assert sorted(number for number, _ in segment.jobs_left(entry)) == [3, 4, 5]
    assert (entry.level, entry.rows, entry.done, entry.rows_gone, entry.jobs_purged) == (1, 16, 3, None, ())
    assert second[1].raw(second[1].header.row_blocks[0]) in segment.data, "a whole block was packed anew"


def test_a_segment_whose_jobs_are_all_gone_is_worth_writing_again_and_then_is_not() -> None:
    entry, segment = opened(built("a", [a_row(1)], [an_ended_job(1)]))
    worn = less_jobs(entry, [JobState.DONE], gone=(NOW, 1), oldest=0)
    assert worn.is_wasteful
    again = merged("b", "q", [(worn, segment)]).entry
    assert (again.is_wasteful, again.rows, again.jobs, again.level) == (False, 1, 0, 0)


def test_an_object_that_is_no_segment_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="not a segment"):
        Segment(b"something else", "here")


ends = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    ends=ends,
    takes=st.lists(st.tuples(st.integers(0, 35), st.integers(1, 12)), max_size=12),
    block=st.integers(1, 9),
)
def test_retention_takes_what_is_due_oldest_first_however_it_is_packed(
    ends: list[int], takes: list[tuple[int, int]], block: int
) -> None:
    """Compared with a plain sorted list, over a row of calls with other thresholds and limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "BLOCK_ITEMS", block)
        rows = [a_row(number, end) for number, end in enumerate(ends, 1)]
        jobs = [an_ended_job(number, end) for number, end in enumerate(ends, 1)]
        entry, segment = opened(built("a", rows, jobs))
    left = sorted((end, number) for number, end in enumerate(ends, 1))
    for by, limit in takes:
        wanted = [one for one in left if one[0] <= by][:limit]
        due = due_rows(entry, segment, by, limit)
        assert [(row.ended_at, row.number) for row in due.items] == wanted
        due_too = due_jobs(entry, segment, by, limit)
        assert [(record.finished_at_us, number) for number, record in due_too.items] == wanted
        left = left[len(wanted) :]
        # Never too late, and after all that was due has gone it leads nobody to look in vain.
        assert due.oldest == due_too.oldest
        if left:
            assert due.oldest <= left[0][0]
        assert due.oldest == 0 or due.oldest > by or len(wanted) == limit
        entry = msgspec.structs.replace(entry, rows=len(left), rows_gone=due.gone, oldest_row=due.oldest)
        entry = less_jobs(entry, [JobState.DONE] * len(wanted), gone=due_too.gone, oldest=due_too.oldest)
        assert sorted((row.ended_at, row.number) for row in segment.rows_after(entry, 0, 100)) == left
        assert entry.done == len(list(segment.jobs_left(entry))) == len(left)


def test_retention_of_a_large_segment_unpacks_few_blocks() -> None:
    rows = [a_row(number, NOW + number * SECOND) for number in range(1, 20_001)]
    entry, segment = opened(built("a", rows, []))
    due = due_rows(entry, segment, NOW + 15_000 * SECOND, 1000)
    assert len(due.items) == 1000
    assert len(segment._rows) <= 2
