"""Reading segments, and keeping those that were read lately."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.segments import Segment

MAX_WEIGHT = 128 * 1024 * 1024
"""Bytes of memory, about; what a call needs it keeps besides until it is over."""


class Archive:
    """The segments of one handle, by the names of their objects."""

    def __init__(self, blobs: Blobs, max_weight: int = MAX_WEIGHT) -> None:
        self._blobs = blobs
        self._max_weight = max_weight
        self._weight = 0
        self._kept: OrderedDict[str, Segment] = OrderedDict()

    async def read(self, folder: str, names: Sequence[str]) -> dict[str, Segment]:
        """Those of the segments that are there."""
        found = await asyncio.gather(*(self._read(f"{folder}/{name}") for name in names))
        return {name: segment for name, segment in zip(names, found, strict=True) if segment is not None}

    async def _read(self, name: str) -> Segment | None:
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
            return kept
        blob = await self._blobs.read(name)
        if blob is None:
            return None
        segment = Segment(blob.data, f"{self._blobs.place}/{name}")
        self.keep(name, segment)
        return segment

    def keep(self, name: str, segment: Segment) -> None:
        if name not in self._kept:
            self._kept[name] = segment
            self._weight += segment.weight
            while self._weight > self._max_weight and len(self._kept) > 1:
                self._weight -= self._kept.popitem(last=False)[1].weight
