"""Segments: immutable objects that hold rows of the attempt log and jobs that have ended.

An object is `THS2`, the length of its header (4 bytes, big endian), the header, the database of its rows and the database of its
jobs, each compressed by zlib. Rows come first, so a reader of the log needs only the beginning. What retention or a purge takes
from a segment is noted in its entry, in the image of the queue, and leaves the object when that is merged into another.
"""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import asdict, astuple

from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.engine.inspect import FOREVER
from taskharbor.drivers.engine.tables import (
    STATE_NUMBERS,
    Transaction,
    attempt_from_row,
    insert_rows,
    load,
    record_from_row,
    to_json,
)
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.image import connect, deserialized
from taskharbor.drivers.waiting import ALWAYS
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import Attempt, JobRecord, Micros

MAGIC = b"THS2"
FORMAT = 2
MAX_CACHED_BYTES = 128 * 1024 * 1024
_START = len(MAGIC) + 4
_MANY = 100

_PARTS = load("segments", __package__)
_SQL = {
    name: statement.replace("/*left*/", _PARTS["jobs_left"]).replace(
        "/*columns*/", _PARTS["row_columns" if name.startswith("rows") else "job_columns"]
    )
    for name, statement in _PARTS.items()
}


class Entry(msgspec.Struct, frozen=True):
    """A row of the table `segments`, which describes each column."""

    name: str
    level: int
    size: int
    rows: int
    first_row: int
    last_row: int
    first_row_id: str
    last_row_id: str
    oldest_row: Micros
    jobs: int
    first_job: int
    last_job: int
    first_job_id: str
    last_job_id: str
    oldest_job: Micros
    rows_gone_at: Micros = ALWAYS
    rows_gone_seq: int = 0
    jobs_gone_at: Micros = ALWAYS
    jobs_gone_seq: int = 0
    purged: str = "[]"

    @property
    def is_wasteful(self) -> bool:
        """It holds payloads of jobs that are all gone, which its rows may outlive by weeks, or much to leave out."""
        return (self.jobs == 0 and self.last_job > 0) or self.purged.count(",") >= _MANY


def entries(transaction: Transaction) -> list[Entry]:
    """In the order of their rows."""
    return [Entry(*row) for row in transaction.connection.execute(_SQL["all"])]


def holding_jobs(transaction: Transaction, job_ids: Sequence[str]) -> list[Entry]:
    """Entries of segments that may hold one of the jobs."""
    if not job_ids:
        return []
    # Most ids that are asked for are newer than all that has ended.
    rows = transaction.connection.execute(_SQL["holding_jobs"], {"first": min(job_ids), "last": max(job_ids)})
    found = [Entry(*row) for row in rows]
    return [one for one in found if any(one.first_job_id <= id_ <= one.last_job_id for id_ in job_ids)]


def put_entries(transaction: Transaction, changed: Iterable[Entry]) -> None:
    insert_rows(transaction.connection, _SQL["put"], [astuple(entry) for entry in changed])


def drop_entries(transaction: Transaction, names: Iterable[str]) -> None:
    transaction.connection.execute(_SQL["drop"], (to_json(list(names)),))


class _Header(msgspec.Struct, array_like=True, frozen=True):
    format: int
    queue: str
    rows_size: int
    """Bytes of the database of rows, as it stands in the object."""


_decode_header = msgspec.msgpack.Decoder(_Header).decode


