"""As much of the protocols of PostgreSQL and Redis as an outage needs: where messages end, which are requests, when one
is answered.

An ambiguous commit is a request that was carried out and whose answer was lost. To produce one on purpose, the proxy must
know exactly when the server has answered; closing the connection "soon after" would be a different experiment each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Sent(NamedTuple):
    """A message of the client."""

    message: bytes
    starts: bool
    """It is the first of a request."""
    ends: bool
    """It completes one."""


class Received(NamedTuple):
    """A message of the server."""

    message: bytes
    answers: bool
    """It completes the answer to a request."""
    wants_more: bool = False
    """It makes the client send data that belong to the request."""


class WireProtocol(Protocol):
    """Both directions of one connection. Its state is that after the last message that it gave out."""

    unanswered: int
    """Requests, complete ones, that the server has not answered."""
    open: bool
    """The client is in the middle of a request."""

    def from_client(self, data: bytes) -> Iterator[Sent]:
        """The messages that these bytes complete."""

    def from_server(self, data: bytes) -> Iterator[Received]:
        """The messages that these bytes complete."""

    def runs(self, message: bytes, match: bytes) -> bool:
        """Return True if a client's message runs something that contains `match`."""


# PostgreSQL

_ENCRYPTION_REQUESTS = (80877103, 80877104)
"""SSLRequest and GSSENCRequest: a server that has neither answers N, a byte outside of all framing."""
_STARTUP = 3
"""The protocol's major in a StartupMessage."""
_ENDS_REQUEST = (b"Q", b"S", b"F")
"""Query, Sync, FunctionCall."""
_IN_REQUEST = (b"P", b"B", b"D", b"E", b"C", b"H", *_ENDS_REQUEST)


class PostgresProtocol:
    """A request is a plain query, or all messages of a client up to its Sync. The start of a session counts as one."""

    def __init__(self) -> None:
        self.unanswered = 0
        self.open = False
        self._client = bytearray()
        self._server = bytearray()
        self._started = False
        self._bare_answers = 0
        self._last_end = b""
        self._statements: dict[bytes, bytes] = {}

    def from_client(self, data: bytes) -> Iterator[Sent]:
        self._client += data
        while (message := _take_framed(self._client, 1 if self._started else 0)) is not None:
            yield self._note_request(message) if self._started else self._note_start(message)

    def from_server(self, data: bytes) -> Iterator[Received]:
        self._server += data
        while True:
            is_bare = self._bare_answers > 0
            message = _take(self._server, 1) if is_bare else _take_framed(self._server, 1)
            if message is None:
                return
            kind = b"" if is_bare else message[:1]
            self._bare_answers -= is_bare
            if kind == b"Z":
                self.unanswered -= 1
            elif kind == b"G" and self._last_end == b"S":
                # The server skips the Sync that it finds before the data: the client sends another one after it.
                self.unanswered -= 1
                self.open = True
            yield Received(message, kind == b"Z", kind == b"G")

    def runs(self, message: bytes, match: bytes) -> bool:
        """To prepare a statement is not to run it."""
        kind = message[:1]
        if kind == b"B":
            _portal, statement, _parameters = message[5:].split(b"\0", 2)
            return match in message or match in self._statements.get(statement, b"")
        return kind in (b"Q", b"d") and match in message

    def _note_start(self, message: bytes) -> Sent:
        code = int.from_bytes(message[4:8], "big")
        self._bare_answers += code in _ENCRYPTION_REQUESTS
        if code >> 16 == _STARTUP:
            self._started = True
            self.unanswered += 1
        return Sent(message, False, False)

    def _note_request(self, message: bytes) -> Sent:
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


def _take(buffer: bytearray, size: int) -> bytes | None:
    if len(buffer) < size:
        return None
    taken = bytes(buffer[:size])
    del buffer[:size]
    return taken


def _take_framed(buffer: bytearray, prefix: int) -> bytes | None:
    """A message of `prefix` bytes and a length that counts itself."""
    if len(buffer) < prefix + 4:
        return None
    return _take(buffer, prefix + max(4, int.from_bytes(buffer[prefix : prefix + 4], "big")))


