"""What an object-store URL can say beyond where the store is."""

from __future__ import annotations

import msgspec

from taskharbor.drivers.objectstore.catalog import MAX_SHARDS
from taskharbor.drivers.objectstore.places import Place, place_options
from taskharbor.drivers.urls import Reader, seconds, whole
from taskharbor.errors import InvalidRequest


class Options(msgspec.Struct, frozen=True, kw_only=True):
    shards: int | None = None
    """Objects per queue; None: as many as the store was made with."""
    poll: float | None = 1.0
    """Seconds between looks at a queue that one waits for, to see what other processes did. None: there are none."""
    segment_rows: int = 1000
    """So many ended jobs or rows of the log stay in a queue's state before they go to a segment,"""
    segment_bytes: int = 256 * 1024
    """or so many bytes of them."""
    merge: int = 16
    """So many segments of one size become one of the next."""
    levels: int = 2
    """How often a segment is merged at most."""
    grace: float = 3600.0
    """Seconds for which a segment that was replaced stays, for those who are reading it."""


POLL = {"file": 0.05, "mem": None}
_OWN: dict[str, Reader] = {
    "shards": whole(1, MAX_SHARDS),
    "poll": seconds,
    "segment_rows": whole(1, 100_000),
    "segment_bytes": whole(1, 16 * 1024 * 1024),
    "merge": whole(2, 1000),
}


def options_of(place: Place) -> Options:
    values = dict(place.rest)
    found = {name: read(name, values.pop(name)) for name, read in _OWN.items() if name in values}
    if values:
        known = ", ".join(sorted([*_OWN, *place_options(place.scheme)]))
        raise InvalidRequest(
            f"{', '.join(sorted(values))}: no such option for {place.scheme}:// URLs; there are {known}"
        )
    return msgspec.convert({"poll": POLL.get(place.scheme, 1.0), **found}, Options)
