"""Segments: what goes in comes out, and what is gone stays gone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from records import NOW, make_record
from taskharbor.drivers.contract import Ack, JobFilter
from taskharbor.drivers.engine import enqueue, inspect, reserve, settle
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.objectstore import archive
from taskharbor.drivers.objectstore.archive import Segment, merge, rows_end
from taskharbor.drivers.objectstore.image import Entry, Image, entries, put_entry
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND, Attempt, JobRecord

FOREVER = inspect.FOREVER
Made = tuple[Entry, bytes]


def an_image(jobs: Sequence[JobRecord], ends: Sequence[int]) -> Image:
    """Jobs that were done at these times, each with its row of the log."""
    image = Image(b"", "here", "q")

    def work(transaction: Transaction) -> None:
        enqueue.enqueue(transaction, jobs, NOW, numbers=[int(job.id[1:]) + 1 for job in jobs])
        held = reserve.reserve(transaction, "q", len(jobs), 10**16, 0, "w", None)
        for job, end in zip(held, ends, strict=True):
            assert settle.settle(transaction, [Ack(job.id, job.token or "", b"r")], end) == [None]

    image.change(work)
    return image


def done_jobs(count: int, first: int = 0, payload: bytes = b"p" * 50) -> list[JobRecord]:
    return [make_record(f"j{n:05}", payload=payload, run_at_us=0) for n in range(first, first + count)]


def built(name: str, ends: Sequence[int], first: int = 0) -> tuple[Made, Image]:
    image = an_image(done_jobs(len(ends), first), ends)
    return packed(name, image), image


def packed(name: str, image: Image) -> Made:
    rows, jobs = (
        archive.copied(image.connection, archive.ROWS),
        archive.copied(image.connection, archive.JOBS),
    )
    return archive.pack(name, 0, rows, jobs)


def opened(made: Made) -> tuple[Entry, Segment]:
    entry, data = made
    return entry, Segment(data, "here", "q")


def rows_between(
    entry: Entry, segment: Segment, after: int = 0, until: int = FOREVER, limit: int = 10_000
) -> list[Attempt]:
    return inspect.attempts_between(segment.rows(entry), after, until, limit)


def jobs_of(entry: Entry, segment: Segment, *job_ids: str) -> dict[str, tuple[int, JobRecord]]:
    found = archive.find_jobs(entry, segment, JobFilter(), 10_000)
    return {job.id: (number, job) for number, job in found if job.id in job_ids}


def numbers(entry: Entry, segment: Segment) -> list[int]:
    return [row.seq for row in rows_between(entry, segment)]


def test_what_goes_in_comes_out() -> None:
    made, image = built("a", [NOW + n for n in range(300)])
    entry, segment = opened(made)
    jobs, rows = image.look(
        lambda transaction: (
            inspect.find_jobs(transaction, JobFilter(), NOW, 1000, FOREVER),
            inspect.attempts_between(transaction, 0, FOREVER, 1000),
        )
    )
    assert archive.find_jobs(entry, segment, JobFilter(), 1000) == jobs
    assert rows_between(entry, segment) == rows
    assert rows_between(entry, segment, rows[99].seq, rows[250].seq, 7) == rows[100:107]
    assert archive.get([(entry, segment)], ["j00012", "nobody"]) == {"j00012": jobs[-13][1]}
    assert inspect.job_attempts(segment.rows(entry), "j00077") == [rows[77]]
    assert (entry.rows, entry.jobs, entry.first_row, entry.last_row) == (300, 300, rows[0].seq, rows[-1].seq)
    assert (entry.oldest_row, entry.oldest_job, entry.first_job_id) == (NOW, NOW, "j00000")


def test_the_beginning_of_a_segment_has_all_its_rows() -> None:
    image = an_image(done_jobs(5, payload=bytes(range(256)) * 400), [NOW] * 5)
    made = packed("a", image)
    entry, data = made
    size = rows_end(data[:10], "here")
    assert size < len(data) / 2
    beginning = Segment(data[:size], "here", "q")
    assert numbers(entry, beginning) == numbers(*opened(made))


def test_merging_leaves_out_what_is_gone() -> None:
    first = opened(built("a", [NOW + n for n in range(10)])[0])
    second = opened(built("b", [NOW + n for n in range(10, 20)], first=10)[0])
    oldest = sorted((row.ended_at_us, row.seq) for row in rows_between(*first))[:4]
    _, third = jobs_of(*first, "j00003").popitem()
    at, seq = oldest[-1]
    worn = replace(first[0], rows=6, rows_gone_at=at, rows_gone_seq=seq, jobs=9, purged=(third[0],))
    # Segments of one queue have rows of their own; these two were made apart and have the same numbers.
    later = replace(second[0], rows_gone_at=NOW + 18, rows_gone_seq=FOREVER)
    entry, segment = opened(merge("c", "q", [(worn, first[1].data), (later, second[1].data)]))
    assert (entry.level, entry.rows, entry.purged) == (1, 7, ())
    assert jobs_of(entry, segment, "j00003", "j00004").keys() == {"j00004"}


def test_a_segment_whose_jobs_are_all_gone_is_worth_writing_again_and_then_is_not() -> None:
    entry, segment = opened(built("a", [NOW])[0])
    worn = replace(entry, jobs=0, jobs_gone_at=NOW, jobs_gone_seq=FOREVER)
    assert worn.is_wasteful
    again, _ = merge("b", "q", [(worn, segment.data)])
    assert (again.is_wasteful, again.rows, again.jobs, again.level) == (False, 1, 0, 0)


def test_an_object_that_is_no_segment_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="here is damaged, or not a segment"):
        Segment(b"something else", "here", "q")
    entry, data = built("a", [NOW])[0]
    for read in (Segment.rows, Segment.jobs):
        with pytest.raises(BackendUnavailable, match="here holds queue 'q' and belongs to 'r'"):
            read(Segment(data, "here", "r"), entry)
    with pytest.raises(BackendUnavailable, match="here is damaged"):
        Segment(data[:-20], "here", "q").jobs(entry)
    with pytest.raises(BackendUnavailable, match="here is damaged"):
        Segment(data[:7], "here", "q")


@settings(max_examples=30, deadline=None)
@given(
    ends=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    takes=st.lists(st.tuples(st.integers(0, 35), st.integers(1, 12)), max_size=8),
)
def test_retention_takes_what_is_due_oldest_first(ends: list[int], takes: list[tuple[int, int]]) -> None:
    """Compared with a plain sorted list, over a row of calls with other thresholds and limits."""
    made, image = built("a", [end * SECOND for end in ends])
    entry, segment = opened(made)

    def move(transaction: Transaction) -> None:
        transaction.connection.execute("DELETE FROM jobs")
        transaction.connection.execute("DELETE FROM attempts")
        transaction.connection.execute("UPDATE queues SET keep_done_us = 0, keep_attempts_us = 0")
        put_entry(transaction, entry)

    image.change(move)
    left = sorted((row.ended_at_us, row.seq) for row in rows_between(entry, segment))
    for by, limit in takes:
        wanted = [one for one in left if one[0] <= by * SECOND][:limit]
        taken, _ = image.change(
            lambda transaction, by=by, limit=limit: archive.prune(  # type: ignore[misc]
                transaction,
                [(one, segment) for one in archive.due(transaction, by * SECOND)],
                by * SECOND,
                limit,
                limit,
            )
        )
        assert taken == (len(wanted), len(wanted))
        left = left[len(wanted) :]
        found = image.look(entries)
        if not left:
            assert found == []
            break
        now = found[0]
        rows = rows_between(now, segment)
        assert sorted((row.ended_at_us, row.seq) for row in rows) == left
        assert now.jobs == now.rows == len(left) == len(archive.find_jobs(now, segment, JobFilter(), 100))
        # Never too late, and after all that was due has gone it leads nobody to look in vain.
        assert now.oldest_row == now.oldest_job == left[0][0]
        (stats,) = image.look(lambda transaction: inspect.stats(transaction, NOW, "q"))
        assert sum(stats.counts.values()) == len(left)