class Segment:
    """A segment that was read, or its beginning up to the last row. Its databases are opened when somebody needs them."""

    def __init__(self, data: bytes, where: str, queue: str) -> None:
        self.data = data
        self.queue = queue
        self._where = where
        self._header, self._start = _read_header(data, where)
        if self._header.queue != queue:
            raise BackendUnavailable(
                f"{where} holds ended jobs of queue {self._header.queue!r} and belongs to {queue!r}: restore its own object"
            )

    @cached_property
    def weight(self) -> int:
        """About how much memory it takes: the databases, and two connections with their caches."""
        return 6 * len(self.data) + 200_000

    @cached_property
    def _rows(self) -> sqlite3.Connection:
        return deserialized(self.rows_image)

    @cached_property
    def _jobs(self) -> sqlite3.Connection:
        return deserialized(self.jobs_image)

    @property
    def rows_image(self) -> bytes:
        return self._unpacked(self.data[self._start : self._start + self._header.rows_size])

    @property
    def jobs_image(self) -> bytes:
        return self._unpacked(self.data[self._start + self._header.rows_size :])

    def _unpacked(self, part: bytes) -> bytes:
        try:
            return zlib.decompress(part)
        except zlib.error:
            raise _damaged(self._where) from None

    # -- what is left -------------------------------------------------------------------------------------

    def jobs(self, entry: Entry, job_ids: Sequence[str]) -> dict[str, tuple[int, JobRecord]]:
        """The jobs that are here, by id, with their numbers. Of an id that was accepted anew, the later job counts."""
        found = self._jobs.execute(_SQL["by_id"], self._values(entry, ids=to_json(list(job_ids))))
        return {row[1]: (row[0], record_from_row(row, 0)) for row in found}

    def matching(
        self, entry: Entry, selection: JobFilter, limit: int, before: int = FOREVER, until: int = 0
    ) -> list[tuple[int, JobRecord]]:
        """The newest accepted first."""
        values = self._values(
            entry,
            before=before,
            until=until,
            states=None
            if selection.states is None
            else to_json([STATE_NUMBERS[one] for one in selection.states]),
            types=None if selection.types is None else to_json(list(selection.types)),
            key=selection.key,
            finished_before=selection.finished_before_us,
            limit=0 if selection.worker is not None else limit,
        )
        found = self._jobs.execute(_SQL["matching"], values)
        return [(row[0], record_from_row(row, 0)) for row in found]

    def oldest_jobs(self, entry: Entry, limit: int) -> list[tuple[Micros, int, str, int]]:
        """End, number, id and state."""
        return self._jobs.execute(_SQL["oldest_jobs"], self._values(entry, limit=limit)).fetchall()

    def oldest_rows(self, entry: Entry, limit: int) -> list[tuple[Micros, int]]:
        """End and number."""
        return self._rows.execute(_SQL["oldest_rows"], self._values(entry, limit=limit)).fetchall()

    def rows_between(self, entry: Entry, after: int, until: int, limit: int) -> list[Attempt]:
        values = self._values(entry, after=after, until=until, limit=limit)
        return [attempt_from_row(row) for row in self._rows.execute(_SQL["rows_between"], values)]

    def rows_of(self, entry: Entry, job_id: str) -> list[Attempt]:
        found = self._rows.execute(_SQL["rows_of"], self._values(entry, id=job_id))
        return [attempt_from_row(row) for row in found]

    def _values(self, entry: Entry, **more: Any) -> dict[str, Any]:
        return {**asdict(entry), "queue": self.queue, **more}


def _damaged(where: str) -> BackendUnavailable:
    return BackendUnavailable(f"{where} is damaged, or not a segment of TaskHarbor's log: restore it")


def _header_end(data: bytes, where: str) -> int:
    if data[: len(MAGIC)] != MAGIC:
        raise _damaged(where)
    return _START + int.from_bytes(data[len(MAGIC) : _START], "big")


def _read_header(data: bytes, where: str) -> tuple[_Header, int]:
    """The header, and where the databases begin."""
    end = _header_end(data, where)
    try:
        header = _decode_header(data[_START:end])
    except msgspec.MsgspecError:
        raise _damaged(where) from None
    if header.format != FORMAT:
        raise SchemaMismatch(
            f"{where} has format {header.format}, this version of TaskHarbor reads {FORMAT}: use a newer one"
        )
    return header, end


def size_with_rows(data: bytes, where: str) -> int:
    """How much of the object has all its rows, as far as this beginning tells. More than that: read so much, and ask again."""
    end = _header_end(data, where)
    if len(data) < end:
        return end
    return end + _read_header(data, where)[0].rows_size


# -- making segments ------------------------------------------------------------------------------------------


class Built(msgspec.Struct, frozen=True):
    """A segment that was made, and its entry."""

    data: bytes
    entry: Entry


