"""What a queue's state remembers of bulk writes: how much of each is in it already.

A bulk write comes to its queues portion by portion, and each portion is one change of a queue's object, together with the
note that it was made. So whoever goes on with a write that another has begun, or does the same at the same time, adds nothing
twice: not even jobs that were merged into another by their key, whose own ids nobody knows any more.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

MOST = 32
"""Writes that are remembered, the latest. Of one that is forgotten while it is under way, ids still tell what was added."""


class Published(msgspec.Struct, array_like=True, frozen=True, gc=False):
    number: int
    """Of the write in its series."""
    portions: int
    """So many of its portions are in this queue, or had nothing for it."""
    added: int
    """So many of its jobs became jobs of this queue."""


PublishedWrites: TypeAlias = dict[str, Published]
"""By series, the latest last."""


def noted(writes: PublishedWrites, series: str, mark: Published) -> PublishedWrites:
    """With this one as the latest, and without what is too many."""
    others = [(name, one) for name, one in writes.items() if name != series]
    return dict([*others[-(MOST - 1) :], (series, mark)])
