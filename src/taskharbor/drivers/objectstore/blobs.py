"""The calls that the driver makes to an object store: whole objects, their versions, and writes that depend on a version.

Everything above is built on one promise: of two writers that saw the same version, at most one succeeds. A write has three
ends, and the third is why the rest of this package exists: it landed, it was refused (`Conflict`), or nobody knows (`Unclear`).
`probe` tries whether a store keeps the promise before the first job is entrusted to it.
"""

from __future__ import annotations

import abc
import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from taskharbor.clock import Clock
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import SECOND, Micros

Data: TypeAlias = bytes | tuple[bytes, ...]
"""The content of an object, or its parts: a store that can write parts spares joining megabytes."""


class Version(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The version of an object's content. Only its store interprets it. Equal versions come from the same write."""

    tag: str
    generation: str | None = None
    """The number of the content, for a store that numbers contents (Google's) and compares by the number."""

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


class Conflict(Exception):
    """Refused: the object has another version than the known one, or is there although none is known, or is gone.

    It may be there by our own hand: a proxy or a client library that sent a write twice gets this for the second.
    """


class Refused(Conflict):
    """A refusal by a store that gets every write once: the write has not landed and never will."""


class Unclear(Exception):
    """A write without a certain answer (time-out, server error, cut connection). It has landed, has not, or will land later."""


class Blobs(abc.ABC):
    """A store of objects. Used from one event loop; names are paths of `a-z0-9_-=.` with `/` between."""

    place: str
    """The store's address, for messages: never a secret. The same for all handles of this process on one store, and for no
    others."""
    is_remote: bool = True
    """True for a store behind a network, where bytes cost time and money. False for files and memory."""

    def where(self, name: str) -> str:
        """Return the name of an object for messages."""
        return f"{name} in {self.place}"

    @abc.abstractmethod
    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        """Return the object, or None if there is none or if it has the version `unless`.

        `size`: a beginning of this many bytes is enough, and more may come. Raises BackendUnavailable after a few tries, as every
        read does.
        """

    @abc.abstractmethod
    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        """Write if the version is still the known one; None: if there is no object. Tries once. Raises Conflict or Unclear."""

    @abc.abstractmethod
    async def put(self, name: str, data: bytes) -> None:
        """Write without a condition, for names that nobody else uses. Repeats until the write has landed, or raises
        BackendUnavailable."""

    @abc.abstractmethod
    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects. A name that is not there is no error."""

    @abc.abstractmethod
    async def names(self, prefix: str) -> list[str]:
        """Return all objects in that folder and below, in order. A prefix is a whole path: `a/b` does not find `a/bc`."""

    async def now(self) -> Micros | None:
        """Return the store's own time, to a second, if the store can tell it."""
        return None

    async def close(self) -> None:  # noqa: B027
        """Let go of what is open. Closing twice is harmless."""


_random = random.Random()


def retry_delays(*, first: float = 0.02, most: float = 1.0, tries: int = 5) -> Iterator[float]:
    """Yield the seconds to wait before each further try: twice as long each time, with jitter."""
    longest = first
    for _ in range(tries - 1):
        yield longest * (0.5 + _random.random() / 2)
        longest = min(most, longest * 2)


# -- the store's time -----------------------------------------------------------------------------------------

RESOLUTION: Micros = 2 * SECOND
"""Stores tell their time to a second, and after a round trip. A smaller difference means nothing."""
ASK_EVERY: Micros = 600 * SECOND
"""The time for which two working clocks stay together."""
MOST_JUMP: Micros = SECOND
"""If this machine's clock was set by more than this, the known difference is discarded."""


_BOOT_TIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def steady_us() -> Micros:
    """Return a clock that goes on while the machine sleeps, if there is one: a leader that slept must know how long."""
    return (time.monotonic_ns() if _BOOT_TIME is None else time.clock_gettime_ns(_BOOT_TIME)) // 1000


class StoreTime:
    """This machine's time, corrected where it differs from the store's by more than can be told."""

    def __init__(self, blobs: Blobs, clock: Clock, monotonic: Callable[[], Micros] = steady_us) -> None:
        self._blobs = blobs
        self._clock = clock
        self._monotonic = monotonic
        self._correction: Micros = 0
        self._ask_at = monotonic()
        """The time of the next request to the store, by the steady clock."""
        self._set_by: Micros = 0
        """The difference of the two clocks at the last request. It changes only if this machine's clock is set."""

    async def now(self) -> Micros:
        steady, ours = self._monotonic(), self._clock.now()
        if steady >= self._ask_at or abs(ours - steady - self._set_by) > MOST_JUMP:
            theirs = await self._blobs.now()
            steady, ours = self._monotonic(), self._clock.now()
            difference = 0 if theirs is None else theirs - ours
            self._correction = difference if abs(difference) > RESOLUTION else 0
            self._ask_at, self._set_by = steady + ASK_EVERY, ours - steady
        return ours + self._correction


# -- the probe ------------------------------------------------------------------------------------------------

_PROBES = 4
_trusted: set[str] = set()


async def probe(blobs: Blobs) -> None:
    """Raise InvalidRequest if the store breaks the rules of conditional writes. A store that passed is not probed again.

    A correct store can fail by accident (a request sent twice on its way, a lost answer), but a wrong store fails every time. So
    a failed probe is repeated.
    """
    if blobs.place in _trusted:
        return
    for delay in (*retry_delays(tries=_PROBES), None):
        # A new name each time, so that one try does not affect the next.
        name = f"probe/{secrets.token_hex(12)}"
        try:
            await _examine(blobs, name)
            _trusted.add(blobs.place)
            return
        except InvalidRequest:
            if delay is None:
                raise
        except Unclear as error:
            if delay is None:
                raise BackendUnavailable(
                    f"{blobs.place} gave no certain answer to a first write: {error}"
                ) from error
        finally:
            await blobs.delete([name])
        await asyncio.sleep(delay or 0.0)


async def _examine(blobs: Blobs, name: str) -> None:
    async def write(data: bytes, known: Version | None) -> Version | None:
        try:
            return await blobs.write(name, data, known)
        except Conflict:
            return None

    first = await write(b"first", None)
    if first is None:
        raise _lie(blobs, "refused to create an object that did not exist")
    if await write(b"again", None) is not None:
        raise _lie(blobs, "created an object that was there already (If-None-Match: *)")
    if await blobs.read(name, first) is not None:
        raise _lie(blobs, "showed another version of an object than the one it had just confirmed")
    second = await write(b"second", first)
    if second is None:
        raise _lie(blobs, "refused to replace the very version it had just confirmed (If-Match)")
    if second == first:
        raise _lie(blobs, "gave two contents the same version")
    if await write(b"stale", first) is not None:
        raise _lie(blobs, "replaced a version that was not there any more (If-Match)")
    if await blobs.read(name) != Blob(b"second", second):
        raise _lie(blobs, "did not show what it had last confirmed")


def _lie(blobs: Blobs, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{blobs.place} {what}: on such a store two writers can overwrite each other, and jobs would be lost. Use a store "
        "with conditional writes (Amazon S3, Google Cloud Storage, Azure, a current MinIO, Ceph or R2), or a newer version "
        "of this one"
    )
