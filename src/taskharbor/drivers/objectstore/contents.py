"""The contents of a compare-and-swap object: its envelope, and how it is read, compared and written.

An object is msgpack `[header, body]`. The serial counts commits, and the ring holds the ids of the last ones, so a writer can
tell from any later content whether its own write is part of it, as long as not too many others followed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import zlib
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Final, Generic, Protocol, TypeVar
from zlib import crc32

import msgspec

from taskharbor.clock import Clock
from taskharbor.drivers.objectstore.blobs import Blob, Blobs, Version, pause, pauses
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import Micros

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


FORMAT: Final = 2
RING: Final = 64
"""Commits whose ids are kept."""
ID_BYTES: Final = 8

_PLAIN, _ZLIB = 0, 1
_PAIR = b"\x92"
_BIN32 = b"\xc6"


class Fate(Enum):
    """The fate of a write, as a later content tells it."""

    LANDED = auto()
    REFUSED = auto()
    """Another commit has its place; it can never land any more."""
    OPEN = auto()
    """The content is not that far yet: it may still land."""
    FORGOTTEN = auto()
    """So many commits followed that the ring does not tell."""


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    format: int
    lineage: bytes
    """Made with the object: an object that was removed and made again is told from an older content of itself."""
    epoch: int
    """Of the leader that may write without looking; 0: there never was one."""
    serial: int
    """Commits so far."""
    ring: bytes
    """Ids of the last commits, the newest last."""
    written_at_us: Micros
    packing: int = _PLAIN
    checksum: int = 0
    """Of the header without this field, and of the body; CRC-32: a database with a torn page can look whole."""

    def fate(self, serial: int, commit: bytes) -> Fate:
        """Of a write that would have been, or was, the commit of that number."""
        back = self.serial - serial
        if back < 0:
            return Fate.OPEN
        end = len(self.ring) - back * ID_BYTES
        if end < ID_BYTES:
            return Fate.FORGOTTEN
        return Fate.LANDED if self.ring[end - ID_BYTES : end] == commit else Fate.REFUSED

    def is_before(self, other: Header) -> bool:
        """True for an older content of the same object."""
        return self.lineage == other.lineage and self.serial < other.serial

    def after(self, commit: bytes, *, epoch: int, now: Micros) -> Header:
        """The header of the next content."""
        ring = (self.ring + commit)[-RING * ID_BYTES :]
        return Header(FORMAT, self.lineage, epoch, self.serial + 1, ring, now)


def new_header() -> Header:
    """Of an object that does not exist yet."""
    return Header(FORMAT, secrets.token_bytes(8), 0, 0, b"", 0)


def new_commit() -> bytes:
    return secrets.token_bytes(ID_BYTES)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Header, bytes]).decode


def seal(header: Header, body: bytes, *, compress: bool = False) -> tuple[bytes, bytes]:
    """The object's bytes, in two parts."""
    header = msgspec.structs.replace(header, packing=_ZLIB if compress else _PLAIN)
    header = msgspec.structs.replace(header, checksum=_checksum(header, body))
    if compress:
        body = zlib.compress(body, 1)
    return b"".join((_PAIR, _encode(header), _BIN32, len(body).to_bytes(4, "big"))), body


def _checksum(header: Header, body: bytes) -> int:
    return crc32(body, crc32(_encode(msgspec.structs.replace(header, checksum=0))))


def unseal(data: bytes, where: str) -> tuple[Header, bytes]:
    """Header and body. `where` it comes from is for the message, should it be something else."""
    try:
        header, body = _decode(data)
    except msgspec.MsgspecError:
        # Not a SchemaMismatch, which ends a worker: the objects of other queues are well.
        raise BackendUnavailable(
            f"{where} is damaged, or not what TaskHarbor has written there: restore an earlier version of it, or name a place "
            "that is TaskHarbor's own"
        ) from None
    if header.format != FORMAT:
        raise SchemaMismatch(
            f"{where} has format {header.format}, this version of TaskHarbor reads {FORMAT}: use a newer one"
        )
    if header.packing == _ZLIB:
        with suppress(zlib.error):
            body = zlib.decompress(body)
    if _checksum(header, body) != header.checksum:
        raise BackendUnavailable(
            f"{where} is damaged: its checksum does not fit; restore an earlier version of it"
        )
    return header, body
