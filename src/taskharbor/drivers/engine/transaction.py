"""A transaction of the engine: a SQLite connection, and whether waiters are to be woken once it is committed."""

from __future__ import annotations

from sqlite3 import Connection


class Transaction:
    """What an operation works on."""

    __slots__ = ("connection", "notifies")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.notifies = False
