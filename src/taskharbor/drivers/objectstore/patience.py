"""Trying again, but not for ever, and not all at the same moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

_random = random.Random()


def pauses(*, first: float = 0.02, most: float = 1.0, tries: int = 5) -> Iterator[float]:
    """Seconds to wait before each further try: twice as long each time, and never the same for two."""
    longest = first
    for _ in range(tries - 1):
        yield longest * (0.5 + _random.random() / 2)
        longest = min(most, longest * 2)


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)
