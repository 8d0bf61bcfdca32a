"""The engine on a database in memory: one connection and a lock.

No operation awaits while it holds the store's lock, or at all except `wait`. So handles on any number of event loops and threads
can share a store, and a loop with virtual time drives it deterministically.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from msgspec.structs import astuple

from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Capabilities, Driver, Woken
from taskharbor.drivers.engine import inspect, schema_migrations
from taskharbor.drivers.engine.dispatch import FUNCTIONS
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.urls import shown_url
from taskharbor.drivers.waiting import Look, Notifications, wait
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Micros

A = TypeVar("A")

_NAME = re.compile(r"[\w.-]*")

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryStore:
    """A database in memory, and the source of its waiters. It lives as long as something refers to it."""

    trusts_notifications = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=512
        )
        # A commit of a large database in memory looks at all its pages. Few large pages keep the cost of a claim flat.
        self._connection.execute("PRAGMA page_size = 32768")
        self._connection.execute("PRAGMA temp_store = MEMORY")
        self._connection.execute("PRAGMA secure_delete = OFF")
        self.notifications = Notifications()
        self.run(
            lambda transaction: schema_migrations.apply(transaction.connection, schema_migrations.known())
        )

    def run(self, function: Callable[[Transaction], A]) -> A:
        """Call the function in a transaction. An error rolls it back."""
        connection = self._connection
        transaction = Transaction(connection)
        with self._lock:
            connection.execute("BEGIN")
            try:
                answer = function(transaction)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        if transaction.notifies and self.notifications.waiters:
            self.notifications.notify()
        return answer

    def listen(self, queues: Sequence[str]) -> None:
        return None

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        versions, due = self.run(lambda transaction: inspect.watch(transaction, queues, since))
        return Look.at((versions.get(queue, 0) for queue in queues), version, due)


class MemoryDriver(Driver):
    """A store in this process: `memory://` is new and private, `memory://name` is the one store of that name.

    A named store outlives its last handle, so that a web application and a worker in one process may come and go.
    `MemoryDriver.drop(name)` removes it, for tests.
    """

    capabilities = Capabilities(durable=False, multi_process=False, publishes_at_once=True)
    functions = FUNCTIONS

    def __init__(self, store: MemoryStore | None = None, *, clock: Clock | None = None) -> None:
        self._store = MemoryStore() if store is None else store
        self._clock: Clock = SystemClock() if clock is None else clock

    @classmethod
    def from_url(cls, url: str) -> Self:
        scheme, _, name = url.partition("://")
        if scheme != "memory" or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{shown_url(url)!r} is not a memory URL: write memory:// or memory://name "
                "(letters, digits, '_', '.', '-'); it takes no options"
            )
        if not name:
            return cls()
        with _named_lock:
            if name not in _named:
                _named[name] = MemoryStore()
            return cls(_named[name])

    @staticmethod
    def drop(name: str) -> bool:
        """Forget the store of that name: the next `memory://name` is empty. Handles on the old store keep it."""
        with _named_lock:
            return _named.pop(name, None) is not None

    def clone(self) -> Self:
        return type(self)(self._store, clock=self._clock)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def time(self) -> Micros:
        return self._clock.now()

    async def _apply(self, function: Callable[..., A], call: op.Operation[A]) -> A:
        return self._store.run(lambda transaction: function(transaction, *astuple(call)))

    async def _wait(self, call: op.Wait) -> Woken:
        return await wait(self._store, call)
