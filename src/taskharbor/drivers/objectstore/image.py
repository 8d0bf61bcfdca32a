"""The state of a queue, or of one shard of it: a database in memory that is written to its object as a whole.

The rules are the engine's. A step is a transaction of its own, so one that raises has changed nothing. The database becomes
bytes after COMMIT only: inside a transaction SQLite may give the old pages, or a mixture of old and new ones.
A state whose write did not land is thrown away together with its connection. An image lists the segments of its queue.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TypeVar

import msgspec

from taskharbor.clock import SystemClock
from taskharbor.drivers.engine import schema_migrations
from taskharbor.drivers.engine.tables import Transaction, load, to_json
from taskharbor.drivers.migrations import Migration, known_migrations
from taskharbor.drivers.waiting import ALWAYS
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import JobRecord, Micros

R = TypeVar("R")

NANOSECONDS = 15_625
"""Nanoseconds per number. So a number takes six bytes, in a row and in each index, until the year 2039, and eight after that."""
PAGE_BYTES = 1024
"""Small pages: every queue has some thirty tables and indexes, and most queues have few jobs."""

_MANY = 100

wall_clock = SystemClock().now
_SQL = load("image", __package__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JobRecord).decode
_lock = threading.Lock()
_last = 0


def take_numbers(count: int) -> int:
    """The first of `count` numbers in a row for jobs or rows of the log.

    Every queue is an object of its own, so nothing counts all jobs of a store. Numbers follow this machine's time, only to put
    queues and shards in an order. Whatever the clock does, a queue goes on from its own last number.
    """
    global _last
    with _lock:
        first = max(_last + 1, time.time_ns() // NANOSECONDS)
        _last = first + count - 1
    return first


class Image:
    """A database, as the state of a compare-and-swap object. `touched` says that something changed."""

    def __init__(self, data: bytes, where: str, queue: str) -> None:
        """`data`: the bytes that `serialize` returned; empty for a queue that nobody has used."""
        self.touched = False
        self.connection = connect(data or empty())
        try:
            check(self.connection, where, queue)
        except sqlite3.DatabaseError as error:
            raise BackendUnavailable(
                f"{where} is not the state of a queue ({error}): restore its own object"
            ) from error

    def __del__(self) -> None:
        self.connection.close()

    def change(self, function: Callable[[Transaction], R]) -> tuple[R, bool]:
        """Run a function in a transaction. Returns its answer, and whether the outbox now holds jobs for other queues."""
        execute = self.connection.execute
        outbox: list[JobRecord] = []
        execute("SAVEPOINT step")
        before = self.connection.total_changes
        try:
            execute(_SQL["number_rows"], (take_numbers(1),))
            answer = function(Transaction(self.connection, outbox))
            for record in outbox:
                execute(_SQL["add_notice"], (record.id, _encode(record)))
            # If only the numbering changed, nothing has to be written.
            if self.connection.total_changes == before + 1:
                execute("ROLLBACK TO step")
            else:
                self.touched = True
        except BaseException:
            execute("ROLLBACK TO step")
            raise
        finally:
            execute("RELEASE step")
        return answer, bool(outbox)

    def look(self, function: Callable[[Transaction], R]) -> R:
        return function(Transaction(self.connection))

    def news(self) -> tuple[int, bool, bool]:
        """The version, which grows whenever something may have become runnable and is the same in every process; whether the
        outbox holds something; and whether something has ended, so that compaction may be due."""
        found: tuple[int, bool, bool] = self.connection.execute(_SQL["news"]).fetchone()
        return found

    def outbox(self) -> list[JobRecord]:
        """Return the jobs for other queues that have not arrived there yet."""
        return [_decode(record) for (record,) in self.connection.execute(_SQL["notices"])]

    def serialize(self) -> bytes:
        assert not self.connection.in_transaction, "an image is taken after COMMIT only"
        free, pages = self.connection.execute(_SQL["pages"]).fetchone()
        if free * 4 > pages:
            # Deleted rows leave their pages behind.
            self.connection.execute("VACUUM")
        return self.connection.serialize()


def connect(data: bytes = b"") -> sqlite3.Connection:
    """Open a serialised database, or an empty one, in a new connection: a connection with an open cursor would crash the
    process."""
    connection = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, cached_statements=512
    )
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA temp_store = MEMORY")
    if data:
        connection.deserialize(data)
    return connection


def check(connection: sqlite3.Connection, where: str, queue: str) -> None:
    """Give a database the schema of this version. Raises SchemaMismatch, or BackendUnavailable if it belongs to another queue."""
    missing = schema_migrations.pending(connection, where, _known())
    if missing:
        connection.execute("BEGIN")
        schema_migrations.apply(connection, missing)
        connection.execute("COMMIT")
    for (name,) in connection.execute(_SQL["queues"]):
        if name != queue:
            raise BackendUnavailable(
                f"{where} holds queue {name!r} and belongs to {queue!r}: restore its own object"
            )


@cache
def _known() -> tuple[Migration, ...]:
    return (*schema_migrations.known(), *known_migrations(__package__))


@cache
def empty() -> bytes:
    """Return the image of a queue that nobody has used."""
    connection = connect()
    check(connection, "", "")
    data = connection.serialize()
    connection.close()
    return data


# -- segments -------------------------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A segment in the list of its queue's image. The first and last numbers and ids are those from its making."""

    name: str
    # The number of merges.
    level: int
    # Bytes of the object.
    size: int
    # Rows of the log that are left. None of them ended before the oldest.
    rows: int
    first_row: int
    last_row: int
    first_row_id: str
    last_row_id: str
    oldest_row: Micros
    # Jobs that are left.
    jobs: int
    first_job: int
    last_job: int
    first_job_id: str
    last_job_id: str
    oldest_job: Micros
    # Retention has removed all rows and jobs up to here, in the order of (end, number).
    rows_gone_at: Micros = ALWAYS
    rows_gone_seq: int = 0
    jobs_gone_at: Micros = ALWAYS
    jobs_gone_seq: int = 0
    # Numbers of jobs that were removed besides.
    purged: tuple[int, ...] = ()

    @property
    def is_wasteful(self) -> bool:
        """True if it is worth being rewritten: all its jobs are gone while its rows may stay for weeks, or a large part is
        gone."""
        return (self.jobs == 0 and self.last_job > 0) or len(self.purged) >= _MANY


