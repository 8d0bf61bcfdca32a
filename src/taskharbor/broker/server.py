"""Serves a broker: uvicorn's protocol, with its own start and stop.

A stop answers long polls at once, lets running calls finish, and gives leadership back before the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from taskharbor.broker.admission import ABORT, BrokerApp
from taskharbor.broker.config import BrokerConfig, Shares
from taskharbor.drivers.waiting import set_within
from taskharbor.errors import InvalidRequest
from taskharbor.worker.health import is_loopback

if sys.platform != "win32":
    import resource

KEEP_ALIVE_SECONDS = 75
GRACE_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0
_ACCEPT_AGAIN_SECONDS = 1.0

log = logging.getLogger("taskharbor.broker")


class TLS(msgspec.Struct, frozen=True):
    """Certificate and key, as files in PEM form.

    Attributes:
        key: None: the key is in the certificate's file.
    """

    certificate: Path
    key: Path | None = None

    def check(self) -> None:
        """Check the files before anything is started. Raises InvalidRequest."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            reason = (error.reason or "not readable").replace("_", " ").lower()
            files = f"{self.certificate}, with its key in {self.key or 'the same file'}"
            raise InvalidRequest(
                f"cannot use the TLS certificate {files}: {reason}; both must be PEM and belong together"
            ) from error
        except OSError as error:
            missing = error.filename or self.certificate
            raise InvalidRequest(f"cannot read the TLS file {missing}: {error.strerror}") from error


_log = logging.getLogger("taskharbor.broker.http")
_log.setLevel(logging.CRITICAL)
"""Clients decide how often it logs. To find the reason of a 400, give it a lower level."""

_REFUSED = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LONG = _REFUSED % b"431 Request Header Fields Too Large"
_NOT_HTTP = _REFUSED % b"400 Bad Request"


class BoundedProtocol(HttpToolsProtocol):
    """HTTP with limits on everything around a body: uvicorn has none, neither in bytes nor in time.

    Attributes:
        head_seconds: Seconds from the first byte of a request, or from the connection, to the end of the headers.
        _head_bytes: Bytes since the last headers or the last piece of a body: of headers, of trailers, or of a chunk's
            extensions.
    """

    head_seconds = 10.0

    _head_bytes = 0
    _is_too_long = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, on_lost: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_lost = on_lost
        self._limits: BrokerConfig = self.config.app.service.config  # type: ignore[union-attr]
        # The broker's own access log leaves out queries. uvicorn's would write them to any handler of the root logger.
        self.access_log = False
        self.logger = _log

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_seconds, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        # The parser does not report a header that does not end, so it is checked here.
        if self._head_bytes > self._limits.max_header_bytes and not self.transport.is_closing():
            self._is_too_long = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._is_too_long = True
            # The parser turns it into its own error, which ends in `send_400_response`.
            raise ValueError("the request line and headers are longer than allowed")
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self.transport.write(_TOO_LONG if self._is_too_long else _NOT_HTTP)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Open files, at the least, that connections leave to the store and to the program.
_FREE_FILES = 64


def most_connections(wanted: int) -> int:
    """Return the most connections that the limit of open files allows."""
    if sys.platform == "win32":
        return wanted
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        wanted
        if files == resource.RLIM_INFINITY
        else min(wanted, max(1, files - max(_FREE_FILES, files // 8)))
    )


def place_of(address: str) -> str:
    """Return the name under which connections of an address are counted. One host may have a whole /64 network of IPv6."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))


class Door:
    """Accepts connections. They are counted from then on, so also while TLS shakes hands: asyncio's server has no such limit, and
    writes thousands of lines when the process has no file left."""

    def __init__(
        self, listener: socket.socket, make: Callable[..., asyncio.Protocol], app: BrokerApp
    ) -> None:
        limits = app.service.config
        self._listener = listener
        self._make = make
        self._counted = Shares(most_connections(limits.max_connections), limits.max_per_address)
        self._opening: set[asyncio.Task[None]] = set()

    async def run(self, tls: ssl.SSLContext | None) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listener)
                except OSError as error:
                    log.warning("cannot accept connections: %s; trying again", error.strerror)
                    await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                    continue
                place = place_of(address[0])
                if self._counted.take(place):
                    task = loop.create_task(self._open(connection, place, tls))
                    self._opening.add(task)
                    task.add_done_callback(self._opening.discard)
                else:
                    connection.close()
                # An accept that need not wait lets no other task run.
                await asyncio.sleep(0)
        finally:
            for task in self._opening:
                task.cancel()

    async def _open(self, connection: socket.socket, place: str, tls: ssl.SSLContext | None) -> None:
        is_counted = True

        def uncount() -> None:
            nonlocal is_counted
            if is_counted:
                is_counted = False
                self._counted.give_back(place)

        # The longest time of a handshake; a connection without TLS has none.
        times = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": HANDSHAKE_SECONDS}
        make = partial(self._make, on_lost=uncount)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make, connection, ssl=tls, **(times if tls else {})
            )
        except BaseException as error:
            # Nobody else closes it if there never was a transport.
            connection.close()
            uncount()
            if not isinstance(error, (OSError, EOFError)):
                raise


class BrokerServer(uvicorn.Server):
    """A server that stops as soon as it is told, not at the next tick. It leaves signals to the program that started it."""

    def __init__(self, app: BrokerApp, tls: TLS | None, grace: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                ssl_certfile=None if tls is None else str(tls.certificate),
                ssl_keyfile=None if tls is None or tls.key is None else str(tls.key),
            )
        )
        self._app = app
        self._service = app.service
        self._accepting: list[asyncio.Task[None]] = []
        self._grace = grace
        self._asked = asyncio.Event()
        self._forced = asyncio.Event()

    def stop(self) -> None:
        """Stop gracefully; the second time at once."""
        if self._asked.is_set():
            self._forced.set()
        self._asked.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        make = partial(
            BoundedProtocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        doors = [Door(listener, make, self._app) for listener in sockets or ()]
        self._accepting = [asyncio.create_task(door.run(self.config.ssl)) for door in doors]
        self.started = True

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not await set_within(self._asked, 1):
            await self.on_tick(0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in sockets or ():
            listener.close()
        self._service.stop_waiting()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        tasks = set(self.server_state.tasks)
        if tasks:
            forced = asyncio.ensure_future(self._forced.wait())
            ended = asyncio.ensure_future(asyncio.wait(tasks, timeout=self._grace))
            await asyncio.wait({forced, ended}, return_when=asyncio.FIRST_COMPLETED)
            for task in (forced, ended, *tasks):
                task.cancel()
            await asyncio.gather(forced, ended, *tasks, return_exceptions=True)
        for connection in list(self.server_state.connections):
            connection.transport.close()


async def serve(
    app: BrokerApp,
    listener: socket.socket,
    *,
    tls: TLS | None = None,
    grace: float = GRACE_SECONDS,
    when_ready: Callable[[BrokerServer], None] = lambda server: None,
) -> None:
    """Serve until `when_ready`'s server is told to stop."""
    await app.service.start()
    try:
        server = BrokerServer(app, tls, grace)
        when_ready(server)
        await server.serve(sockets=[listener])
    finally:
        await app.service.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, bound before anything else is done: two brokers never share a port by mistake."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, because asyncio switches off the delay of small packets only if it knows that the protocol is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def check_exposure(host: str, *, has_tokens: bool) -> None:
    """Raise InvalidRequest if other hosts could call without a token."""
    if not has_tokens and not is_loopback(host):
        raise InvalidRequest(
            f"the bind address {host} can be reached from other hosts, and no token is set: anybody could take or delete jobs"
        )


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
