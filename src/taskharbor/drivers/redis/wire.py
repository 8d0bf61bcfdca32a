"""One connection to one server, as thin as it can be: hiredis packs and parses, the event loop carries.

Calls share it. What is written first is answered first, so a caller who gives up costs nothing: its answer is read and
dropped. Nothing is ever repeated here; who lost an answer is told so, and decides.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import hiredis

from taskharbor.drivers.redis.options import Address, Options
from taskharbor.errors import InvalidRequest

_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000))
"""What a dead connection looks like is silence; without these the kernel waits for hours before it says so."""


class ConnectionLost(Exception):
    """No answer will come. Whether the server carried out what was sent is not known."""


class _Question:
    __slots__ = ("answer", "answers", "asked_at", "count")

    def __init__(self, answer: asyncio.Future[list[Any]], count: int, asked_at: float) -> None:
        self.answer = answer
        self.count = count
        self.asked_at = asked_at
        self.answers: list[Any] = []


class Wire(asyncio.Protocol):
    """Answers that are errors come as `hiredis.ReplyError` values, in their place."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._questions: deque[_Question] = deque()
        self._watchdog: asyncio.TimerHandle | None = None
        self._why = ""
        self.is_open = False
        self.on_message: Callable[[Any], None] | None = None
        """Takes everything that comes, once this connection has subscribed to something."""
        self.on_lost: Callable[[], None] = lambda: None

    def ask(self, packed: bytes, count: int) -> asyncio.Future[list[Any]]:
        """Send commands that are answered by `count` replies. Raises ConnectionLost at once if nothing can be sent any more."""
        if not self.is_open or self._transport is None:
            raise ConnectionLost(self._why or "the connection is closed")
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        self._questions.append(_Question(answer, count, self._loop.time()))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._timeout, self._check_silence)
        self._transport.write(packed)
        return answer

    def tell(self, packed: bytes) -> None:
        """Send what is answered, if at all, by messages."""
        if self._transport is not None:
            self._transport.write(packed)

    def abort(self, why: str) -> None:
        """Drop it at once: who waits for an answer learns that none will come."""
        if self._transport is not None:
            self._transport.abort()
        self._end(why)

    # -- called by the event loop -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asked for its class: other event loops bring transports that are none of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if self.on_message is not None:
                    self.on_message(reply)
                elif self._questions:
                    self._take(reply)
                else:
                    # Only a farewell comes unasked: too many clients, or an idle one is sent away.
                    self.abort(str(reply))
                    return
        except hiredis.ProtocolError as error:
            self.abort(f"that is not a Redis server: {error}")

    def _take(self, reply: Any) -> None:
        question = self._questions[0]
        question.answers.append(reply)
        if len(question.answers) == question.count:
            self._questions.popleft()
            if not question.answer.done():
                question.answer.set_result(question.answers)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(str(error) if error else "the server closed the connection")

    def _end(self, why: str) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._why = why
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        while self._questions:
            question = self._questions.popleft()
            if not question.answer.done():
                question.answer.set_exception(ConnectionLost(why))
        self.on_lost()

    def _check_silence(self) -> None:
        self._watchdog = None
        if not self._questions:
            return
        left = self._questions[0].asked_at + self._timeout - self._loop.time()
        if left <= 0:
            self.abort(f"no answer for {self._timeout:g} s")
        else:
            self._watchdog = self._loop.call_later(left, self._check_silence)


async def dial(address: Address, options: Options) -> Wire:
    """A connection that nobody has introduced themselves on. Raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()

    def make() -> Wire:
        return Wire(options.timeout)

    async with asyncio.timeout(options.connect_timeout):
        if not address.port:
            _, wire = await loop.create_unix_connection(make, address.host)
            return wire
        context = tls_context(options) if options.tls else None
        transport, wire = await loop.create_connection(
            make, address.host, address.port, ssl=context, server_hostname=address.host if context else None
        )
    _keep_alive(transport.get_extra_info("socket"))
    return wire


@lru_cache(maxsize=8)
def tls_context(options: Options) -> ssl.SSLContext:
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


def _keep_alive(sock: Any) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
