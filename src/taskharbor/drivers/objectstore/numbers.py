"""Numbers for jobs and log rows: within a queue they only ever grow, and between queues they follow time.

Every queue is an object of its own, so nothing counts all jobs or all rows of a store. A number is therefore made of the
time at which it was taken (this machine's, and only to put queues in an order: nothing is judged by it) and of a mark of its
queue, so that two queues have no number in common. Whatever the clock does, a queue goes on from its own last number.
"""

from __future__ import annotations

import threading
import time
from zlib import crc32

MARKS = 2048

_lock = threading.Lock()
_last = 0


def take_stamps(count: int) -> int:
    """The first of `count` stamps in a row, which nobody else in this process gets."""
    global _last
    with _lock:
        first = max(_last + 1, time.time_ns() // 1000)
        _last = first + count - 1
    return first


class Numbering:
    """The numbers of one queue (or one shard of it)."""

    __slots__ = ("_mark", "last")

    def __init__(self, place: str, last: int = 0) -> None:
        self._mark = crc32(place.encode()) % MARKS
        self.last = last
        """The last number that was given out."""

    def number(self, stamp: int) -> int:
        """For that stamp, or for a later one where this queue is already further."""
        number = stamp * MARKS + self._mark
        if number <= self.last:
            number = (self.last // MARKS + 1) * MARKS + self._mark
        self.last = number
        return number

    def next(self) -> int:
        return self.number(take_stamps(1))
