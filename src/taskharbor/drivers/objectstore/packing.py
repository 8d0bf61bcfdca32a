"""Arrays in msgpack from items that are encoded already."""

from __future__ import annotations

from collections.abc import Collection


def array_head(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


def packed_array(pieces: Collection[bytes]) -> bytes:
    return array_head(len(pieces)) + b"".join(pieces)
