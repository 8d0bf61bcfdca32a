"""The contents of a cell's object: read, compared and written, one after another, and never an older one after a newer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Generic, Protocol, TypeVar

from taskharbor.clock import Clock
from taskharbor.drivers.objectstore.blobs import Blob, Blobs, Version
from taskharbor.drivers.objectstore.envelope import Header, new_commit, new_header, seal, unseal
from taskharbor.drivers.objectstore.patience import pause, pauses
from taskharbor.errors import BackendUnavailable

WARN_BYTES = 8 * 1024 * 1024
MAX_BYTES = 64 * 1024 * 1024
"""Beyond this a state must not grow; what makes it smaller is always written."""
COMPRESS_FROM = 64 * 1024

_log = logging.getLogger(__name__)


class State(Protocol):
    touched: bool
    """Set by whatever changes the state, reset by the cell."""


S = TypeVar("S", bound=State)


class Codec(Protocol[S]):
    """How a state becomes bytes."""

    def empty(self) -> S: ...

    def decode(self, body: bytes) -> S:
        """Never called with nothing: no bytes are the empty state."""

    def encode(self, state: S) -> bytes: ...


class Held(Generic[S]):
    """A content, decoded. Without a version there is no object yet."""

    __slots__ = ("header", "state", "version")

    def __init__(self, state: S, header: Header, version: Version | None) -> None:
        self.state = state
        self.header = header
        self.version = version


class Sealed:
    """The next content, ready to be written."""

    __slots__ = ("commit", "data", "header")

    def __init__(self, header: Header, commit: bytes, data: tuple[bytes, bytes]) -> None:
        self.header = header
        self.commit = commit
        self.data = data


class Contents(Generic[S]):
    def __init__(self, blobs: Blobs, name: str, codec: Codec[S], clock: Clock) -> None:
        self.blobs = blobs
        self.name = name
        self.size = 0
        """Bytes of the state as last written or read, before compression."""
        self.newest: Header | None = None
        """Of the newest content that is known to have landed."""
        self._codec = codec
        self._clock = clock
        self._compress_from = COMPRESS_FROM if blobs.is_remote else None
        self._has_warned = False

    @property
    def where(self) -> str:
        return self.blobs.where(self.name)

    # -- reading ------------------------------------------------------------------------------------------

    async def read(self) -> Held[S]:
        """What is there, and never older than what is known to have landed."""
        for wait in (*pauses(), None):
            held = self._unpacked(await self.blobs.read(self.name))
            newest = self.newest
            if newest is None or not (held.version is None or held.header.is_before(newest)):
                return self._noted(held)
            if wait is not None:
                await pause(wait)
        if held.version is None:
            return held  # It was removed; to make it again is as safe as to make it.
        raise BackendUnavailable(f"{self.where} shows an older content than it had before; try again later")

    async def read_if_newer(self, held: Held[S]) -> Held[S] | None:
        """What is there instead of what we hold, if anything."""
        if held.version is None:
            blob = await self.blobs.read(self.name)
        else:
            found = await self.blobs.read_if_changed(self.name, held.version)
            blob = found if isinstance(found, Blob) else None
        if blob is None:
            return None
        other = self._unpacked(blob)
        return None if other.header.is_before(held.header) else self._noted(other)

    def _unpacked(self, blob: Blob | None) -> Held[S]:
        if blob is None:
            return Held(self._codec.empty(), new_header(), None)
        header, body = unseal(blob.data, self.where)
        self._note_size(len(body))
        return Held(self._codec.decode(body) if body else self._codec.empty(), header, blob.version)

    def _noted(self, held: Held[S]) -> Held[S]:
        if held.version is not None:
            self.newest = held.header
        return held

    # -- writing ------------------------------------------------------------------------------------------

    async def seal(self, held: Held[S], epoch: int | None) -> Sealed:
        """The held state as the next content, under a leader's epoch or as one of several writers."""
        commit = new_commit()
        header = held.header.after(
            commit, epoch=held.header.epoch if epoch is None else epoch, now=self._clock.now()
        )
        body = self._codec.encode(held.state)
        self._note_size(len(body))
        if self._compress_from is None or len(body) < self._compress_from:
            return Sealed(header, commit, seal(header, body))
        return Sealed(header, commit, await asyncio.to_thread(seal, header, body, compress=True))

    async def write(self, held: Held[S], sealed: Sealed) -> Held[S]:
        """One try, in the place of what was held; what is held from now on. Raises Conflict or Unclear."""
        data: Any = sealed.data if self.blobs.takes_parts else b"".join(sealed.data)
        if held.version is None:
            version = await self.blobs.create(self.name, data)
        else:
            version = await self.blobs.replace(self.name, data, held.version)
        return self._noted(Held(held.state, sealed.header, version))

    def _note_size(self, size: int) -> None:
        self.size = size
        if size >= WARN_BYTES and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s has %.1f MiB, and every change writes all of it: spread the queue over shards (?shards=N in the URL of "
                "a new store), keep dead jobs for less time, or let fewer jobs wait; at %d MiB no more are accepted",
                self.where, size / 2**20, MAX_BYTES // 2**20,
            )  # fmt: skip
