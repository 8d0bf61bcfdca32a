"""Reading segments, and keeping those that were read or written lately."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.segments import Segment

MAX_WEIGHT = 128 * 1024 * 1024
"""Bytes of memory, about; what a call needs it keeps besides until it is over."""


class Archive:
    """The segments of one handle, by folder and name."""

    def __init__(self, blobs: Blobs, max_weight: int = MAX_WEIGHT) -> None:
        self._blobs = blobs
        self._max_weight = max_weight
        self._weight = 0
        self._kept: dict[str, dict[str, Segment]] = {}
        self._order: OrderedDict[tuple[str, str], None] = OrderedDict()
        """The one that was asked for least lately comes first."""

    def at_hand(self, folder: str) -> Mapping[str, Segment]:
        """What is kept of a queue, now: the first thing a call works with, so that it seldom has to be run again."""
        return self._kept.setdefault(folder, {})

    async def read(self, folder: str, names: Sequence[str]) -> dict[str, Segment]:
        """Those of the segments that are there."""
        found = await asyncio.gather(*(self._read(folder, name) for name in names))
        return {name: segment for name, segment in zip(names, found, strict=True) if segment is not None}

    async def _read(self, folder: str, name: str) -> Segment | None:
        kept = self.at_hand(folder).get(name)
        if kept is not None:
            self._order.move_to_end((folder, name))
            return kept
        blob = await self._blobs.read(f"{folder}/{name}")
        if blob is None:
            return None
        segment = Segment(blob.data, f"{self._blobs.place}/{folder}/{name}")
        self.keep(folder, name, segment)
        return segment

    def keep(self, folder: str, name: str, segment: Segment) -> None:
        kept = self._kept.setdefault(folder, {})
        if name not in kept:
            kept[name] = segment
            self._order[folder, name] = None
            self._weight += segment.weight
            while self._weight > self._max_weight and len(self._order) > 1:
                (other, oldest), _ = self._order.popitem(last=False)
                self._weight -= self._kept[other].pop(oldest).weight
