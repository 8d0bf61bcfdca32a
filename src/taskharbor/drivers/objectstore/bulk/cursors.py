"""A cursor of the log: one place per queue and shard, since each has a log of its own.

A place is the number of the last row that was read. Of logs that a cursor does not name nothing was read, and all their rows
must be there; after `start` (`is_open`) they are read from wherever they begin by then. The id tells a store from another,
and from one that was at the same place before; the beginning is that of any store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from taskharbor.drivers.objectstore.locating import Place
from taskharbor.errors import InvalidRequest


class Cursor(msgspec.Struct, array_like=True, frozen=True):
    store_id: str
    is_open: bool
    places: dict[str, list[int]]
    """By queue, for each of its shards; 0: before the first row."""

    def __str__(self) -> str:
        return _encode(self).decode()

    def at(self, place: Place) -> int:
        queue, shard = place
        numbers = self.places.get(queue, ())
        return numbers[shard] if shard < len(numbers) else 0

    def is_strict(self, place: Place) -> bool:
        """Whether all rows after its place are to be there."""
        return not self.is_open or self.at(place) > 0

    def logs(self) -> Iterator[Place]:
        return ((queue, shard) for queue, numbers in self.places.items() for shard in range(len(numbers)))


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(Cursor).decode

START = Cursor("", True, {})


def cursor_at(store_id: str, numbers: Iterable[tuple[Place, int]], *, is_open: bool = False) -> Cursor:
    places: dict[str, list[int]] = {}
    for (queue, shard), number in numbers:
        if number:
            of_queue = places.setdefault(queue, [])
            of_queue += [0] * (shard + 1 - len(of_queue))
            of_queue[shard] = number
    return Cursor(store_id, is_open, places)


def parsed(text: str, store_id: str, where: str) -> Cursor:
    try:
        cursor = _decode(text)
    except msgspec.MsgspecError:
        raise InvalidRequest(
            f"{text[:60]!r} is not a cursor of this store: pass on what `start` or `latest` gave"
        ) from None
    if cursor == START:
        return Cursor(store_id, True, {})
    if cursor.store_id != store_id:
        raise InvalidRequest(
            f"{where}: the cursor belongs to another store, or to one that was here before. Begin with a fresh checkpoint"
        )
    return cursor
