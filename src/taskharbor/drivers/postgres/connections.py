"""A handle's connections: few, opened when they are needed, thrown away when anything goes wrong with one.

No background task keeps them alive. An outage is for the worker to sit out, with its own patience; here a call fails at
once, or is repeated once on a fresh connection where the one it had turned out to be dead.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, LiteralString, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, pq, waiting

from taskharbor.drivers.postgres.failures import is_conflict, is_lost, translated
from taskharbor.drivers.postgres.options import Options
from taskharbor.drivers.postgres.prepared import Prepared, Row
from taskharbor.errors import BackendUnavailable


class Slots:
    def __init__(self, count: int) -> None:
        self._free = count
        self._line: deque[asyncio.Future[None]] = deque()

    def take_at_once(self) -> bool:
        """Whether there was a free place. Nobody overtakes those in line: a place is only free when the line is empty."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def take(self, timeout: float) -> None:
        """Raises TimeoutError where none becomes free in time."""
        if self.take_at_once():
            return
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            async with asyncio.timeout(timeout):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # It came in the very moment we gave up.
                self.give_back()
            else:
                turn.cancel()
            raise

    def give_back(self) -> None:
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


T = TypeVar("T")
Values: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""In the order of a statement's places, or by the names it has for them where nobody is in a hurry."""
Operation: TypeAlias = Callable[["Session", bool], Awaitable[T]]
"""Works on a session; True says that an earlier try may have taken effect without an answer."""

_CONFLICTS = 10
"""Tries before a deadlock or serialisation failure is given up. PostgreSQL has undone all of such a call."""


class Connection(AsyncConnection[Row]):
    """One that lets go at once when its caller is cancelled. The library would ask the server to stop and wait for ten
    seconds on a line that went dead, longer than a lease may last; here the connection is thrown away in any case."""

    watch: Watch | None = None

    async def wait(self, gen: Any, interval: float = 1.0, timeout: float | None = None) -> Any:
        try:
            if self.watch is None or timeout is not None:
                return await waiting.wait_async(gen, self.pgconn.socket, interval, timeout)
            return await self.watch.wait(gen)
        except asyncio.CancelledError:
            self.pgconn.finish()
            raise

    async def close(self) -> None:
        if self.watch is not None:
            self.watch.end()
        await super().close()


