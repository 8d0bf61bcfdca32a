"""What is around a cell's state in its object: who may write it, how often it was written, and by which commits last.

msgpack `[header, body]`. The serial counts commits, and the ring holds the ids of the last ones, so whoever made a write
can tell from any later content whether that write is part of it, as long as not too many others followed.
"""

from __future__ import annotations

import secrets
import zlib
from enum import Enum, auto
from typing import Final
from zlib import crc32

import msgspec

from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import Micros

FORMAT: Final = 2
RING: Final = 64
"""Commits whose ids are kept."""
ID_BYTES: Final = 8

_PLAIN, _ZLIB = 0, 1
_PAIR = b"\x92"
_BIN32 = b"\xc6"


class Fate(Enum):
    """What a later content says of a write."""

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
    """Of the body, CRC-32: a database with a torn page can look whole."""

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
        """Whether this is an older content of the same object."""
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
    checksum = crc32(body)
    if compress:
        body = zlib.compress(body, 1)
    header = msgspec.structs.replace(header, packing=_ZLIB if compress else _PLAIN, checksum=checksum)
    return b"".join((_PAIR, _encode(header), _BIN32, len(body).to_bytes(4, "big"))), body


def unseal(data: bytes, where: str) -> tuple[Header, bytes]:
    """Header and body. `where` it comes from is for the message, should it be something else."""
    try:
        header, body = _decode(data)
    except msgspec.MsgspecError:
        raise SchemaMismatch(
            f"{where} is not what TaskHarbor has written there: name a place that is its own"
        ) from None
    if header.format != FORMAT:
        raise SchemaMismatch(
            f"{where} has format {header.format}, this version of TaskHarbor reads {FORMAT}: use a newer one"
        )
    body = zlib.decompress(body) if header.packing == _ZLIB else body
    if crc32(body) != header.checksum:
        raise BackendUnavailable(
            f"{where} is damaged: its checksum does not fit; restore an earlier version of it"
        )
    return header, body
