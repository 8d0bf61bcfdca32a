"""Keeps asking a backend that does not answer: with growing pauses, and one line in the log at each end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from taskharbor.errors import BackendUnavailable

log = logging.getLogger("taskharbor.worker")

T = TypeVar("T")

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0


class Outage:
    """Shared by a worker's loops, so that an outage is announced once and not once per loop."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._since: float | None = None
        self._random = rng or random.Random()

    @property
    def is_on(self) -> bool:
        return self._since is not None

    async def ride_out(
        self,
        call: Callable[[], Awaitable[T]],
        *,
        give_up: Callable[[], bool] = lambda: False,
        longest_pause: float = _LONGEST_PAUSE,
    ) -> T:
        """`call` until the backend answers. Operations are safe to repeat, so an unclear answer is simply asked again."""
        pause = min(_FIRST_PAUSE, longest_pause)
        loop = asyncio.get_running_loop()
        while True:
            try:
                answer = await call()
            except (BackendUnavailable, OSError) as error:
                if give_up():
                    raise
                if self._since is None:
                    self._since = loop.time()
                    log.warning("the backend does not answer (%s); trying until it does", error)
                await asyncio.sleep(pause * self._random.uniform(0.5, 1.0))
                pause = min(pause * 2, longest_pause)
                continue
            if self._since is not None:
                log.warning("the backend answers again after %.1f s", loop.time() - self._since)
                self._since = None
            return answer
