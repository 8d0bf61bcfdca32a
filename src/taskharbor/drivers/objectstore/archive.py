"""Segments: immutable objects that hold rows of the attempt log and jobs that have ended.

An object is `THS3`, the size of the first part (4 bytes, big endian), and two databases, each compressed by zlib: one of rows,
one of jobs. Rows come first, so a reader of the log needs only the beginning. The databases have the engine's tables, so the
engine's functions read them. What retention or a purge takes from a segment is noted in its entry, in the image of the queue, and
leaves the object when that is merged into another.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

from msgspec.structs import replace

from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.engine import inspect, operate
from taskharbor.drivers.engine.tables import Counts, Transaction, load, to_json
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.image import Entry, check, connect, empty, entries, put_entry
from taskharbor.drivers.records import STATES
from taskharbor.drivers.waiting import ALWAYS
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import JobRecord, JobState, Micros

MAGIC = b"THS3"
MAX_CACHED_BYTES = 128 * 1024 * 1024
LARGE = 256 * 1024
"""Size in bytes from which two requests for parts of a segment cost less than one for all of it."""
BEGINNING = 64 * 1024
"""Enough for the header, and for the rows of most segments."""
ARCHIVED = frozenset({JobState.DONE, JobState.CANCELLED})
"""States of jobs that move into a segment."""
_START = len(MAGIC) + 4

_SQL = load("archive", __package__)
_OPERATE = load("operate")
_FIND = load("bulk")["find"]


# -- segments -------------------------------------------------------------------------------------------------


class Segment:
    """A segment that was read, or its beginning up to the last row. Its databases are opened on demand."""

    def __init__(self, data: bytes, where: str, queue: str) -> None:
        self.data = data
        self._where = where
        self._queue = queue
        self._jobs_start = rows_end(data, where)

    @property
    def weight(self) -> int:
        """About the memory that it takes: the databases, and two connections with their caches."""
        return 6 * len(self.data) + 200_000

    def rows(self, entry: Entry) -> Transaction:
        """Return the log, as far as retention has left it according to the entry, for the engine's functions."""
        self._rows.execute(_SQL["set_marks"], (entry.rows_gone_at, entry.rows_gone_seq, "[]"))
        return Transaction(self._rows)

    def jobs(self, entry: Entry) -> Transaction:
        marks = (entry.jobs_gone_at, entry.jobs_gone_seq, to_json(entry.purged))
        self._jobs.execute(_SQL["set_marks"], marks)
        return Transaction(self._jobs)

    @cached_property
    def _rows(self) -> sqlite3.Connection:
        return self._opened(self.data[_START : self._jobs_start], "view_of_rows")

    @cached_property
    def _jobs(self) -> sqlite3.Connection:
        return self._opened(self.data[self._jobs_start :], "view_of_jobs")

    def _opened(self, packed: bytes, view: str) -> sqlite3.Connection:
        try:
            connection = connect(zlib.decompress(packed))
        except zlib.error:
            raise _damaged(self._where) from None
        check(connection, self._where, self._queue)
        for statement in ("marks", view):
            connection.execute(_SQL[statement])
        return connection


def rows_end(data: bytes, where: str) -> int:
    """Return the size of the object's beginning that has all its rows."""
    if data[: len(MAGIC)] != MAGIC or len(data) < _START:
        raise _damaged(where)
    return _START + int.from_bytes(data[len(MAGIC) : _START], "big")


def _damaged(where: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"{where} is damaged, or not a segment of TaskHarbor's log, or one of another version: restore it"
    )


