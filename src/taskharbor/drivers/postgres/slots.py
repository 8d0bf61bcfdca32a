"""How many calls may use a connection at the same time. The others stand in line.

Every call passes here twice, and nearly always finds a free place: that costs a comparison, where asyncio's semaphore takes
eight steps.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    def __init__(self, count: int) -> None:
        self._free = count
        self._line: deque[asyncio.Future[None]] = deque()

    def take_at_once(self) -> bool:
        """Whether there was a free place. Nobody overtakes those in line: a place is only free when the line is empty."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def take(self, timeout: float) -> None:
        """Raises TimeoutError where none becomes free in time."""
        if self.take_at_once():
            return
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            async with asyncio.timeout(timeout):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # It came in the very moment we gave up.
                self.give_back()
            else:
                turn.cancel()
            raise

    def give_back(self) -> None:
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
