"""A cursor of the log: one place per queue, since every queue has a stream of its own.

A place is the number of the last row that was read, which is its id in the stream. Of queues that a cursor does not name nothing
was read, and all their rows must be there; after `start` (`is_open`) they are read from wherever they begin by then.
The epoch tells a store from another, and from what it was before it lost everything.
"""

from __future__ import annotations

import msgspec

from taskharbor.errors import InvalidRequest


class Cursor(msgspec.Struct, array_like=True, frozen=True):
    epoch: str
    is_open: bool
    places: dict[str, int]

    def __str__(self) -> str:
        return _encode(self).decode()

    def place(self, queue: str) -> int:
        return self.places.get(queue, 0)

    def is_strict(self, queue: str) -> bool:
        """Whether all rows after its place are to be there."""
        return not self.is_open or queue in self.places


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(Cursor).decode


def parse(text: str) -> Cursor:
    try:
        return _decode(text)
    except msgspec.MsgspecError:
        raise InvalidRequest(
            f"{text[:60]!r} is not a cursor of this store: pass on what `start` or `latest` gave"
        ) from None