class SegmentCache:
    """Segments that one handle has read or written lately, by the name of their object."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._weight = 0
        self._kept: OrderedDict[tuple[str, bool], Segment] = OrderedDict()
        """Segments by name, and by whether only the rows were read."""

    async def read(self, name: str, queue: str, entry: Entry, rows_only: bool) -> Segment | None:
        """Return the segment if it exists. `rows_only`: read only the beginning of a large segment, because jobs with their
        payloads may be most of it."""
        rows_only = rows_only and entry.jobs > 0 and entry.size > LARGE
        for kind in {False, rows_only}:
            if (name, kind) in self._kept:
                self._kept.move_to_end((name, kind))
                return self._kept[name, kind]
        blob = await self._blobs.read(name, size=BEGINNING if rows_only else None)
        if blob is not None and len(blob.data) < (size := rows_end(blob.data, self._blobs.where(name))):
            blob = await self._blobs.read(name, size=size)
        if blob is None:
            return None
        segment = Segment(blob.data, self._blobs.where(name), queue)
        self.keep(name, segment, rows_only=rows_only)
        return segment

    def keep(self, name: str, segment: Segment, *, rows_only: bool = False) -> None:
        if (name, rows_only) not in self._kept:
            self._kept[name, rows_only] = segment
            self._weight += segment.weight
            while self._weight > MAX_CACHED_BYTES and len(self._kept) > 1:
                self._weight -= self._kept.popitem(last=False)[1].weight


# -- making segments ------------------------------------------------------------------------------------------


ROWS = ("copy_queues", "copy_attempts")
JOBS = ("copy_queues", "copy_jobs", "copy_payloads", "copy_results")


def copied(connection: sqlite3.Connection, statements: Sequence[str], into: bytes = b"") -> bytes:
    """A database with all rows of the log (`ROWS`), or the jobs that are done or cancelled (`JOBS`), added to another."""
    connection.execute("ATTACH ':memory:' AS part")
    try:
        connection.deserialize(into or _empty_part(), name="part")
        for statement in statements:
            connection.execute(_SQL[statement])
        return connection.serialize(name="part")
    finally:
        connection.execute("DETACH part")


@cache
def _empty_part() -> bytes:
    connection = connect(empty())
    for (index,) in connection.execute(_SQL["indexes"]).fetchall():
        connection.execute(f"DROP INDEX {index}")
    connection.execute("VACUUM")
    return connection.serialize()


def pack(name: str, level: int, rows: bytes, jobs: bytes) -> tuple[Entry, bytes]:
    """Make a segment of two databases, and its entry. Nothing here waits, so it can run in a thread."""
    measured: list[Any] = []
    for database, statement in ((rows, "measure_rows"), (jobs, "measure_jobs")):
        measured += connect(database).execute(_SQL[statement]).fetchone()
    packed = zlib.compress(rows, 1)
    data = b"".join((MAGIC, len(packed).to_bytes(4, "big"), packed, zlib.compress(jobs, 1)))
    return Entry(name, level, len(data), *measured), data


def merge(name: str, queue: str, parts: Sequence[tuple[Entry, bytes]]) -> tuple[Entry, bytes]:
    """Merge several segments into one, or rewrite one without its removed rows and jobs. Nothing here waits, so it can run in a
    thread."""
    rows = jobs = b""
    for entry, data in parts:
        segment = Segment(data, entry.name, queue)
        rows = copied(segment.rows(entry).connection, ROWS, rows)
        jobs = copied(segment.jobs(entry).connection, JOBS, jobs)
    level = max(entry.level for entry, _ in parts) + (len(parts) > 1)
    return pack(name, level, rows, jobs)


# -- jobs in segments -----------------------------------------------------------------------------------------

Segments = Sequence[tuple[Entry, Segment]]
"""Segments with their entries in the image. A step needs them, so they are read before it runs."""


def find_jobs(
    entry: Entry, segment: Segment, selection: JobFilter, limit: int, before: int = inspect.FOREVER
) -> list[tuple[int, JobRecord]]:
    """Jobs with their numbers, the newest first."""
    # All of them are of one queue, and the index by state is not there.
    return inspect.find_jobs(segment.jobs(entry), replace(selection, queue=None), 0, limit, before)


def get(segments: Segments, job_ids: Sequence[str]) -> dict[str, JobRecord]:
    """The jobs that segments have, by id."""
    found = [job for entry, segment in segments for job in inspect.get(segment.jobs(entry), job_ids, 0)]
    return {job.id: job for job in found if job is not None}


def _retention(transaction: Transaction, now: Micros) -> tuple[Micros, Micros]:
    """Return the instants by which jobs and rows must have ended to be removed."""
    found = transaction.execute(_SQL["retention"], {"now": now, "always": ALWAYS}).fetchone()
    return found or (ALWAYS, ALWAYS)


def due(transaction: Transaction, now: Micros) -> list[Entry]:
    """Return the entries from which retention removes something."""
    jobs_by, rows_by = _retention(transaction, now)
    return [
        one
        for one in entries(transaction)
        if (one.jobs and one.oldest_job <= jobs_by) or (one.rows and one.oldest_row <= rows_by)
    ]


def prune(
    transaction: Transaction, segments: Segments, now: Micros, most_jobs: int, most_rows: int
) -> tuple[int, int]:
    """Apply retention to the segments that are due and to the image, to at most `most_jobs` and `most_rows`. Returns the numbers
    of removed jobs and rows."""
    jobs = rows = 0
    jobs_by, rows_by = _retention(transaction, now)
    for entry, segment in segments:
        gone, oldest = _oldest(segment.jobs(entry), "oldest_jobs", jobs_by, most_jobs - jobs)
        if gone:
            _forget(transaction, [(job_id, state) for _, _, job_id, state in gone])
            left, (at, seq, *_) = entry.jobs - len(gone), gone[-1]
            entry = replace(entry, jobs=left, jobs_gone_at=at, jobs_gone_seq=seq, oldest_job=oldest)
        jobs += len(gone)
        gone, oldest = _oldest(segment.rows(entry), "oldest_rows", rows_by, most_rows - rows)
        if gone:
            transaction.execute(_OPERATE["trimmed"], (max(seq for _, seq in gone),))
            left, (at, seq) = entry.rows - len(gone), gone[-1]
            entry = replace(entry, rows=left, rows_gone_at=at, rows_gone_seq=seq, oldest_row=oldest)
        rows += len(gone)
        put_entry(transaction, entry)
    here = operate.prune_up_to(transaction, now, most_jobs - jobs, most_rows - rows)
    return jobs + here[0], rows + here[1]


def _oldest(
    transaction: Transaction, statement: str, by: Micros, limit: int
) -> tuple[list[tuple[Any, ...]], Micros]:
    """Return up to `limit` items that ended by an instant, oldest first, and the end of the item after them."""
    found = transaction.execute(_SQL[statement], (max(0, limit) + 1,)).fetchall()
    gone = [one for one in found[:limit] if one[0] <= by] if limit > 0 else []
    return gone, found[len(gone)][0] if len(found) > len(gone) else 0


def remove(
    transaction: Transaction, entry: Entry, segment: Segment, job_ids: Sequence[str]
) -> dict[str, JobState]:
    """Remove jobs from a segment. Returns the states of the jobs that were there, by id."""
    found = segment.jobs(entry).fetch(_FIND, (to_json(list(dict.fromkeys(job_ids))),))
    if found:
        _forget(transaction, [(job_id, state) for job_id, _, _, state in found])
        purged = (*entry.purged, *(seq for _, seq, _, _ in found))
        put_entry(transaction, replace(entry, jobs=entry.jobs - len(found), purged=purged))
    return {job_id: STATES[state] for job_id, _, _, state in found}


def _forget(transaction: Transaction, jobs: Sequence[tuple[str, int]]) -> None:
    """Remove the traces that jobs in segments, given by id and state, have in the image: counters and idempotency keys."""
    transaction.execute(_SQL["forget_keys"], (to_json([job_id for job_id, _ in jobs]),))
    (queue,) = transaction.execute(_SQL["queue_number"]).fetchone()
    counts = Counts(transaction)
    for state, number in Counter(state for _, state in jobs).items():
        counts.move(queue, state, None, number)
    counts.flush()