class Watch:
    """Keeps one socket registered with the event loop. The library registers it for every answer and takes it out again, which
    costs dozens of microseconds."""

    def __init__(self, descriptor: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._is_on = False
        self._wants_writing = False
        self._gen: Any = None
        self.on_unasked: Callable[[], None] = self.end
        """What to do when something comes that nobody waits for. Usually the server says goodbye: the next call reads it."""
        self._answer: asyncio.Future[Any] | None = None

    async def wait(self, gen: Any) -> Any:
        """Run a generator of the library's, which yields what it needs the socket to be ready for."""
        try:
            wanted = next(gen)
        except StopIteration as end:
            return end.value
        self._gen = gen
        self._answer = answer = self._loop.create_future()
        self.begin()
        self._set_writing(wanted)
        try:
            return await answer
        except BaseException:
            # The library has closed a broken socket, and another may get its number now.
            self.end()
            raise
        finally:
            self._gen = self._answer = None

    def _go_on(self, ready: int) -> None:
        if self._gen is None:
            self.on_unasked()
            return
        try:
            self._set_writing(self._gen.send(ready))
        except StopIteration as end:
            self._finish(end.value, None)
        except Exception as error:
            self.end()
            self._finish(None, error)

    def _finish(self, value: Any, error: Exception | None) -> None:
        self._gen = None
        self._set_writing(0)
        if self._answer is None or self._answer.done():
            return  # Its caller was cancelled just now.
        if error is not None:
            self._answer.set_exception(error)
        else:
            self._answer.set_result(value)

    def _set_writing(self, wanted: int) -> None:
        wants_writing = bool(wanted & waiting.WAIT_W)
        if wants_writing and not self._wants_writing:
            self._loop.add_writer(self._descriptor, self._go_on, waiting.READY_W)
        elif self._wants_writing and not wants_writing:
            self._loop.remove_writer(self._descriptor)
        self._wants_writing = wants_writing

    def begin(self) -> None:
        """Watch for what comes unasked as well, before the first call."""
        if not self._is_on:
            self._is_on = True
            self._loop.add_reader(self._descriptor, self._go_on, waiting.READY_R)

    def end(self) -> None:
        self._set_writing(0)
        if self._is_on:
            self._is_on = False
            self._loop.remove_reader(self._descriptor)


class Session:
    """One connection and what runs statements on it, over and over."""

    def __init__(self, connection: Connection, is_prepared: bool, *, is_shared: bool = False) -> None:
        self.connection = connection
        self.watch = connection.watch = Watch(connection.fileno())
        self._cursor: AsyncCursor[Row] = connection.cursor(binary=True)
        self._prepared = Prepared(connection, is_shared=is_shared) if is_prepared else None
        self.is_fresh = True
        self.repeats: int | None = None
        """What the store's counter of jobs stored again said last."""

    async def rows(self, statement: LiteralString, values: Values = ()) -> list[Row]:
        if self._prepared is not None and isinstance(values, list | tuple):
            return await self._prepared.rows(statement, values)
        await self._cursor.execute(statement, values)
        return await self._cursor.fetchall()

    async def value(self, statement: LiteralString, values: Values = ()) -> Any:
        return (await self.rows(statement, values))[0][0]

    @property
    def is_idle(self) -> bool:
        """Whether another call may use it: alive, and in no transaction that something left behind."""
        return self.connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


class Connections:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._idle: list[Session] = []
        self._slots = Slots(options.pool_size)
        self._busy: set[Session] = set()
        self._is_closed = False
        self.listening: Session | None = None
        """The one that hears of new jobs. It is awake at that moment, so it also claims them: waking another process of the
        server costs more than the claim itself."""
        self.listening_is_lost: Callable[[], None] = lambda: None

    def adopt(self, connection: Connection) -> None:
        """Take over a connection that was opened for something else."""
        self._idle.append(Session(connection, self._options.prepare))

    async def run(self, operation: Operation[T], *, where_heard: bool = False) -> T:
        """The answer of an operation, which is one statement or one transaction and safe to repeat. `where_heard`: on the
        connection that listens, if there is one that is free."""
        is_repeated = False
        conflicts = 0
        if not self._slots.take_at_once():
            await self._take_slot()
        try:
            while True:
                session = self._free_listening() if where_heard and not is_repeated else None
                if session is None:
                    session = await self._session()
                self._busy.add(session)
                try:
                    answer = await operation(session, is_repeated)
                except psycopg.Error as error:
                    await self._drop(session)
                    if is_conflict(error) and conflicts < _CONFLICTS:
                        conflicts += 1
                        await asyncio.sleep(random.random() * 0.002 * 2**conflicts)
                        continue
                    if is_lost(error):
                        # The others are as old: whatever ended this one has probably ended them.
                        await self._drop_idle()
                        if not session.is_fresh and not is_repeated:
                            is_repeated = True
                            continue
                    raise translated(error, self._options) from error
                except BaseException:
                    # Cancelled in the middle of an exchange: what comes next on this connection is not known.
                    await self._drop(session)
                    raise
                self._busy.discard(session)
                session.is_fresh = False
                if session.is_idle and not self._is_closed:
                    if session is not self.listening:
                        self._idle.append(session)
                else:
                    await self._drop(session)
                return answer
        finally:
            self._slots.give_back()

    async def close(self) -> None:
        self._is_closed = True
        await self._drop_idle()
        for session in list(self._busy):
            await self._drop(session)

    async def _take_slot(self) -> None:
        try:
            await self._slots.take(self._options.pool_timeout)
        except TimeoutError:
            raise BackendUnavailable(
                f"{self._options.place}: all {self._options.pool_size} connections of this handle were busy for "
                f"{self._options.pool_timeout:g} s; raise pool_size, or look for what holds them"
            ) from None

    def _free_listening(self) -> Session | None:
        session = self.listening
        return session if session is not None and session not in self._busy and session.is_idle else None

    async def _session(self) -> Session:
        while self._idle:
            session = self._idle.pop()
            if not session.connection.closed:
                return session
        return Session(await connect(self._options), self._options.prepare)

    async def _drop(self, session: Session) -> None:
        self._busy.discard(session)
        if session is self.listening:
            self.listening = None
            self.listening_is_lost()
        await session.connection.close()

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._drop(self._idle.pop())


async def connect(options: Options) -> Connection:
    try:
        # The library prepares nothing: after a rollback it would let go of its statements, and of ours with them.
        return await Connection.connect(options.conninfo, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise translated(error, options) from error
    except OSError as error:
        raise BackendUnavailable(f"{options.place}: {error}") from error
