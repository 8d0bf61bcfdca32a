"""Cutting a range into shares of about the same size."""

from __future__ import annotations

from itertools import pairwise


def spans(after: int, until: int, parts: int, least: int) -> list[tuple[int, int]]:
    """The numbers above `after` up to `until`, in at most `parts` shares of at least `least` where there are so many."""
    size = until - after
    if size <= 0:
        return []
    count = max(1, min(parts, size // least))
    edges = [after + size * n // count for n in range(count + 1)]
    return list(pairwise(edges))