class Extract(msgspec.Struct, frozen=True):
    """The databases of a segment that is to be made, and what they hold."""

    rows_image: bytes
    jobs_image: bytes
    rows: tuple[Any, ...]
    """Count, first and last number, first and last id, oldest end."""
    jobs: tuple[Any, ...]
    job_numbers: str = "[]"
    """Of all its jobs, as JSON."""

    def packed(self, name: str, queue: str, level: int) -> Built:
        rows = zlib.compress(self.rows_image, 1)
        header = msgspec.msgpack.encode(_Header(FORMAT, queue, len(rows)))
        parts = (MAGIC, len(header).to_bytes(4, "big"), header, rows, zlib.compress(self.jobs_image, 1))
        data = b"".join(parts)
        return Built(data, Entry(name, level, len(data), *self.rows, *self.jobs))


def extract(connection: sqlite3.Connection) -> Extract:
    """Everything of an image that may leave it: all rows of the log, and the jobs that are done or cancelled."""
    rows_image, rows = _make(connection, "rows", lambda: connection.execute(_SQL["copy_rows"]))
    jobs_image, jobs = _make(connection, "jobs", lambda: connection.execute(_SQL["copy_jobs"]))
    (numbers,) = connection.execute(_SQL["ended_numbers"]).fetchone()
    return Extract(rows_image, jobs_image, rows, jobs, numbers)


def merge(name: str, parts: Sequence[tuple[Entry, Segment]]) -> Built:
    """One segment of several, or of one without what is gone. Nothing here waits, so it can run in a thread."""
    connection = connect()

    def copy(what: str) -> None:
        for entry, segment in parts:
            connection.execute("ATTACH ':memory:' AS old")
            connection.deserialize(segment.rows_image if what == "rows" else segment.jobs_image, name="old")
            connection.execute(_SQL[f"merge_{what}"], asdict(entry))
            connection.execute("DETACH old")

    rows_image, rows = _make(connection, "rows", lambda: copy("rows"))
    jobs_image, jobs = _make(connection, "jobs", lambda: copy("jobs"))
    connection.close()
    level = max(entry.level for entry, _ in parts) + (len(parts) > 1)
    return Extract(rows_image, jobs_image, rows, jobs).packed(name, parts[0][1].queue, level)


def _make(connection: sqlite3.Connection, what: str, fill: Any) -> tuple[bytes, tuple[Any, ...]]:
    """A database of rows or jobs, attached while it is filled."""
    execute = connection.execute
    execute("ATTACH ':memory:' AS part")
    try:
        execute(_SQL[f"create_{what}"])
        fill()
        if what == "jobs":
            execute(_SQL["index_jobs"])
        measured: tuple[Any, ...] = execute(_SQL[f"measure_{what}"]).fetchone()
        return connection.serialize(name="part"), measured
    finally:
        execute("DETACH part")


# -- reading segments -----------------------------------------------------------------------------------------


class SegmentCache:
    """Segments that one handle has read or written lately, by folder and name."""

    def __init__(self, blobs: Blobs, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._blobs = blobs
        self._max_bytes = max_bytes
        self._weight = 0
        self._kept: OrderedDict[str, Segment] = OrderedDict()

    async def read(self, folder: str, queue: str, names: Sequence[str]) -> dict[str, Segment]:
        """The segments that are there, by name."""
        found = await asyncio.gather(*(self._read(f"{folder}/{name}", queue) for name in names))
        return {name: segment for name, segment in zip(names, found, strict=True) if segment is not None}

    async def _read(self, name: str, queue: str) -> Segment | None:
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        blob = await self._blobs.read(name)
        if blob is None:
            return None
        segment = Segment(blob.data, self._blobs.where(name), queue)
        self.keep(name, segment)
        return segment

    def keep(self, name: str, segment: Segment) -> None:
        if name not in self._kept:
            self._kept[name] = segment
            self._weight += segment.weight
            while self._weight > self._max_bytes and len(self._kept) > 1:
                self._weight -= self._kept.popitem(last=False)[1].weight
