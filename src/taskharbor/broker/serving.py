"""Serves a broker: uvicorn's protocol, with a start and a stop of our own.

A stop answers long polls at once, lets running calls finish, and gives leadership back before the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec
import uvicorn

from taskharbor.broker.app import BrokerApp
from taskharbor.broker.hosts import is_loopback
from taskharbor.broker.protocol import bounded
from taskharbor.errors import InvalidRequest

DEFAULT_BIND = "127.0.0.1:7433"
KEEP_ALIVE_SECONDS = 75
GRACE_SECONDS = 10.0


class TLS(msgspec.Struct, frozen=True):
    """Files in PEM form."""

    certificate: Path
    key: Path | None = None
    """None: it is in the certificate's file."""

    def check(self) -> None:
        """Say what is wrong with the files before anything is started."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            reason = (error.reason or "not readable").replace("_", " ").lower()
            files = f"{self.certificate} with the key {self.key}" if self.key else f"{self.certificate}"
            wanted = (
                "both must be PEM files that belong together"
                if self.key
                else "it must be PEM, with its key in it"
            )
            raise InvalidRequest(f"cannot use the TLS certificate {files}: {reason}; {wanted}") from error
        except OSError as error:
            missing = error.filename or self.certificate
            raise InvalidRequest(f"cannot read the TLS file {missing}: {error.strerror}") from error


class BrokerServer(uvicorn.Server):
    """Stops when told, not at the next tick; and leaves signals to whoever started it."""

    def __init__(self, app: BrokerApp, tls: TLS | None, grace: float) -> None:
        limits = app.service.config
        protocol = bounded(max_header_bytes=limits.max_header_bytes, max_connections=limits.max_connections)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
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
        self._service = app.service
        self._grace = grace
        self._asked = asyncio.Event()
        self._forced = asyncio.Event()

    def stop(self) -> None:
        """Gracefully; the second time at once."""
        if self._asked.is_set():
            self._forced.set()
        self._asked.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        while not self._asked.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._asked.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        self._service.stop_waiting()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        tasks = set(self.server_state.tasks)
        if tasks:
            forced = asyncio.ensure_future(self._forced.wait())
            rest = asyncio.ensure_future(asyncio.wait(tasks, timeout=self._grace))
            await asyncio.wait({forced, rest}, return_when=asyncio.FIRST_COMPLETED)
            forced.cancel()
            rest.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(forced, rest, *tasks, return_exceptions=True)
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
    """Until the server given to `when_ready` is told to stop."""
    await app.service.start()
    try:
        server = BrokerServer(app, tls, grace)
        when_ready(server)
        await server.serve(sockets=[listener])
    finally:
        await app.service.close()


def parse_bind(text: str) -> tuple[str, int]:
    """`7433`, `:7433`, `127.0.0.1:7433`, `[::1]:7433`, `0.0.0.0:7433`."""
    host, colon, port = text.rpartition(":")
    host = host.strip("[]") if colon else ""
    if not port.isdecimal() or int(port) > 65_535:
        raise InvalidRequest(f"bind address {text!r}: write it like {DEFAULT_BIND}, [::1]:7433 or 7433")
    return host or "127.0.0.1", int(port)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before anything else is done: two brokers never share a port by mistake."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, since asyncio switches off the delay of small packets only where the protocol is known to be TCP.
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
    if not has_tokens and not is_loopback(host):
        raise InvalidRequest(
            f"the bind address {host} can be reached from other hosts, and no token is set: anybody could take or delete jobs"
        )


def url_of(listener: socket.socket, *, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
