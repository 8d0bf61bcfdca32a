"""A handle's connections: few, opened on demand, closed after any error.

No background task keeps them alive. During an outage the worker repeats calls with its own backoff. Here a call fails at once, or
is repeated once on a new connection if its own turned out to be dead.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection, generators, pq, waiting
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from taskharbor.drivers.postgres.options import PostgresOptions
from taskharbor.drivers.postgres.rows import call, load
from taskharbor.errors import BackendUnavailable, InvalidRequest, SchemaMismatch, TaskHarborError

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]
Operation: TypeAlias = Callable[["Session"], Awaitable[T]]

_CONFLICTS = 10
"""Tries before a deadlock or serialisation failure is given up. PostgreSQL has undone all of such a call."""


class Connection(AsyncConnection[Row]):
    """A connection that keeps its socket registered with the event loop, and is closed at once when its caller is cancelled.

    The library registers the socket for every answer and removes it again, which costs dozens of microseconds. If a caller is
    cancelled, the library asks the server to stop, and on a dead line waits for ten seconds, longer than a lease may last. Here
    the connection is closed in any case.
    """

    _descriptor: int | None = None
    _ready: asyncio.Future[int] | None = None
    on_unasked: Callable[[], None] | None = None
    """Called when bytes come that nobody waits for. Usually the server closes the connection: the next call reads the reason."""

    async def wait(self, gen: Any, interval: float = 1.0, timeout: float | None = None) -> Any:
        """Run a generator of the library. It yields the readiness of the socket that it needs."""
        try:
            if timeout is not None:
                return await waiting.wait_async(gen, self.pgconn.socket, interval, timeout)
            wanted = next(gen)
            self.begin_watching()
            while True:
                wanted = gen.send(await self._readiness(wanted))
        except StopIteration as end:
            return end.value
        except BaseException as error:
            # The library closes a broken socket. Then another socket may get its number.
            self.end_watching()
            if isinstance(error, asyncio.CancelledError):
                self.pgconn.finish()
            raise

    async def _readiness(self, wanted: int) -> int:
        loop, descriptor = asyncio.get_running_loop(), self.pgconn.socket
        self._ready = loop.create_future()
        if wanted & waiting.WAIT_W:
            loop.add_writer(descriptor, self._on_ready, waiting.READY_W)
        try:
            return await self._ready
        finally:
            self._ready = None
            if wanted & waiting.WAIT_W:
                loop.remove_writer(descriptor)

    def _on_ready(self, ready: int) -> None:
        if self._ready is None:
            (self.on_unasked or self.end_watching)()
        elif not self._ready.done():
            self._ready.set_result(ready)

    def begin_watching(self) -> None:
        if self._descriptor is None:
            self._descriptor = self.pgconn.socket
            asyncio.get_running_loop().add_reader(self._descriptor, self._on_ready, waiting.READY_R)

    def end_watching(self) -> None:
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._descriptor = None

    async def close(self) -> None:
        self.end_watching()
        await super().close()


class Session:
    """One connection, with a short path for statements.

    A cursor of the library decides for every call how each value is written, whether to prepare, and how to read each result. An
    idle worker pays for that between hearing of a job and claiming it. Here the statements fix the types of the values, so all of
    them are sent as text, and bytes as they are; and there is one result. Figures are in `docs/decisions/postgres-client.md`.
    """

    def __init__(self, connection: Connection, options: PostgresOptions) -> None:
        self.connection = connection
        self.schema = options.schema
        self.channel = options.channel
        self._names: dict[str, bytes] | None = {} if options.prepare else None
        """Names of prepared statements; None if statements are not prepared."""
        self._reading = Transformer(connection)
        self.stir = options.stir
        self.is_fresh = True
        self.is_repeated = False
        """True if an earlier try of the running call may have taken effect without an answer."""

    async def rows(self, statement: str, values: Sequence[Any] = ()) -> list[Row]:
        pgconn = self.connection.pgconn
        written = self._written(values)
        formats = [int(isinstance(value, bytes)) for value in values]
        async with self.connection.lock:
            if self._names is None:
                text = statement.encode()
                pgconn.send_query_params(text, written, param_formats=formats, result_format=Format.BINARY)
            else:
                name = self._names.get(statement) or await self._prepare(statement, self._names)
                pgconn.send_query_prepared(name, written, param_formats=formats, result_format=Format.BINARY)
            result = await self._result()
        if result.status != ExecStatus.TUPLES_OK:
            return []
        self._reading.set_pgresult(result, set_loaders=True, format=Format.BINARY)
        return self._reading.load_rows(0, result.ntuples, tuple)

    async def named(self, family: str, name: str, *values: Any) -> list[Row]:
        """Return the rows of a statement in `sql/`."""
        return await self.rows(load(family, self.schema)[name], values)

    async def call(self, function: str, *values: Any) -> Any:
        """Return the one value that a function of the store returns."""
        ((value,),) = await self.rows(call(function, self.schema, len(values)), values)
        return value

    async def _prepare(self, statement: str, names: dict[str, bytes]) -> bytes:
        name = b"taskharbor_%d" % len(names)
        self.connection.pgconn.send_prepare(name, statement.encode())
        await self._result()
        names[statement] = name
        return name

    async def _result(self) -> PGresult:
        result: PGresult = (await self.connection.wait(generators.execute(self.connection.pgconn)))[-1]
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise psycopg.errors.error_from_result(result)
        return result

    def _written(self, values: Sequence[Any]) -> list[bytes | None]:
        written: list[bytes | None] = []
        for value in values:
            # A subclass, for example an enumeration, is written like its base type.
            if isinstance(value, str):
                text = value.encode()
                if 0 in text:
                    # PostgreSQL would end the text there.
                    raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
                written.append(text)
            elif value is None or isinstance(value, bytes):
                written.append(value)
            else:
                # Callers may count microseconds in floats.
                written.append(b"%d" % (round(value) if isinstance(value, float) else value))
        return written

    @property
    def is_idle(self) -> bool:
        """True if another call may use it: it is alive, and in no transaction that something left behind."""
        return self.connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


class Connections:
    def __init__(self, options: PostgresOptions, *idle: Session) -> None:
        self._options = options
        self._idle = list(idle)
        self._slots = asyncio.Semaphore(options.pool_size)
        self._busy: set[Session] = set()
        self._is_closed = False
        self.listening: Session | None = None
        """The session that hears of new jobs. Its server process is awake at that moment, so it also claims them: waking another
        process of the server costs more than the claim itself."""
        self.listening_is_lost: Callable[[], None] = lambda: None

    async def run(self, operation: Operation[T], *, where_heard: bool = False) -> T:
        """Run an operation and return its answer. It is one statement or one transaction, and safe to repeat. `where_heard`: on
        the listening connection, if there is one and it is free."""
        is_repeated = False
        conflicts = 0
        if self._slots.locked():
            await self._take_slot()
        else:
            await self._slots.acquire()
        try:
            while True:
                session = await self._free_session(where_heard and not is_repeated)
                self._busy.add(session)
                session.is_repeated = is_repeated
                try:
                    answer = await operation(session)
                except psycopg.Error as error:
                    await self._drop(session)
                    if error.sqlstate in _CONFLICT and conflicts < _CONFLICTS:
                        conflicts += 1
                        await asyncio.sleep(random.random() * 0.002 * 2**conflicts)
                        continue
                    if is_lost(error):
                        # The others are as old: the cause that ended this one has probably ended them.
                        await self._drop_idle()
                        if not session.is_fresh and not is_repeated:
                            is_repeated = True
                            continue
                    raise translated(error, self._options) from error
                except BaseException:
                    # Cancelled in the middle of an exchange: the next bytes on this connection are not known.
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
            self._slots.release()

    async def close(self) -> None:
        self._is_closed = True
        await self._drop_idle()
        for session in list(self._busy):
            await self._drop(session)

    async def _take_slot(self) -> None:
        try:
            async with asyncio.timeout(self._options.pool_timeout):
                await self._slots.acquire()
        except TimeoutError:
            raise BackendUnavailable(
                f"{self._options.place}: all {self._options.pool_size} connections of this handle were busy for "
                f"{self._options.pool_timeout:g} s; raise pool_size, or look for what holds them"
            ) from None

    async def _free_session(self, where_heard: bool) -> Session:
        heard = self.listening if where_heard else None
        if heard is not None and heard not in self._busy and heard.is_idle:
            return heard
        while self._idle:
            session = self._idle.pop()
            if not session.connection.closed:
                return session
        return Session(await connect(self._options), self._options)

    async def _drop(self, session: Session) -> None:
        self._busy.discard(session)
        if session is self.listening:
            self.listening = None
            self.listening_is_lost()
        await session.connection.close()

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._drop(self._idle.pop())


async def connect(options: PostgresOptions) -> Connection:
    try:
        # The library prepares nothing: after a rollback it would drop its statements, and TaskHarbor's with them.
        return await Connection.connect(options.conninfo, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise translated(error, options) from error
    except OSError as error:
        raise BackendUnavailable(f"{options.place}: {error}") from error


# -- PostgreSQL's errors as TaskHarbor's ----------------------------------------------------------------------------

_CONFLICT = ("40001", "40P01")
"""The server undid the call because of a conflict with another. It can be repeated."""
_SHUTDOWN = ("57P01", "57P02", "57P03", "57P05")
_READ_ONLY = "25006"

_ADVICE = {
    "25006": "the server is a standby or read-only: name the primary, or all hosts with target_session_attrs=read-write",
    "28000": "the server does not let this user in: check user, database and pg_hba.conf",
    "28P01": "the password is wrong",
    "3D000": "the database does not exist: create it first",
    "42501": "this user lacks a privilege: grant it, or let its owner run `taskharbor migrate`",
    "53100": "the server's disk is full; nothing of this call was stored",
    "53300": "the server has no connection left: lower pool_size or the number of workers, or use a pooler",
    "26000": "behind a pooler in transaction mode add prepare=off&notify=off to the URL",
    "42P05": "behind a pooler in transaction mode add prepare=off&notify=off to the URL",
    "55P03": "a lock was not to be had in time; look for a long transaction",
    "57014": "the statement ran into the server's statement_timeout",
    "57P03": "the server is starting or stopping",
}
# A refused connection has no code, only a message.
_SPOKEN = {
    "too many connections": "53300",
    "too many clients": "53300",
    "remaining connection slots": "53300",
    "password authentication failed": "28P01",
    "no pg_hba.conf entry": "28000",
    "is starting up": "57P03",
    "is shutting down": "57P03",
    "in recovery mode": "57P03",
    "read-only": "25006",
}
MISSING = ("42P01", "42883", "3F000", "42704")
_BAD_VALUE = ("22", "23502", "23514")


def is_lost(error: psycopg.Error) -> bool:
    """Return True if the connection is lost or useless. The call may or may not have taken effect."""
    state = error.sqlstate
    if state is None:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    return state.startswith("08") or state in _SHUTDOWN or state == _READ_ONLY


def translated(error: psycopg.Error, options: PostgresOptions) -> Exception:
    """Return the TaskHarbor error for an error of psycopg."""
    state = error.sqlstate or ""
    text = " ".join(str(error).split())
    if state in MISSING:
        return SchemaMismatch(
            f"{options.place}: the schema {options.schema!r} is missing or old ({text}): run `taskharbor migrate`"
        )
    if state.startswith(_BAD_VALUE) or isinstance(error, psycopg.DataError):
        return InvalidRequest(f"a value cannot be stored in PostgreSQL: {text}")
    if not state:
        state = next((code for words, code in _SPOKEN.items() if words in text), "")
        if not state and "database" in text and "does not exist" in text:
            state = "3D000"
    advice = _ADVICE.get(state)
    message = f"{options.place}: {text} ({advice})" if advice else f"{options.place}: {text}"
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)) or advice or is_lost(error):
        return BackendUnavailable(message)
    return TaskHarborError(message)
