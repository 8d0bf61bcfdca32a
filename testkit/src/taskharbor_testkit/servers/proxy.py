"""A proxy between clients and a server that loses requests, answers and connections when a test says so; with TLS if wanted.

A server can be stopped; a network fails in more ways. Connections are cut, refused, or stay open and carry nothing, and
answers get lost after the work was done. Here each of these happens on demand, at the message that a test names. Messages
are passed on whole: a connection never ends in the middle of one unless both ends agree that it did.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from taskharbor_testkit.servers.process import HOST, Closing, free_port
from taskharbor_testkit.servers.protocols import PostgresProtocol, RedisProtocol, Sent, WireProtocol

Fault = Literal["drop", "lose_answer"]
_Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_CONTROL_TIMEOUT = 30.0
"""Only a proxy whose thread has died of an error takes longer."""
_CHUNK = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class _ArmedFault:
    """Happens to the n-th request that fits."""

    fault: Fault
    match: bytes | None
    remaining: int

    def is_due(self, protocol: WireProtocol, sent: Sent) -> bool:
        fits = sent.starts if self.match is None else protocol.runs(sent.message, self.match)
        self.remaining -= fits
        return fits and self.remaining == 0


class FaultProxy(Closing):
    """A proxy on a thread of its own. Every control has taken effect when it returns.

    With `tls`, clients talk TLS to the proxy, and the proxy talks to the server without. A client in the same process must
    not block while it holds the GIL: the proxy could not answer it.
    """

    def __init__(
        self, host: str, port: int, protocol: Callable[[], WireProtocol], *, tls: ssl.SSLContext | None = None
    ) -> None:
        self.port = free_port()
        self.triggered = threading.Event()
        """Set when the armed fault has happened and the client's connection is closed. Arming clears it."""
        self._target = (host, port)
        self._protocol = protocol
        self._tls = tls
        self._armed: _ArmedFault | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._connections: set[asyncio.Task[None] | None] = set()
        self._listener: asyncio.Server | None = None
        # Named, because the process may have made uvloop the default.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._do(self._listen)

    @classmethod
    def to(cls, url: str, *, tls: ssl.SSLContext | None = None) -> Self:
        """A proxy to the PostgreSQL or Redis server of this URL."""
        parts = urlsplit(url)
        if parts.scheme == "redis":
            return cls(parts.hostname or HOST, parts.port or 6379, RedisProtocol, tls=tls)
        return cls(parts.hostname or HOST, parts.port or 5432, PostgresProtocol, tls=tls)

    def url_for(self, url: str) -> str:
        """The URL by way of the proxy."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        scheme = f"{parts.scheme}s" if self._tls else parts.scheme
        return urlunsplit(parts._replace(scheme=scheme, netloc=f"{user}{at}{HOST}:{self.port}"))

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def cut(self) -> None:
        """Reset every connection, at both ends. New ones are taken as before."""
        self._do(self._cut)

    def refuse(self) -> None:
        """Turn new connections away. Those that are open stay."""
        self._do(self._stop_listening)

    def accept(self) -> None:
        """Take new connections again, at the same port."""
        self._do(self._listen)

    def reroute(self, host: str, port: int) -> None:
        """Lead new connections to another server. Those that are open stay where they are until `cut()`."""
        self._target = (host, port)

    def stall(self) -> None:
        """Carry nothing in either direction, not even the news that one end has gone. New connections hang likewise."""
        self._do(self._flows.clear)

    def flow(self) -> None:
        """Carry on, with everything that piled up."""
        self._do(self._flows.set)

    def cut_before_request(self, n: int = 1) -> None:
        """Drop the connection that sends the n-th request from now, before the server sees any of it.

        A request is what the server answers as one: a plain query, or all messages of a client up to its Sync; for Redis
        a command, or all from MULTI to EXEC, but none of those that introduce the client (HELLO, AUTH, SELECT ...).
        """
        self._arm(_ArmedFault("drop", None, n))

    def cut_after_request(self, n: int = 1) -> None:
        """Let the server carry out the n-th request from now, and drop the connection instead of passing the answer on."""
        self._arm(_ArmedFault("lose_answer", None, n))

    def on_request(self, match: bytes, then: Fault, *, n: int = 1) -> None:
        """The same for the n-th that runs something that contains these bytes.

        They are looked for in the text of queries, of those prepared earlier too, in parameters and in copied data.
        A statement that is only prepared is not run. For Redis, in the command and its arguments.
        """
        self._arm(_ArmedFault(then, match, n))

    def disarm(self) -> None:
        """Nothing will happen by itself any more."""
        self._arm(None)

    def close(self) -> None:
        """As `cut()` and `refuse()`, for good."""
        if not self._loop.is_closed():
            self._do(self._stop_listening)
            self._do(self._cut)
            # One more turn: transports that were aborted close themselves in it.
            self._do(lambda: asyncio.sleep(0))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _do(self, control: Callable[[], Any]) -> None:
        """Run it between two events of the proxy's thread."""

        async def run() -> None:
            if asyncio.iscoroutine(answer := control()):
                await answer

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(_CONTROL_TIMEOUT)

    def _arm(self, fault: _ArmedFault | None) -> None:
        def arm() -> None:
            self.triggered.clear()
            self._armed = fault

        self._do(arm)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, HOST, self.port, ssl=self._tls)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _cut(self) -> None:
        connections = [connection for connection in self._connections if connection is not None]
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        task = asyncio.current_task()
        self._connections.add(task)
        connection = _Connection(self)
        writers = [writer]
        try:
            await self._flows.wait()
            server = await asyncio.open_connection(*self._target)
            writers.append(server[1])
            await connection.carry((reader, writer), server)
            for end in writers:
                end.close()
            for end in writers:
                await end.wait_closed()
        except (OSError, asyncio.CancelledError):
            # Both ends learn at once, and by a RST, that there is no connection any more.
            for end in writers:
                if not end.transport.is_closing():
                    sock = end.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                end.transport.abort()
            for end in writers:
                with suppress(OSError):
                    await end.wait_closed()
        finally:
            self._connections.discard(task)
            if connection.answers_to_pass is not None:
                self.triggered.set()


