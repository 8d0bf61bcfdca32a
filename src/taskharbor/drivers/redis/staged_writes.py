"""What is written down of a bulk write: what its tasks have staged, and how it is to be published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

STAGED: Final = b"s"
"""In front of task and queue, before anything is staged there."""
COMPLETE: Final = b"c"
"""In front of a task that came to its end."""

_decode_place = msgspec.msgpack.Decoder(tuple[str, str]).decode
_decode_counts = msgspec.msgpack.Decoder(dict[str, int]).decode


class Share(msgspec.Struct, array_like=True):
    """What one queue gets."""

    queue: str
    tasks: list[str]
    jobs: int


class Plan(msgspec.Struct, array_like=True):
    begun_at: int
    """In seconds, by the server."""
    series: str
    number: int
    shares: list[Share]


decode_plan = msgspec.msgpack.Decoder(Plan).decode


class Staged:
    """What tasks of a write have said so far."""

    def __init__(self, pairs: Sequence[bytes]) -> None:
        self.places: list[tuple[str, str]] = []
        """Task and queue of every list that may be there."""
        self.complete: dict[str, dict[str, int]] = {}
        """How many jobs each task that came to its end has staged for which queue."""
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if name[:1] == STAGED:
                self.places.append(_decode_place(name[1:]))
            else:
                self.complete[name[1:].decode()] = _decode_counts(value)
