"""One server and the connections to it. redis-py connects, authenticates, encrypts and parses. All calls of a handle share one
connection, and replies come in the order of the commands.

redis-py's client takes a connection per call from a pool, which costs up to four times the CPU (docs/decisions/redis-client.md).
If a caller is cancelled here, its reply is read and dropped. Nothing is repeated here; a caller whose reply was lost gets an
error and decides.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import hiredis
from redis import exceptions
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from taskharbor.drivers.redis.errors import REDISCOVER, code_of, translated
from taskharbor.drivers.redis.library import Library, RedisCall, Word
from taskharbor.drivers.redis.options import Address, RedisOptions
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError

# The library's own annotation says a tuple of one item.
pack = cast("Callable[[tuple[Word, ...]], bytes]", hiredis.pack_command)

_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
_KEEPALIVE = {getattr(socket, name): value for name, value in _PROBES.items() if hasattr(socket, name)}
"""A dead peer sends nothing. Without these options the kernel reports that only after hours."""
_ASKING = pack(("ASKING",))
_MULTI = pack(("MULTI",))
_EXEC = pack(("EXEC",))
_WAIT_REPLIES = 2
_LOADS = 4
"""Tries of a call on a server that lacks the library and refuses FUNCTION."""


class ConnectionLost(Exception):
    """No reply will come. The server may or may not have run the commands."""


class _Pending(NamedTuple):
    answer: asyncio.Future[list[Any]]
    expected: int
    sent_at: float
    replies: list[Any]


class SharedConnection:
    """A redis-py connection that many callers use at once. Replies that are errors are `ResponseError` values in their place."""

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_Pending] = deque()
        self._watchdog: asyncio.TimerHandle | None = None
        self._end = ConnectionLost("the connection is closed")
        self.lost = asyncio.Event()
        self.on_message: Callable[[Any], None] | None = None
        """Called with every reply of a connection that has a subscription."""
        self._reader = self._loop.create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self.lost.is_set()

    async def ask(self, packed: bytes, count: int) -> list[Any]:
        """Send commands and return their replies, `count` of them. Raises ConnectionLost."""
        if not self.tell(packed):
            raise self._end
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        self._pending.append(_Pending(answer, count, self._loop.time(), []))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._timeout, self._check_silence)
        return await answer

    def tell(self, packed: bytes) -> bool:
        """Send commands, and return whether the connection is open. Replies that nobody asked for go to `on_message`."""
        # redis-py's own method waits until the socket has taken the bytes, and callers wait for replies anyway. A failure is
        # ignored here: the reader sees it too, perhaps after the server's reason.
        writer = self._connection._writer
        if not self.is_open or writer is None:
            return False
        writer.write(packed)
        return True

    def abort(self, why: str, cause: Exception | None = None) -> None:
        """Close it at once. Callers that wait for replies get ConnectionLost."""
        if not self.is_open:
            return
        self.lost.set()
        self._end = ConnectionLost(why)
        self._end.__cause__ = cause
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        self._reader.cancel()
        # redis-py's `disconnect` only closes in order, which waits for a peer that may be dead.
        if self._connection._writer is not None:
            self._connection._writer.transport.abort()
        self._connection._close()  # type: ignore[no-untyped-call]
        while self._pending:
            pending = self._pending.popleft()
            if not pending.answer.done():
                pending.answer.set_exception(self._end)

    async def _read(self) -> None:
        connection = self._connection
        try:
            while True:
                try:
                    reply = await connection.read_response(disconnect_on_error=False)
                except ResponseError as error:
                    reply = error
                if self.on_message is not None:
                    self.on_message(reply)
                elif self._pending:
                    pending = self._pending[0]
                    pending.replies.append(reply)
                    if len(pending.replies) == pending.expected:
                        self._pending.popleft()
                        if not pending.answer.done():
                            pending.answer.set_result(pending.replies)
                else:
                    # The only unexpected reply is an error before the server closes, for example to an idle client.
                    self.abort(str(reply))
        except InvalidResponse as error:
            self.abort(f"that is not a Redis server: {error}", error)
        except RedisError as error:
            self.abort(str(error), error)
        finally:
            self.abort("the connection is closed")

    def _check_silence(self) -> None:
        self._watchdog = None
        if not self._pending:
            return
        left = self._pending[0].sent_at + self._timeout - self._loop.time()
        if left <= 0:
            self.abort(f"no answer for {self._timeout:g} s")
        else:
            self._watchdog = self._loop.call_later(left, self._check_silence)


async def connect(address: Address, options: RedisOptions, *, is_sentinel: bool = False) -> SharedConnection:
    """Return a connection that is ready for commands."""
    user, password, db = options.user, options.password, options.db
    if is_sentinel:
        user, password, db = options.sentinel_user, options.sentinel_password, 0
    place = f"{address}/{db}"
    # Silence is noticed for the whole connection, not for each read.
    limits = {"socket_connect_timeout": options.connect_timeout, "socket_timeout": None}
    account = {"username": user, "password": password, "db": db}
    connection = _connection(address, options, {**account, **limits, "protocol": 2, "driver_info": None})
    try:
        # redis-py's own limit excludes the handshake. It is the shorter one, so that its error is reported.
        async with asyncio.timeout(options.connect_timeout + 0.1):
            await connection.connect()  # type: ignore[no-untyped-call]
            shared = SharedConnection(connection, options.timeout)
            try:
                # A server that refuses names for clients works without.
                await shared.ask(pack(("CLIENT", "SETNAME", "taskharbor")), 1)
            except BaseException:
                shared.abort("no handshake")
                raise
    except (TimeoutError, ConnectionLost) as error:
        if isinstance(error, ConnectionLost) and error.__cause__ is not None:
            raise failed(error, place) from None
        limit = min(options.connect_timeout, options.timeout)
        raise BackendUnavailable(f"{place}: connected, but no answer within {limit:g} s") from None
    except RedisError as error:
        raise _refused(error, place, options.connect_timeout) from error
    return shared


def _connection(address: Address, options: RedisOptions, settings: dict[str, Any]) -> Connection:
    if not address.port:
        return cast("Connection", UnixDomainSocketConnection(path=address.host, **settings))
    settings |= {"host": address.host, "port": address.port, "socket_keepalive_options": _KEEPALIVE}
    if not options.tls:
        return Connection(**settings)
    encrypted = SSLConnection(**settings)
    # redis-py's own context would trust the system's authorities beside the authority in the URL.
    encrypted.ssl_context.context = tls_context(options)
    return encrypted


@lru_cache(maxsize=8)
def tls_context(options: RedisOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.tls_ca)
        if options.tls_cert is not None:
            context.load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as error:
        files = ", ".join(filter(None, (options.tls_ca, options.tls_cert, options.tls_key)))
        raise InvalidRequest(
            f"the files that tls_ca, tls_cert and tls_key name ({files}) cannot be used: {error.strerror or error}"
        ) from None
    if not options.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _refused(error: RedisError, place: str, limit: float) -> TaskHarborError:
    """Make the error for a connection that failed."""
    found = error.__context__
    if isinstance(error, InvalidResponse):
        why = f"that is not a Redis server: {error}"
    elif isinstance(found, TimeoutError):
        why = f"no connection within {limit:g} s"
    elif isinstance(found, ssl.SSLCertVerificationError):
        why = f"the server's certificate is not trusted ({found.verify_message}): name its authority with tls_ca"
    elif isinstance(found, ssl.SSLError):
        why = f"no TLS with this server ({found.reason}): is it redis:// instead of rediss://, or the wrong port?"
    elif isinstance(found, ConnectionError) and found.errno:
        # The event loop's own message does not give the reason.
        why = os.strerror(found.errno)
    elif isinstance(found, OSError):
        why = found.strerror or str(found)
    elif error.status_code is None and isinstance(error, exceptions.ConnectionError):
        why = str(error)
    else:
        return translated(error, place)
    return BackendUnavailable(f"{place}: {why}")


def failed(error: ConnectionLost, place: str) -> TaskHarborError:
    """Make the error for a call whose reply never came."""
    cause = error.__cause__
    if isinstance(cause, RedisError) and cause.status_code is not None:
        return translated(cause, place)
    return BackendUnavailable(f"{place}: the connection was lost before the answer came ({error})")


class Server:
    """A server that `locate` finds: at one fixed address, or at the address that the sentinels name. Connections are made on
    demand."""

    def __init__(
        self, locate: Callable[[], Awaitable[Address]] | Address, options: RedisOptions, library: Library
    ) -> None:
        self._locate = locate
        self._options = options
        self._library = library
        self._by_eval = False
        """True if the server refused the library. Tried again with every new connection."""
        self._shared: SharedConnection | None = None
        self._connections: weakref.WeakSet[SharedConnection] = weakref.WeakSet()
        """All connections of this server that are still in use, the listener's included."""
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self.address = locate if isinstance(locate, Address) else None
        """The address at which it was found last."""

    @property
    def is_connected(self) -> bool:
        return self._shared is not None and self._shared.is_open

    async def connect(self) -> SharedConnection:
        """Return the shared connection. If this raises, nothing of the caller's was sent."""
        if self._shared is None or not self._shared.is_open:
            async with self._connecting:
                if self._shared is None or not self._shared.is_open:
                    self._shared = await self.another_connection()
                    self._by_eval = False
        return self._shared

    async def another_connection(self) -> SharedConnection:
        """Make a connection for the caller alone."""
        self._refuse_if_closed()
        self.address = self._locate if isinstance(self._locate, Address) else await self._locate()
        connection = await connect(self.address, self._options)
        self._connections.add(connection)
        self._refuse_if_closed()
        return connection

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            self.drop("this handle was closed")
            raise BackendUnavailable(f"{self._options.place}: this handle was closed")

    def drop(self, why: str, *, after: SharedConnection | None = None) -> None:
        """Close all connections: the cause that ended one has probably ended the others. With `after`, the connection that
        failed: do nothing if there is a newer one already."""
        if after is not None and self._shared is not None and self._shared is not after:
            return
        self._shared = None
        for connection in list(self._connections):
            connection.abort(why)

    def close(self) -> None:
        """Close all connections. The event loop closes the sockets in its next turns."""
        self._is_closed = True
        self.drop("this handle was closed")

    # -- commands and calls -------------------------------------------------------------------------------

    async def call(
        self, calls: Sequence[RedisCall], *, is_again: bool = False, asking: bool = False
    ) -> list[Any]:
        """Run functions and commands, and return their answers. Several are one transaction. Loads the library on a server that
        lacks it. Raises ConnectionLost, or the first ResponseError."""
        is_full = False
        for _ in range(_LOADS):
            # For this try only: a concurrent call may change `_by_eval`.
            by_eval = self._by_eval or is_full
            try:
                return await self._call(calls, is_again, asking, by_eval)
            except ResponseError as error:
                if code_of(error) == "OOM" and not by_eval:
                    # A server with full memory refuses a function at once, but a script only when it needs memory. So a script
                    # can still find or change jobs that exist.
                    is_full = True
                elif not await self._is_prepared(error, calls[0].function, by_eval):
                    raise
        raise BackendUnavailable(
            f"{self.address}: the server forgets functions as soon as it has loaded them"
        )

    async def _call(
        self, calls: Sequence[RedisCall], is_again: bool, asking: bool, by_eval: bool
    ) -> list[Any]:
        assert not by_eval or len({self._library.flags.get(one.function) for one in calls}) == 1, (
            "by EVAL, calls of different scripts in one transaction could fail alone"
        )
        wait = self._packed_wait(calls)
        packed = [self.packed(call, is_again, by_eval) for call in calls]
        parts = [_ASKING, *packed] if asking else packed
        if len(calls) > 1:
            parts = [_MULTI, *parts, _EXEC]
        replies = await self._ask(b"".join((*parts, wait)), len(parts) + (_WAIT_REPLIES if wait else 0))
        answers = replies[len(parts) - 1 : len(parts)]
        if len(calls) > 1:
            # The reason is in the reply to the refused command. EXEC only says that one was refused.
            answers = replies[: len(parts)] if isinstance(answers[0], ResponseError) else answers[0]
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise answer
        if wait:
            self._check_waited(replies[-1])
        return answers

    def packed(self, call: RedisCall, is_again: bool = False, by_eval: bool | None = None) -> bytes:
        """Return the bytes of the command for a call."""
        function, keys, args = call
        if function not in self._library.flags:
            return pack((function, *keys, *args))
        words = (len(keys), *keys, *args, int(is_again))
        if self._by_eval if by_eval is None else by_eval:
            return pack(("EVALSHA", self._library.hashes[function], *words, function))
        return pack(("FCALL", f"{self._library.name}_{function}", *words))

    async def _ask(self, packed: bytes, count: int) -> list[Any]:
        connection = await self.connect()
        try:
            replies = await connection.ask(packed, count)
        except ConnectionLost as error:
            self.drop(str(error), after=connection)
            raise
        for reply in replies:
            if isinstance(reply, ResponseError) and code_of(reply) in REDISCOVER:
                self.drop(str(reply), after=connection)
        return replies

    async def _is_prepared(self, error: ResponseError, function: str, by_eval: bool) -> bool:
        """Return True if a failed call may succeed now: its function was missing and is loaded, or EVAL is to be used."""
        text = str(error).lower()
        if not by_eval and "'fcall'" in text and ("unknown command" in text or code_of(error) == "NOPERM"):
            # This user, or every user, is forbidden to run functions on the server.
            self._by_eval = True
            return True
        if code_of(error) != "NOSCRIPT" and "function not found" not in text:
            return False
        library = self._library
        kind, source = ("SCRIPT", library.scripts[function]) if by_eval else ("FUNCTION", library.source)
        (reply,) = await self._ask(pack((kind, "LOAD", source)), 1)
        if isinstance(reply, ResponseError) and "already exists" not in str(reply):
            if by_eval or code_of(reply) in REDISCOVER:
                raise reply
            # FUNCTION is forbidden here, or the server takes no changes at the moment. EVAL needs no change.
            self._by_eval = True
        return True

    # -- waiting for replicas -----------------------------------------------------------------------------

    def _packed_wait(self, calls: Sequence[RedisCall]) -> bytes:
        """Return the commands that wait for replicas or for the append-only file.

        WAIT and WAITAOF wait for the last write of their own connection. A repeated call may find that an earlier try has written
        everything, on another connection. So a key that vanishes at once is written in any case.
        """
        if not self._options.waits or self._library.flags.get(calls[0].function, "no-writes") == "no-writes":
            return b""
        options = self._options
        mark = pack(("SET", f"{calls[0].keys[0]}:waited", "", "PX", 1))
        wait = (
            ("WAIT", options.wait_replicas) if options.wait_aof is None else ("WAITAOF", 1, options.wait_aof)
        )
        return mark + pack((*wait, max(1, round(options.wait_timeout * 1000))))

    def _check_waited(self, reply: Any) -> None:
        options = self._options
        # The first value of WAITAOF's reply tells if the server itself has the write.
        own, replicas = reply if isinstance(reply, list) else (1, reply)
        wanted, where = options.wait_replicas, "in memory"
        if options.wait_aof is not None:
            wanted, where = options.wait_aof, "in their append-only files"
        if isinstance(reply, ResponseError) or own < 1 or replicas < wanted:
            raise BackendUnavailable(
                f"{options.place}: the change was made, but {wanted} replicas did not have it {where} within "
                f"{options.wait_timeout:g} s: a failover now could lose it; repeating the call is safe"
            )
