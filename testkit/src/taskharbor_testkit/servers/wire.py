"""As much of PostgreSQL's protocol as an outage needs: where messages end, which are requests, when one is answered.

An ambiguous commit is a request that was carried out and whose answer was lost. To produce one on purpose, the cable must
know exactly when the server has answered; closing it "soon after" would be a different experiment each time.
"""

from __future__ import annotations

from collections.abc import Iterator

from taskharbor_testkit.servers.conversation import Sent

_ENCRYPTION_REQUESTS = (80877103, 80877104)
"""SSLRequest and GSSENCRequest: a server that has neither answers N, a byte outside of all framing."""

_STARTUP = 3
"""The protocol's major in a StartupMessage."""

_ENDS_REQUEST = (b"Q", b"S", b"F")
"""Query, Sync, FunctionCall."""

_IN_REQUEST = (b"P", b"B", b"D", b"E", b"C", b"H", *_ENDS_REQUEST)


class _Messages:
    """One direction of a connection, cut into whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def _take(self, size: int) -> bytes | None:
        if len(self._buffer) < size:
            return None
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _take_framed(self, prefix: int) -> bytes | None:
        """A message of `prefix` bytes and a length that counts itself."""
        if len(self._buffer) < prefix + 4:
            return None
        return self._take(prefix + max(4, int.from_bytes(self._buffer[prefix : prefix + 4], "big")))


class PostgresConversation:
    """Both directions, and how far they have come with each other."""

    def __init__(self) -> None:
        self.client = _Messages()
        self.server = _Messages()
        self.unanswered = 0
        """Requests, complete ones, that the server has not answered with ReadyForQuery. The start counts as one."""
        self.open = False
        """The client is in the middle of a request."""
        self._started = False
        self._bare_answers = 0
        self._last_end = b""
        self._statements: dict[bytes, bytes] = {}

    def from_client(self) -> Iterator[Sent]:
        """The state is that after the message."""
        while (message := self.client._take_framed(1 if self._started else 0)) is not None:
            yield self._note_typed(message) if self._started else self._note_start(message)

    def from_server(self) -> Iterator[bytes]:
        """The state is that after the message."""
        while True:
            bare = self._bare_answers > 0
            message = self.server._take(1) if bare else self.server._take_framed(1)
            if message is None:
                return
            if bare:
                self._bare_answers -= 1
            elif message[:1] == b"Z":
                self.unanswered -= 1
            elif message[:1] == b"G" and self._last_end == b"S":
                # The server skips the Sync that it finds before the data: the client sends another one after it.
                self.unanswered -= 1
                self.open = True
            yield message

    def runs(self, message: bytes, match: bytes) -> bool:
        """Whether a client's message runs something that contains `match`. To prepare a statement is not to run it."""
        kind = message[:1]
        if kind == b"B":
            _portal, statement, _parameters = message[5:].split(b"\0", 2)
            return match in message or match in self._statements.get(statement, b"")
        return kind in (b"Q", b"d") and match in message

    def answers(self, message: bytes) -> bool:
        return message[:1] == b"Z"

    def asks_for_more(self, message: bytes) -> bool:
        return message[:1] == b"G"

    def _note_start(self, message: bytes) -> Sent:
        code = int.from_bytes(message[4:8], "big")
        self._bare_answers += code in _ENCRYPTION_REQUESTS
        if code >> 16 == _STARTUP:
            self._started = True
            self.unanswered += 1
        return Sent(message, False, False)

    def _note_typed(self, message: bytes) -> Sent:
        kind = message[:1]
        if kind not in _IN_REQUEST:
            return Sent(message, False, False)
        starts = not self.open
        self.open = kind not in _ENDS_REQUEST
        if not self.open:
            self.unanswered += 1
            self._last_end = kind
        if kind == b"P":
            name, query, _types = message[5:].split(b"\0", 2)
            self._statements[name] = query
        return Sent(message, starts, not self.open)
