"""All that a handler does in these races: count, and tell when the first job and when the last one began.

Times are of the monotonic clock, which is one for all processes of a machine, and go out as lines on stdout. In a drain
two lines are written in all, so that counting costs next to nothing; for the pick-up every start is told.
"""

from __future__ import annotations

import time

_expected = 0
_seen = 0


def expect(count: int) -> None:
    """How many jobs the drain is about; 0 for a pick-up."""
    global _expected
    _expected = count


def mark(n: int) -> None:
    """Called by every handler, with the number that the job carries."""
    global _seen
    _seen += 1
    if not _expected:
        tell("started", n)
    elif _seen == 1:
        tell("first", n)
    elif _seen == _expected:
        tell("last", n)


def tell(what: str, n: int, at: float | None = None) -> None:
    print(what, n, time.monotonic() if at is None else at, flush=True)
