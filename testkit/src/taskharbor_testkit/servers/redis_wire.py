"""As much of Redis's protocol as an outage needs: where commands and replies end, and which reply answers which command.

A transaction is one request, from MULTI to EXEC: a connection that is lost in the middle of it has changed nothing. What
is published is no answer, in either version of the protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from taskharbor_testkit.servers.conversation import Sent

_LINE = b"\r\n"
_SIZED = b"$!="
_LISTS = b"*~>"

_INTRODUCTIONS = (b"AUTH", b"CLIENT", b"HELLO", b"READONLY", b"SELECT")
"""What a client says on a new connection before anybody wants anything of it."""

_PUBLISHED = (b"MESSAGE", b"PMESSAGE", b"SMESSAGE", b"INVALIDATE")
_ENDS_TRANSACTION = (b"EXEC", b"DISCARD")


class _Values:
    """One direction of a connection, cut into whole values, however deep they are."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seen = 0
        self._missing = 1

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        while self._missing:
            end = self._buffer.find(_LINE, self._seen)
            if end < 0:
                return None
            kind, number = self._buffer[self._seen], bytes(self._buffer[self._seen + 1 : end])
            after = end + len(_LINE)
            if kind in _SIZED and not number.startswith(b"-"):
                after += int(number) + len(_LINE)
                if len(self._buffer) < after:
                    return None
            self._missing += _members(kind, number)
            self._seen = after
        taken = bytes(self._buffer[: self._seen])
        del self._buffer[: self._seen]
        self._seen, self._missing = 0, 1
        return taken


class RedisConversation:
    def __init__(self) -> None:
        self.client = _Values()
        self.server = _Values()
        self.unanswered = 0
        self.open = False
        self._awaited: deque[tuple[int, bool]] = deque()
        """For each request that is complete: how many replies it still gets, and whether it is about subscriptions."""
        self._replies = 0
        """Of the transaction that the client is in the middle of, those that have come."""
        self._commands = 0
        self._subscribes = False
        self._answered = False

    def from_client(self) -> Iterator[Sent]:
        while (message := self.client.take()) is not None:
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
            replies = max(_count(message) - 1, 1) if about_subscriptions else self._commands - self._replies
            self.open, self._commands, self._replies = False, 0, 0
            self._awaited.append((replies, about_subscriptions))
            self.unanswered += 1
            yield Sent(message, starts, True)

    def from_server(self) -> Iterator[bytes]:
        while (message := self.server.take()) is not None:
            self._answered = False
            kind = _first(message) if self._subscribes else b""
            if kind not in _PUBLISHED:
                self._note_reply(kind.endswith(b"SUBSCRIBE"))
            yield message

    def runs(self, message: bytes, match: bytes) -> bool:
        return match in message

    def answers(self, message: bytes) -> bool:
        return self._answered

    def asks_for_more(self, message: bytes) -> bool:
        return False

    def _note_reply(self, about_subscriptions: bool) -> None:
        if not self._awaited:
            self._replies += 1
            return
        left, wanted = self._awaited[0]
        if about_subscriptions and not wanted:
            return  # The rest of an UNSUBSCRIBE from everything, which is confirmed channel by channel.
        if left > 1:
            self._awaited[0] = (left - 1, wanted)
            return
        self._awaited.popleft()
        self.unanswered -= 1
        self._answered = True


def _members(kind: int, number: bytes) -> int:
    """What a value adds to what is missing: its members, less itself. One that is null has none."""
    if kind in _LISTS:
        return max(int(number), 0) - 1
    if kind in b"%":
        return 2 * int(number) - 1
    if kind in b"|":
        return 2 * int(number)  # Attributes come before the value that they belong to.
    return -1


def _count(message: bytes) -> int:
    """How many members a list has; a command that was sent as plain text has one."""
    return int(message[1 : message.index(_LINE)]) if message[0] in _LISTS else 1


def _first(message: bytes) -> bytes:
    """The command's name, or the first member of a list of replies."""
    if message[0] not in _LISTS:
        return b""
    lines = message.split(_LINE, 3)
    return lines[2].upper() if len(lines) > 2 else b""