def entries(transaction: Transaction) -> list[Entry]:
    """Return the entries in the order of their rows."""
    return [_decode_entry(text) for (text,) in transaction.connection.execute(_SQL["entries"])]


# Most entries have not changed since the last look.
_decode_entry = lru_cache(4096)(msgspec.json.Decoder(Entry).decode)


def holding_jobs(transaction: Transaction, job_ids: Sequence[str]) -> list[Entry]:
    """Return the entries of segments that may hold one of the jobs. Most requested ids are newer than all ended jobs."""
    oldest = min(job_ids, default="")
    found = [one for one in entries(transaction) if one.jobs and oldest <= one.last_job_id]
    return [one for one in found if any(one.first_job_id <= id_ <= one.last_job_id for id_ in job_ids)]


def put_entry(transaction: Transaction, entry: Entry) -> None:
    """Store the entry of a segment, or retire the segment if nothing is left in it."""
    if entry.rows or entry.jobs:
        transaction.execute(_SQL["put"], (entry.name, entry.last_row, to_json(entry)))
    else:
        retire(transaction, [entry.name])


def retire(transaction: Transaction, names: Sequence[str]) -> None:
    """Retire segments that were replaced or are empty. Somebody may still be reading them."""
    transaction.execute(_SQL["drop"], (to_json(list(names)),))
    now = wall_clock()
    transaction.connection.executemany(_SQL["retire"], [(name, now) for name in names])
