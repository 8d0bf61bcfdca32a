"""What a cable has to know of a protocol to lose an answer at the right moment, whichever protocol it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Sent(NamedTuple):
    """By the client."""

    message: bytes
    starts: bool
    """It is the first of a request."""
    ends: bool
    """It completes one."""


class Stream(Protocol):
    """One direction of a connection, cut into whole messages."""

    def feed(self, data: bytes) -> None: ...


class Conversation(Protocol):
    """Both directions, and how far they have come with each other."""

    unanswered: int
    """Requests, complete ones, that the server has not answered."""
    open: bool
    """The client is in the middle of a request."""

    @property
    def client(self) -> Stream: ...

    @property
    def server(self) -> Stream: ...

    def from_client(self) -> Iterator[Sent]:
        """The state is that after the message."""

    def from_server(self) -> Iterator[bytes]:
        """The state is that after the message."""

    def runs(self, message: bytes, match: bytes) -> bool:
        """Whether a client's message runs something that contains `match`."""

    def answers(self, message: bytes) -> bool:
        """Whether the server's message, the last one that was taken, completes the answer to a request."""

    def asks_for_more(self, message: bytes) -> bool:
        """Whether the server's message makes the client send what belongs to the request that it answers."""