# Redis

_LINE = b"\r\n"
_SIZED = b"$!="
_LISTS = b"*~>"
_INTRODUCTIONS = (b"AUTH", b"CLIENT", b"HELLO", b"READONLY", b"SELECT")
"""Commands that a client sends on every new connection. They are no requests."""
_PUBLISHED = (b"MESSAGE", b"PMESSAGE", b"SMESSAGE", b"INVALIDATE")
_ENDS_TRANSACTION = (b"EXEC", b"DISCARD")


class RedisProtocol:
    """A request is a command, or a transaction from MULTI to EXEC: one that is cut off in the middle has changed nothing.

    Published messages are no answers, in either version of the protocol.
    """

    def __init__(self) -> None:
        self.unanswered = 0
        self.open = False
        self._client = _Values()
        self._server = _Values()
        self._awaited: deque[tuple[int, bool]] = deque()
        """For each request that is complete: how many replies it still gets, and whether it is about subscriptions."""
        self._commands = 0
        """The number of commands in the client's open transaction."""
        self._replies = 0
        """To those commands, as many as have come."""
        self._subscribes = False

    def from_client(self, data: bytes) -> Iterator[Sent]:
        for message in self._client.take(data):
            name = _first(message)
            starts = not self.open and name not in _INTRODUCTIONS
            if name == b"MULTI":
                self.open, self._commands, self._replies = True, 0, 0
            self._commands += 1
            if self.open and name not in _ENDS_TRANSACTION:
                yield Sent(message, starts, False)
                continue
            about_subscriptions = name.endswith(b"SUBSCRIBE")
            self._subscribes |= about_subscriptions
            channels = int(message[1 : message.index(_LINE)]) - 1 if about_subscriptions else 0
            replies = max(channels, 1) if about_subscriptions else self._commands - self._replies
            self.open, self._commands, self._replies = False, 0, 0
            self._awaited.append((replies, about_subscriptions))
            self.unanswered += 1
            yield Sent(message, starts, True)

    def from_server(self, data: bytes) -> Iterator[Received]:
        for message in self._server.take(data):
            kind = _first(message) if self._subscribes else b""
            yield Received(message, kind not in _PUBLISHED and self._answers(kind.endswith(b"SUBSCRIBE")))

    def runs(self, message: bytes, match: bytes) -> bool:
        return match in message

    def _answers(self, about_subscriptions: bool) -> bool:
        if not self._awaited:
            self._replies += 1
            return False
        left, wanted = self._awaited[0]
        if about_subscriptions and not wanted:
            return False  # The rest of an UNSUBSCRIBE from everything, which is confirmed channel by channel.
        if left > 1:
            self._awaited[0] = (left - 1, wanted)
            return False
        self._awaited.popleft()
        self.unanswered -= 1
        return True


class _Values:
    """One direction of a connection, cut into whole values, however deep they are."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seen = 0
        self._missing = 1

    def take(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while self._complete():
            taken = bytes(self._buffer[: self._seen])
            del self._buffer[: self._seen]
            self._seen, self._missing = 0, 1
            yield taken

    def _complete(self) -> bool:
        while self._missing:
            end = self._buffer.find(_LINE, self._seen)
            if end < 0:
                return False
            kind, number = self._buffer[self._seen], bytes(self._buffer[self._seen + 1 : end])
            after = end + len(_LINE)
            if kind in _SIZED and not number.startswith(b"-"):
                after += int(number) + len(_LINE)
                if len(self._buffer) < after:
                    return False
            self._missing += _members(kind, number) - 1
            self._seen = after
        return True


def _members(kind: int, number: bytes) -> int:
    """The number of values that belong to this one. One that is null has none."""
    if kind in _LISTS:
        return max(int(number), 0)
    if kind in b"%|":
        return 2 * int(number) + (kind in b"|")  # Attributes come before the value that they belong to.
    return 0


def _first(message: bytes) -> bytes:
    """The command's name, or the first member of a list of replies."""
    if message[0] not in _LISTS:
        return b""
    lines = message.split(_LINE, 3)
    return lines[2].upper() if len(lines) > 2 else b""
