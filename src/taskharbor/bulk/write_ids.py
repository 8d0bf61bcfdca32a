"""Names of writes. A name is published at most once, however often somebody tries.

A write of its own has a name that nobody else will ever use. The batches of a stream form a series: `series/number`. Of a series
a store remembers only the latest number that was published, since earlier ones are never published after it.
"""

from __future__ import annotations

from taskharbor.ids import new_id

SINGLE = -1
"""The number of a write that belongs to no series."""


def new_write() -> str:
    return f"write-{new_id()}"


def numbered_write(series: str, number: int) -> str:
    return f"{series}/{number}"


def series_of(write: str) -> tuple[str, int]:
    """(series, number) of a write; a write of its own is a series of one."""
    series, separator, number = write.rpartition("/")
    return (series, int(number)) if separator and number.isdecimal() else (write, SINGLE)
