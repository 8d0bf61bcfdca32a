"""One client's connection through a cable: two sockets, what is under way between them, and the trap it may step into.

Messages are passed on whole, so that a connection never ends in the middle of one unless both ends agree that it did.
"""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from taskharbor_testkit.servers.conversation import Conversation, Sent
from taskharbor_testkit.servers.hub import READ, WRITE, Hub

Fate = Literal["drop", "lose_answer"]

_CHUNK = 1 << 16
_FULL = 1 << 20
"""What may wait for one end before the other is no longer read."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Trap:
    """What happens to the n-th request that fits."""

    fate: Fate
    match: bytes | None
    remaining: int


class Traps:
    """At most one is armed, for all connections of a cable."""

    def __init__(self) -> None:
        self.armed: Trap | None = None
        self.triggered = threading.Event()

    def spring(self, conversation: Conversation, sent: Sent) -> Fate | None:
        trap = self.armed
        if trap is None:
            return None
        if not (sent.starts if trap.match is None else conversation.runs(sent.message, trap.match)):
            return None
        trap.remaining -= 1
        if trap.remaining > 0:
            return None
        self.armed = None
        return trap.fate


class _End:
    """A socket, and the bytes that wait to be written to it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.waiting = bytearray()
        self.ended = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self) -> None:
        while self.waiting:
            try:
                del self.waiting[: self.socket.send(self.waiting)]
            except BlockingIOError:
                return

    def read(self) -> bytes:
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return b""
        self.ended = not data
        return data


class Link:
    """On its hub's thread only."""

    def __init__(
        self,
        client: socket.socket,
        talk: Conversation,
        hub: Hub,
        traps: Traps,
        closed: Callable[[Link], None],
    ) -> None:
        self.stalled = False
        self._hub = hub
        self._traps = traps
        self._closed = closed
        self._talk = talk
        self._client = _End(client)
        self._server = _End(socket.socket())
        self._connected = False
        self._answers_to_pass: int | None = None
        """How many answers still reach the client before one is lost; None: all."""
        self._deaf = False
        """The request whose answer is to be lost is complete, and what comes after it must not be carried out."""

    def connect(self, target: tuple[str, int]) -> None:
        if self._server.socket.connect_ex(target) in (0, errno.EINPROGRESS):
            self.update()
        else:
            self.reset()

    def update(self) -> None:
        """Watch for what can be done next."""
        client = server = 0
        if not self.stalled:
            if not (self._client.ended or self._deaf or len(self._server.waiting) > _FULL):
                client |= READ
            if self._client.waiting:
                client |= WRITE
            if not self._connected:
                server |= WRITE
            else:
                if not (self._server.ended or len(self._client.waiting) > _FULL):
                    server |= READ
                if self._server.waiting:
                    server |= WRITE
        self._hub.watch(self._client.socket, client, self._on_client)
        self._hub.watch(self._server.socket, server, self._on_server)

    def reset(self) -> None:
        """Both ends learn at once, and by a RST, that there is no connection any more."""
        for end in (self._client, self._server):
            if end.socket.fileno() >= 0:
                end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._close()

    def _close(self) -> None:
        for end in (self._client, self._server):
            if end.socket.fileno() >= 0:
                self._hub.watch(end.socket, 0, self._on_client)
                end.socket.close()
        if self._answers_to_pass is not None:
            self._traps.triggered.set()
        self._closed(self)

    def _on_client(self, events: int) -> None:
        self._carry(events, self._read_client)

    def _on_server(self, events: int) -> None:
        if not self._connected:
            code = self._server.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return self.reset()
            self._connected = True
        self._carry(events, self._read_server)

    def _carry(self, events: int, read: Callable[[], bool]) -> None:
        try:
            alive = read() if events & READ else True
            self._client.write()
            if alive and self._connected:
                self._server.write()
        except OSError:
            return self.reset()
        if not alive:
            return self.reset()
        for ended, other in ((self._client, self._server), (self._server, self._client)):
            if ended.ended and not other.waiting:
                return self._close()
        self.update()

    def _read_client(self) -> bool:
        """False: the connection is to be dropped."""
        self._talk.client.feed(self._client.read())
        for sent in self._talk.from_client():
            fate = self._traps.spring(self._talk, sent)
            if fate == "drop":
                self._answers_to_pass = 0
                return False
            self._server.waiting += sent.message
            if fate == "lose_answer":
                # A request that is complete, or goes on with data only, is among the unanswered already.
                self._answers_to_pass = self._talk.unanswered - (not self._talk.open)
            if self._answers_to_pass is not None and sent.ends:
                self._deaf = True
                break
        return True

    def _read_server(self) -> bool:
        """False: the answer that was to be lost has come."""
        self._talk.server.feed(self._server.read())
        for message in self._talk.from_server():
            answers, asks = self._talk.answers(message), self._talk.asks_for_more(message)
            if self._answers_to_pass == 0 and answers:
                return False
            if self._answers_to_pass == 0 and not asks:
                continue
            self._client.waiting += message
            if asks:
                # The client is asked for its data, without which the request is never carried out.
                self._deaf = False
            elif answers and self._answers_to_pass is not None:
                self._answers_to_pass -= 1
        return True
