"""The state of a queue, or of one shard of it: a database in memory that is written to its object as a whole.

The rules are the engine's. A step is a transaction of its own, so one that raises has changed nothing. The database becomes
bytes after COMMIT only: inside a transaction SQLite may give the old pages, or a mixture of old and new ones.
A state whose write did not land is thrown away together with its connection.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import msgspec

from taskharbor.drivers.engine import schema
from taskharbor.drivers.engine.tables import Transaction, load
from taskharbor.drivers.migrations import Migration, known_migrations
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import JobRecord

R = TypeVar("R")

NANOSECONDS = 15_625
"""Per number: so a number takes six bytes, in a row and in each index, until the year 2039, and eight after that."""
PAGE_BYTES = 1024
"""Small pages: every queue has some thirty tables and indexes, and most queues have few jobs."""

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
        """`data`: as `serialize` gave it; empty for a queue that nobody has used."""
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
        """The answer, and whether jobs for other queues follow from it, which are in the outbox now."""
        execute = self.connection.execute
        outbox: list[JobRecord] = []
        execute("SAVEPOINT step")
        before = self.connection.total_changes
        try:
            execute(_SQL["number_rows"], (take_numbers(1),))
            answer = function(Transaction(self.connection, outbox))
            for record in outbox:
                execute(_SQL["add_notice"], (record.id, _encode(record)))
            # Where nothing changed but the numbering, nothing is to be written.
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

    def news(self) -> tuple[int, bool]:
        """The version, which grows whenever something may have become runnable and is the same in every process; and whether
        the outbox holds something."""
        found: tuple[int, bool] = self.connection.execute(_SQL["news"]).fetchone()
        return found

    def outbox(self) -> list[JobRecord]:
        """Jobs for other queues that have not arrived there yet."""
        return [_decode(record) for (record,) in self.connection.execute(_SQL["notices"])]

    def serialize(self) -> bytes:
        assert not self.connection.in_transaction, "an image is taken after COMMIT only"
        free, pages = self.connection.execute(_SQL["pages"]).fetchone()
        if free * 4 > pages:
            # Deleted rows leave their pages behind.
            self.connection.execute("VACUUM")
        return self.connection.serialize()


def connect(data: bytes = b"") -> sqlite3.Connection:
    """A database that was serialised, or an empty one. In a new connection: one with an open cursor would crash the process."""
    connection = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, cached_statements=512
    )
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA temp_store = MEMORY")
    if data:
        connection.deserialize(data)
    return connection


def check(connection: sqlite3.Connection, where: str, queue: str) -> None:
    """Give a database the schema of this version. Raises SchemaMismatch, or BackendUnavailable where it is another queue's."""
    missing = schema.pending(connection, where, _known())
    if missing:
        connection.execute("BEGIN")
        schema.apply(connection, missing)
        connection.execute("COMMIT")
    for (name,) in connection.execute(_SQL["queues"]):
        if name != queue:
            raise BackendUnavailable(
                f"{where} holds queue {name!r} and belongs to {queue!r}: restore its own object"
            )


@cache
def _known() -> tuple[Migration, ...]:
    return (*schema.known(), *known_migrations(__package__))


@cache
def empty() -> bytes:
    """The image of a queue that nobody has used."""
    connection = connect()
    check(connection, "", "")
    data = connection.serialize()
    connection.close()
    return data
