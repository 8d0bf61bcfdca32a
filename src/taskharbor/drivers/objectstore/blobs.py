"""What the driver asks of an object store: whole objects, their versions, and writes that depend on a version.

Everything above is built on one promise: of two writers that saw the same version, at most one succeeds. A write has three
ends, and the third is why the rest of this package exists: it landed, it was refused (`Conflict`), or nobody knows (`Unclear`).
"""

from __future__ import annotations

import abc
import asyncio
import enum
import random
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from taskharbor.jobs import Micros


class Version(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Which content an object has. Means something to its store only; equal where the content is the same write's."""

    tag: str
    generation: str | None = None
    """Where the store numbers its contents (Google's) and compares by that."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        if self.generation is not None and other.generation is not None:
            return self.generation == other.generation
        return self.tag == other.tag

    def __ne__(self, other: object) -> bool:
        # Spelled out: the one that is inherited would compare by identity.
        return not self == other

    __hash__ = None  # type: ignore[assignment]


class Blob(msgspec.Struct, frozen=True, gc=False):
    """An object as it was read."""

    data: bytes
    version: Version


class Unchanged(enum.Enum):
    """The answer of a conditional read: the version is still the one that is known."""

    UNCHANGED = enum.auto()


UNCHANGED: Final = Unchanged.UNCHANGED


class Conflict(Exception):
    """Refused: the object exists already (create), or has another version or is gone (replace).

    It may be there by our own hand: a proxy or a client library that sent a write twice gets this for the second.
    """


class Unclear(Exception):
    """A write without a certain answer (time-out, server error, cut connection): it has landed, or not, or will in a while."""


class Blobs(abc.ABC):
    """A place for objects. Used from one event loop; names are paths of `a-z0-9_-=.` with `/` between."""

    place: str
    """Where that is, for messages. Never a secret."""
    identity: str
    """The same for all handles of this process on one store, and for no others."""
    takes_parts: bool = False
    """True: `create` and `replace` take a tuple of parts too, which spares joining megabytes."""
    is_remote: bool = True
    """Behind a network, where bytes cost time and money. False for files and memory."""

    def where(self, name: str) -> str:
        """An object, for messages."""
        return f"{name} in {self.place}"

    @abc.abstractmethod
    async def read(self, name: str) -> Blob | None:
        """The object, or None where there is none. Raises BackendUnavailable after a few tries, as every read does."""

    @abc.abstractmethod
    async def read_if_changed(self, name: str, known: Version) -> Blob | Unchanged | None:
        """The same, but nothing is transferred where the version is still the known one."""

    async def read_start(self, name: str, size: int) -> bytes | None:
        """The first so many bytes of an object that never changes, or all of it. Stores that can, transfer no more."""
        blob = await self.read(name)
        return None if blob is None else blob.data

    @abc.abstractmethod
    async def create(self, name: str, data: bytes) -> Version:
        """Write where there is nothing. One try: raises Conflict or Unclear."""

    @abc.abstractmethod
    async def replace(self, name: str, data: bytes, known: Version) -> Version:
        """Write where the version is still the known one. One try: raises Conflict or Unclear."""

    @abc.abstractmethod
    async def put(self, name: str, data: bytes) -> None:
        """Write, whatever is there: for names that nobody else uses. Tried again until it has landed, or BackendUnavailable."""

    @abc.abstractmethod
    async def delete(self, names: Sequence[str]) -> None:
        """Remove them; those that are not there are fine."""

    @abc.abstractmethod
    async def names(self, prefix: str) -> list[str]:
        """All objects in that folder and below, in order. A prefix is a whole path: `a/b` does not find `a/bc`."""

    async def now(self) -> Micros | None:
        """The store's own time, to a second, where it can tell."""
        return None

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of what is open. Closing twice is harmless."""


_random = random.Random()


def pauses(*, first: float = 0.02, most: float = 1.0, tries: int = 5) -> Iterator[float]:
    """Seconds to wait before each further try: twice as long each time, and never the same for two."""
    longest = first
    for _ in range(tries - 1):
        yield longest * (0.5 + _random.random() / 2)
        longest = min(most, longest * 2)


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)
