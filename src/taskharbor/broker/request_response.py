"""The two directions of a request: a body that is counted while it is read, and an answer that is sent once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Send

from taskharbor.broker.config import BrokerConfig, Shares
from taskharbor.broker.error_responses import Problem

T = TypeVar("T")

_ON_EVERY_ANSWER = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_DRAINED_BYTES = 64 * 1_048_576
_DRAINED_SECONDS = 2.0
# Bytes per second. A body or an answer that goes on more slowly for longer than `body_seconds` is cut.
_SLOWEST = 65_536
_SENT_AT_ONCE = 65_536


class ClientGone(Exception):
    """The client has left, so there is nobody to answer."""


class Exchange(msgspec.Struct):
    """A request's `receive`, with limits of size and time, and its `send`.

    Attributes:
        _abort: The function that cuts the connection, if the server gives one.
        most_bytes: The most bytes of the body.
        is_reading: True for a call that changes nothing.
        status: The status of the answer, once the answer has begun.
    """

    _receive: Receive
    _send: Send
    _config: BrokerConfig
    _abort: Callable[[], None] | None
    most_bytes: int = 0
    is_reading: bool = False
    _caller: str | None = None
    _under_way: Shares | None = None
    _bytes: Shares | None = None
    _held: int = 0
    _began: float = 0.0
    _got: int = 0
    _is_whole: bool = False
    status: int | None = None

    def begin(self, caller: str, under_way: Shares, held: Shares) -> None:
        """Count this request, which was taken from `under_way`, and its bytes for a caller, until `release`."""
        self._caller, self._under_way, self._bytes = caller, under_way, held
        self._began = asyncio.get_running_loop().time()

    def hold(self, size: int, *, may_refuse: bool = True) -> None:
        """Count bytes of the body or the answer. Raises `Problem` if the caller, or all callers, hold too many."""
        if self._bytes is None or self._caller is None:
            return
        if self._bytes.take(self._caller, size):
            self._held += size
        elif may_refuse:
            detail = "the requests and answers that are on their way take all the memory that the broker has for them"
            raise Problem("too_many_requests", detail, retry_after=1, Connection="close")

    def release(self) -> None:
        """Count nothing any more: the request has ended."""
        if self._caller is not None and self._under_way is not None and self._bytes is not None:
            self._under_way.give_back(self._caller)
            self._bytes.give_back(self._caller, self._held)
            self._caller = None

    async def receive(self) -> Message:
        """Return the next message of the request. Raises `Problem` if it is too large or too slow, ClientGone if the client
        left."""
        if self._is_whole:
            # After the body only the end of the connection follows, at any time.
            return await self._receive()
        silence = self._config.body_seconds
        late = self._began + _seconds(silence, self._got) - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(0.0, min(silence, late))):
                message = await self._receive()
        except TimeoutError:
            detail = "the rest of the request did not come in time"
            raise Problem("slow_body", detail, Connection="close") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        size = len(message.get("body", b""))
        self._got += size
        self._is_whole = not message.get("more_body", False)
        if self._got > self.most_bytes:
            raise too_large(self.most_bytes)
        self.hold(size)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer, with the headers that every answer has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *_ON_EVERY_ANSWER]
        size = len(message.get("body", b""))
        if size <= _SENT_AT_ONCE or message.get("more_body"):
            await self._send(message)
            return
        # The server keeps what the client has not read. It waits before the second message until the first has gone.
        await self._send({**message, "more_body": True})
        try:
            async with asyncio.timeout(_seconds(self._config.body_seconds, size)):
                await self._send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            if self._abort is not None:
                self._abort()
            raise ClientGone from None

    async def give(self, problem: Problem) -> None:
        """Answer with a problem, unless an answer has begun: then the server can only cut the connection."""
        if self.status is not None:
            return
        response = problem.response()
        status, headers = response.status_code, response.raw_headers
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        is_unread = (
            problem.status == 413 or (problem.status == 429 and self._got > 0)
        ) and not self._is_whole
        await self.send({"type": "http.response.body", "body": response.body, "more_body": is_unread})
        if is_unread:
            await self._drain()
            await self.send({"type": "http.response.body", "body": b""})

    async def _drain(self) -> None:
        """Read on for a moment. If a connection is closed with unread bytes, the answer is lost."""
        left = _DRAINED_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_DRAINED_SECONDS, self._config.body_seconds)):
                while left > 0:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def _seconds(silence: float, size: int) -> float:
    """Return the longest time for so many bytes of a body or an answer."""
    return silence + size / _SLOWEST


def too_large(limit: int) -> Problem:
    """The refusal of a body that is larger than `limit` bytes."""
    # The bytes that are still on their way would be taken for the next request.
    return Problem("too_large", f"the body is larger than {limit} bytes", Connection="close")


@contextlib.contextmanager
def watched_client(request: Request) -> Iterator[asyncio.Future[Any]]:
    """Give a future that is done when the client of a request has left. Its body must have been read.

    A client that leaves in the middle of a long poll must not be given jobs that nobody will do.
    """
    left = asyncio.ensure_future(request.receive())
    try:
        yield left
    finally:
        left.cancel()


async def unless_left(left: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work. If the client leaves first, cancel the work and raise ClientGone."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
    if not task.done() or task.cancelled():
        raise ClientGone
    return task.result()