class _Connection:
    """One client's connection through the proxy, and the fault that may happen to it."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.answers_to_pass: int | None = None
        """The number of answers that still reach the client before one is lost; None: all."""
        self._proxy = proxy
        self._protocol = proxy._protocol()
        self._listens = asyncio.Event()
        """Cleared when the request whose answer is to be lost is complete: what follows must not be carried out."""
        self._listens.set()
        self._is_lost = False

    async def carry(self, client: _Stream, server: _Stream) -> None:
        """Until one end closes; raises ConnectionResetError for a fault."""
        pumps = [
            asyncio.ensure_future(self._pump(client[0], server[1], self._from_client)),
            asyncio.ensure_future(self._pump(server[0], client[1], self._from_server)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            await self._proxy._flows.wait()
            for pump in done:
                pump.result()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: Callable[[bytes], bytes]
    ) -> None:
        while data := await reader.read(_CHUNK):
            await self._proxy._flows.wait()
            writer.write(passed(data))
            if self._is_lost:
                raise ConnectionResetError
            await writer.drain()
            if passed == self._from_client:
                await self._listens.wait()

    def _from_client(self, data: bytes) -> bytes:
        """The bytes that reach the server."""
        passed = bytearray()
        for sent in self._protocol.from_client(data):
            armed = self._proxy._armed
            if armed is not None and armed.is_due(self._protocol, sent):
                self._proxy._armed = None
                # A request that is complete, or goes on with data only, is among the unanswered already.
                self.answers_to_pass = self._protocol.unanswered - (not self._protocol.open)
                if armed.fault == "drop":
                    self._is_lost = True
                    return b""
            passed += sent.message
            if self.answers_to_pass is not None and sent.ends:
                self._listens.clear()
                break
        return bytes(passed)

    def _from_server(self, data: bytes) -> bytes:
        """The bytes that reach the client."""
        passed = bytearray()
        for message, answers, wants_more in self._protocol.from_server(data):
            if self.answers_to_pass == 0 and answers:
                self._is_lost = True
                break
            if self.answers_to_pass == 0 and not wants_more:
                continue
            passed += message
            if wants_more:
                # The client is asked for its data, without which the request is never carried out.
                self._listens.set()
            elif answers and self.answers_to_pass is not None:
                self.answers_to_pass -= 1
        return bytes(passed)
