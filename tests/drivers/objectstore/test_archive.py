"""Segments: damaged ones are refused, and retention takes what is due. The conformance kit, on tiny segments, shows the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records import NOW, make_record
from taskharbor.drivers.contract import Ack, JobFilter
from taskharbor.drivers.engine import enqueue, inspect, reserve, settle
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.objectstore import archive
from taskharbor.drivers.objectstore.archive import JOBS, ROWS, Segment
from taskharbor.drivers.objectstore.image import Entry, Image, entries, put_entry
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import SECOND


def built(ends: Sequence[int]) -> tuple[Image, Entry, bytes]:
    """An image of jobs that were done at these times, each with its row of the log, and the segment `a` of them."""
    image = Image(b"", "here", "q")

    def work(transaction: Transaction) -> None:
        enqueue.enqueue(transaction, [make_record(run_at_us=0) for _ in ends], NOW)
        held = reserve.reserve(transaction, "q", len(ends), 10**16, 0, "w", None)
        for job, end in zip(held, ends, strict=True):
            assert settle.settle(transaction, [Ack(job.id, job.token or "", b"r")], end) == [None]

    image.change(work)
    rows, jobs = (archive.copied(image.connection, statements) for statements in (ROWS, JOBS))
    return image, *archive.pack("a", 0, rows, jobs)


def test_an_object_that_is_no_segment_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="here is damaged, or not a segment"):
        Segment(b"something else", "here", "q")
    _, entry, data = built([NOW])
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
    image, made, data = built([end * SECOND for end in ends])
    segment = Segment(data, "here", "q")

    def move(transaction: Transaction) -> None:
        transaction.connection.execute("DELETE FROM jobs")
        transaction.connection.execute("DELETE FROM attempts")
        transaction.connection.execute("UPDATE queues SET keep_done_us = 0, keep_attempts_us = 0")
        put_entry(transaction, made)

    def rows_of(entry: Entry) -> list[tuple[int, int]]:
        rows = inspect.attempts_between(segment.rows(entry), 0, inspect.FOREVER, 1000)
        return sorted((row.ended_at_us, row.seq) for row in rows)

    image.change(move)
    left = rows_of(made)
    for by, limit in takes:

        def prune(transaction: Transaction, now: int = by * SECOND, most: int = limit) -> tuple[int, int]:
            due = [(entry, segment) for entry in archive.due(transaction, now)]
            return archive.prune(transaction, due, now, most, most)

        wanted = [one for one in left if one[0] <= by * SECOND][:limit]
        assert image.change(prune)[0] == (len(wanted), len(wanted))
        left = left[len(wanted) :]
        if not left:
            assert image.look(entries) == []
            break
        (entry,) = image.look(entries)
        assert rows_of(entry) == left
        assert (
            entry.jobs == entry.rows == len(left) == len(archive.find_jobs(entry, segment, JobFilter(), 99))
        )
        # Never too late, and after all that was due has gone it leads nobody to look in vain.
        assert entry.oldest_row == entry.oldest_job == left[0][0]
        (stats,) = image.look(lambda transaction: inspect.stats(transaction, NOW, "q"))
        assert sum(stats.counts.values()) == len(left)
