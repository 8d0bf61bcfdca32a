"""The HTTP protocol with an upper bound on what comes before a body: uvicorn itself has none, neither in bytes nor in time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_log = logging.getLogger("taskharbor.broker.http")
_log.setLevel(logging.CRITICAL)
"""Strangers decide how often it has something to say. Whoever looks for the reason of a 400 gives it a lower level."""

_REFUSED = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LONG = _REFUSED % b"431 Request Header Fields Too Large"
_NOT_HTTP = _REFUSED % b"400 Bad Request"


class TooLong(Exception):
    """The request line and headers are longer than allowed."""


class BoundedProtocol(HttpToolsProtocol):
    """Subclassed with other limits by `bounded`."""

    max_header_bytes = 32_768
    max_connections = 4096
    head_seconds = 10.0
    """From the first byte of a request, or from the connection, to the end of the headers."""

    _in_head = True
    _head_bytes = 0
    """Read since the head began. May include a body that came with it."""
    _is_too_long = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Ours leaves out what queries say. This one would write it wherever the program has a handler for everything.
        self.access_log = False
        self.logger = _log

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._timer = self.loop.call_later(self.head_seconds, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # A header that does not end is not handed over either, so it is seen here.
        if self._in_head and self._head_bytes > self.max_header_bytes and not self.transport.is_closing():
            self._is_too_long = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_header_bytes:
            self._is_too_long = True
            # Comes out of the parser as an error of its own, and ends in `send_400_response`.
            raise TooLong
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self.transport.write(_TOO_LONG if self._is_too_long else _NOT_HTTP)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded(*, max_header_bytes: int, max_connections: int) -> type[BoundedProtocol]:
    limits = {"max_header_bytes": max_header_bytes, "max_connections": max_connections}
    return type("BrokerProtocol", (BoundedProtocol,), limits)
