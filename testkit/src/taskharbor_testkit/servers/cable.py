"""The cable between clients and a PostgreSQL or Redis server, with somebody's hand on it.

A server can be stopped; a network fails in more ways. Connections are cut, refused, or stay open and carry nothing, and
answers get lost after the work was done. Here each of these happens when a test says so, at the message it says.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from taskharbor_testkit.servers.conversation import Conversation
from taskharbor_testkit.servers.hub import READ, Hub
from taskharbor_testkit.servers.link import Fate, Link, Trap, Traps
from taskharbor_testkit.servers.ports import HOST, free_port
from taskharbor_testkit.servers.redis_wire import RedisConversation
from taskharbor_testkit.servers.wire import PostgresConversation

_BACKLOG = 128
_PORTS_TO_TRY = 5


class Cable:
    """A proxy on a thread of its own, for connections without TLS. Every control has taken effect when it returns.

    A client in the same process must not block with the GIL in its hands: the cable could not answer it.
    """

    def __init__(self, host: str, port: int, talk: Callable[[], Conversation] = PostgresConversation) -> None:
        self._talk = talk
        self._target = (host, port)
        self._traps = Traps()
        self._stalled = False
        self._closed = False
        self._links: set[Link] = set()
        self._listener, self.port = _listen_somewhere()
        self._hub = Hub(f"cable-{self.port}")
        self._hub.do(self._watch_listener)

    @classmethod
    def to(cls, url: str) -> Self:
        """A cable to the server of this URL."""
        parts = urlsplit(url)
        if parts.scheme == "redis":
            return cls(parts.hostname or HOST, parts.port or 6379, RedisConversation)
        return cls(parts.hostname or HOST, parts.port or 5432)

    def url_for(self, url: str) -> str:
        """The URL by way of the cable."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{HOST}:{self.port}"))

    @property
    def triggered(self) -> threading.Event:
        """What was armed has happened, and the client's connection is closed. Arming clears it."""
        return self._traps.triggered

    @property
    def connections(self) -> int:
        """How many are open now."""
        return self._hub.do(lambda: len(self._links))

    def cut(self) -> None:
        """Reset every connection, at both ends. New ones are taken as before."""
        self._hub.do(self._cut)

    def refuse(self) -> None:
        """Turn new connections away. Those that are open stay."""
        self._hub.do(self._stop_listening)

    def accept(self) -> None:
        """Take new connections again, at the same port."""
        self._hub.do(self._start_listening)

    def reroute(self, host: str, port: int) -> None:
        """Lead new connections to another server. Those that are open stay where they are until `cut()`."""

        def change() -> None:
            self._target = (host, port)

        self._hub.do(change)

    def stall(self) -> None:
        """Carry nothing in either direction, not even the news that one end has gone. New connections hang likewise."""
        self._hub.do(lambda: self._set_stalled(True))

    def flow(self) -> None:
        """Carry on, with everything that piled up."""
        self._hub.do(lambda: self._set_stalled(False))

    def cut_before_request(self, n: int = 1) -> None:
        """Drop the connection that sends the n-th request from now, before the server sees any of it.

        A request is what the server answers as one: a plain query, or all messages of a client up to its Sync; for Redis
        a command, or all from MULTI to EXEC, but none of those that introduce the client (HELLO, AUTH, SELECT ...).
        """
        self._arm(Trap("drop", None, n))

    def cut_after_request(self, n: int = 1) -> None:
        """Let the server carry out the n-th request from now, and drop the connection instead of passing the answer on."""
        self._arm(Trap("lose_answer", None, n))

    def on_request(self, match: bytes, then: Fate, *, n: int = 1) -> None:
        """The same for the n-th that runs something that contains these bytes.

        They are looked for in the text of queries, of those prepared earlier too, in parameters and in copied data.
        A statement that is only prepared is not run. For Redis, in the command and its arguments.
        """
        self._arm(Trap(then, match, n))

    def disarm(self) -> None:
        """Nothing will happen by itself any more."""
        self._arm(None)

    def close(self) -> None:
        """As `cut()` and `refuse()`, for good."""
        if self._closed:
            return
        self._closed = True
        self._hub.do(self._cut)
        self._hub.do(self._stop_listening)
        self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _arm(self, trap: Trap | None) -> None:
        def change() -> None:
            self._traps.triggered.clear()
            self._traps.armed = trap

        self._hub.do(change)

    def _cut(self) -> None:
        for link in list(self._links):
            link.reset()

    def _set_stalled(self, stalled: bool) -> None:
        self._stalled = stalled
        self._watch_listener()
        for link in self._links:
            link.stalled = stalled
            link.update()

    def _start_listening(self) -> None:
        if self._listener is None:
            self._listener = _listen(self.port)
            self._watch_listener()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._hub.watch(self._listener, 0, self._take_connection)
            self._listener.close()
            self._listener = None

    def _watch_listener(self) -> None:
        if self._listener is not None:
            self._hub.watch(self._listener, 0 if self._stalled else READ, self._take_connection)

    def _take_connection(self, _events: int) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # It left before it was taken.
        link = Link(client, self._talk(), self._hub, self._traps, self._links.discard)
        self._links.add(link)
        link.connect(self._target)


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen_somewhere() -> tuple[socket.socket | None, int]:
    for _ in range(_PORTS_TO_TRY):
        port = free_port()
        try:
            return _listen(port), port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise RuntimeError("whatever port was free, somebody else took it before the cable could")
