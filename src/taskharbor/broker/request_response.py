"""The two directions of a request: a body that is counted while it is read, and an answer that is sent once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Send

from taskharbor.broker.config import BrokerConfig
from taskharbor.broker.error_responses import Problem

T = TypeVar("T")

_ON_EVERY_ANSWER = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_DRAINED_BYTES = 64 * 1_048_576
_DRAINED_SECONDS = 2.0


class ClientGone(Exception):
    """The client has left, so there is nobody to answer."""


class Exchange(msgspec.Struct):
    """A request's `receive`, with limits of size and time, and its `send`."""

    _receive: Receive
    _send: Send
    _config: BrokerConfig
    _got: int = 0
    _is_whole: bool = False
    status: int | None = None
    """The status of the answer, once the answer has begun."""

    async def receive(self) -> Message:
        """Return the next message of the request. Raises `Problem` if it is too large or too slow, ClientGone if the client
        left."""
        if self._is_whole:
            # After the body only the end of the connection follows, at any time.
            return await self._receive()
        try:
            async with asyncio.timeout(self._config.body_seconds):
                message = await self._receive()
        except TimeoutError:
            detail = "the rest of the request did not come in time"
            raise Problem("slow_body", detail, Connection="close") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._got += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._got > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer, with the headers that every answer has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *_ON_EVERY_ANSWER]
        await self._send(message)

    async def give(self, problem: Problem) -> None:
        """Answer with a problem, unless an answer has begun: then the server can only cut the connection."""
        if self.status is not None:
            return
        response = problem.response()
        status, headers = response.status_code, response.raw_headers
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        is_unread = problem.status == 413 and not self._is_whole
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
